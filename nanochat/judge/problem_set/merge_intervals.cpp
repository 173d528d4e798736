//@ difficulty: hard
//@ prompt
#include <algorithm>
#include <utility>
#include <vector>

// Returns the union of closed intervals (first, last) as intervals that neither overlap nor touch,
// in ascending order.
std::vector<std::pair<int, int>> merge_intervals(std::vector<std::pair<int, int>> intervals) {
//@ solution
    std::sort(intervals.begin(), intervals.end());
    std::vector<std::pair<int, int>> merged;
    for (const auto& [first, last] : intervals) {
        if (!merged.empty() && first <= merged.back().second) {
            merged.back().second = std::max(merged.back().second, last);
        } else {
            merged.emplace_back(first, last);
        }
    }
    return merged;
}
//@ tests
#include <cassert>

int main() {
    using Intervals = std::vector<std::pair<int, int>>;
    assert((merge_intervals({{8, 10}, {1, 3}, {2, 6}}) == Intervals{{1, 6}, {8, 10}}));
    assert((merge_intervals({{1, 4}, {4, 5}}) == Intervals{{1, 5}}));
    assert((merge_intervals({{1, 10}, {2, 3}}) == Intervals{{1, 10}}));
    assert(merge_intervals({}).empty());
}
