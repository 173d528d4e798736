//@ difficulty: medium
//@ prompt
#include <algorithm>
#include <vector>

// Combines two vectors element by element with a function of two arguments. The result is as long
// as the shorter of them.
template <typename A, typename B, typename Function>
auto zip_with(const std::vector<A>& left, const std::vector<B>& right, Function function) {
//@ solution
    std::vector<decltype(function(left[0], right[0]))> results;
    for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
        results.push_back(function(left[i], right[i]));
    }
    return results;
}
//@ tests
#include <cassert>
#include <string>

int main() {
    auto product = zip_with(std::vector<int>{1, 2, 3}, std::vector<double>{0.5, 1.5},
                            [](int a, double b) { return a * b; });
    assert((product == std::vector<double>{0.5, 3.0}));
    auto lengths = zip_with(std::vector<std::string>{"ab"}, std::vector<int>{3, 4},
                            [](const std::string& text, int n) { return static_cast<int>(text.size()) * n; });
    assert((lengths == std::vector<int>{6}));
    assert(zip_with(std::vector<int>{}, std::vector<int>{1}, [](int a, int b) { return a + b; }).empty());
}
