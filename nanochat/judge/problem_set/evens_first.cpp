//@ difficulty: easy
//@ prompt
#include <vector>

// Returns the same numbers with all even ones before all odd ones. Even numbers keep their order
// among each other, and so do odd numbers.
std::vector<int> evens_first(const std::vector<int>& numbers) {
//@ solution
    std::vector<int> sorted, odd;
    for (int number : numbers) {
        (number % 2 == 0 ? sorted : odd).push_back(number);
    }
    sorted.insert(sorted.end(), odd.begin(), odd.end());
    return sorted;
}
//@ tests
#include <cassert>

int main() {
    assert((evens_first({3, 2, 1, 4}) == std::vector<int>{2, 4, 3, 1}));
    assert((evens_first({-1, -2}) == std::vector<int>{-2, -1}));
    assert((evens_first({1, 3}) == std::vector<int>{1, 3}));
    assert(evens_first({}).empty());
}
