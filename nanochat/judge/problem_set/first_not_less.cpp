//@ difficulty: medium
//@ prompt
#include <cstddef>
#include <vector>

// Returns the index of the first element that is not less than the value, or the number of elements
// if all are less. The elements are sorted in ascending order; the function looks at a logarithmic
// number of them.
std::size_t first_not_less(const std::vector<int>& sorted, int value) {
//@ solution
    std::size_t low = 0, high = sorted.size();
    while (low < high) {
        const std::size_t middle = low + (high - low) / 2;
        if (sorted[middle] < value) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}
//@ tests
#include <cassert>

int main() {
    const std::vector<int> sorted{1, 3, 3, 5, 8};
    assert(first_not_less(sorted, 0) == 0);
    assert(first_not_less(sorted, 3) == 1);
    assert(first_not_less(sorted, 4) == 3);
    assert(first_not_less(sorted, 8) == 4);
    assert(first_not_less(sorted, 9) == 5);
    assert(first_not_less({}, 1) == 0);
}
