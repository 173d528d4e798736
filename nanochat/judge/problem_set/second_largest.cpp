//@ difficulty: easy
//@ prompt
#include <optional>
#include <vector>

// Returns the second largest of the different values, or nothing if there are fewer than two
// different values.
std::optional<int> second_largest(const std::vector<int>& values) {
//@ solution
    std::optional<int> first, second;
    for (int value : values) {
        if (!first || value > *first) {
            second = first;
            first = value;
        } else if (value < *first && (!second || value > *second)) {
            second = value;
        }
    }
    return second;
}
//@ tests
#include <cassert>

int main() {
    assert(second_largest({3, 1, 2}) == 2);
    assert(second_largest({5, 5, 4}) == 4);
    assert(second_largest({1, 2, 3}) == 2);
    assert(second_largest({-2, -7}) == -7);
    assert(!second_largest({4, 4}));
    assert(!second_largest({}));
}
