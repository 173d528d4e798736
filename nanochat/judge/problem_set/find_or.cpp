//@ difficulty: medium
//@ prompt
#include <iterator>

// Returns the first element of the container for which the condition holds, or `otherwise` if there
// is none.
template <typename Container, typename Condition>
auto find_or(const Container& container, Condition condition, typename Container::value_type otherwise) {
//@ solution
    for (const auto& element : container) {
        if (condition(element)) return element;
    }
    return otherwise;
}
//@ tests
#include <cassert>
#include <list>
#include <string>
#include <vector>

int main() {
    auto is_large = [](int x) { return x > 10; };
    assert(find_or(std::vector<int>{1, 20, 30}, is_large, 0) == 20);
    assert(find_or(std::vector<int>{1, 2}, is_large, -1) == -1);
    assert(find_or(std::vector<int>{}, is_large, 5) == 5);
    auto is_empty = [](const std::string& text) { return text.empty(); };
    assert(find_or(std::list<std::string>{"a", "b"}, is_empty, "none") == "none");
}
