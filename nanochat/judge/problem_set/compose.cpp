//@ difficulty: medium
//@ prompt
#include <utility>

// Returns a function that calls `inner` with its argument and then `outer` with the result of that.
template <typename Outer, typename Inner>
auto compose(Outer outer, Inner inner) {
//@ solution
    return [outer, inner](auto&& argument) {
        return outer(inner(std::forward<decltype(argument)>(argument)));
    };
}
//@ tests
#include <cassert>
#include <string>

int main() {
    auto twice = [](int x) { return 2 * x; };
    auto next = [](int x) { return x + 1; };
    assert(compose(twice, next)(3) == 8);
    assert(compose(next, twice)(3) == 7);
    auto length = [](const std::string& text) { return static_cast<int>(text.size()); };
    assert(compose(twice, length)(std::string("abc")) == 6);
    assert(compose(compose(next, next), next)(0) == 3);
}
