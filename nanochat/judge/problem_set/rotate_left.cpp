//@ difficulty: easy
//@ prompt
#include <algorithm>
#include <vector>

// Moves every element `count` places towards the front. What leaves the front comes back at the
// end, in the same order. `count` may be larger than the number of elements.
std::vector<int> rotate_left(std::vector<int> values, std::size_t count) {
//@ solution
    if (values.empty()) return values;
    std::rotate(values.begin(), values.begin() + count % values.size(), values.end());
    return values;
}
//@ tests
#include <cassert>

int main() {
    assert((rotate_left({1, 2, 3, 4}, 1) == std::vector<int>{2, 3, 4, 1}));
    assert((rotate_left({1, 2, 3}, 5) == std::vector<int>{3, 1, 2}));
    assert((rotate_left({1, 2}, 0) == std::vector<int>{1, 2}));
    assert(rotate_left({}, 3).empty());
}
