//@ difficulty: easy
//@ prompt
#include <unordered_set>
#include <vector>

// Returns the numbers without repetitions: of equal numbers only the first is kept, and the order
// stays.
std::vector<int> unique_in_order(const std::vector<int>& numbers) {
//@ solution
    std::unordered_set<int> seen;
    std::vector<int> kept;
    for (int number : numbers) {
        if (seen.insert(number).second) kept.push_back(number);
    }
    return kept;
}
//@ tests
#include <cassert>

int main() {
    assert((unique_in_order({3, 1, 3, 2, 1}) == std::vector<int>{3, 1, 2}));
    assert((unique_in_order({5, 5, 5}) == std::vector<int>{5}));
    assert(unique_in_order({}).empty());
}
