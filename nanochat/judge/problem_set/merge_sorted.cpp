//@ difficulty: medium
//@ prompt
#include <vector>

// Merges two vectors, each of which is sorted in ascending order, into one vector that is sorted.
std::vector<int> merge_sorted(const std::vector<int>& left, const std::vector<int>& right) {
//@ solution
    std::vector<int> merged;
    std::size_t i = 0, j = 0;
    while (i < left.size() || j < right.size()) {
        if (j == right.size() || (i < left.size() && left[i] <= right[j])) {
            merged.push_back(left[i++]);
        } else {
            merged.push_back(right[j++]);
        }
    }
    return merged;
}
//@ tests
#include <cassert>

int main() {
    assert((merge_sorted({1, 4, 6}, {2, 4, 9}) == std::vector<int>{1, 2, 4, 4, 6, 9}));
    assert((merge_sorted({}, {1, 2}) == std::vector<int>{1, 2}));
    assert((merge_sorted({3}, {}) == std::vector<int>{3}));
    assert(merge_sorted({}, {}).empty());
}
