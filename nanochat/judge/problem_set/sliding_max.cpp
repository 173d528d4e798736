//@ difficulty: hard
//@ prompt
#include <deque>
#include <vector>

// Returns the largest value of each window of `width` neighbours, from left to right, in time that
// does not depend on the width. The width is at least 1; if there are fewer values than that, there
// is no window.
std::vector<int> sliding_max(const std::vector<int>& values, std::size_t width) {
//@ solution
    std::vector<int> largest;
    std::deque<std::size_t> candidates;
    for (std::size_t i = 0; i < values.size(); ++i) {
        while (!candidates.empty() && values[candidates.back()] <= values[i]) candidates.pop_back();
        candidates.push_back(i);
        if (candidates.front() + width <= i) candidates.pop_front();
        if (i + 1 >= width) largest.push_back(values[candidates.front()]);
    }
    return largest;
}
//@ tests
#include <cassert>

int main() {
    assert((sliding_max({1, 3, -1, -3, 5, 3, 6, 7}, 3) == std::vector<int>{3, 3, 5, 5, 6, 7}));
    assert((sliding_max({4, 3, 2, 1}, 2) == std::vector<int>{4, 3, 2}));
    assert((sliding_max({2, 2, 1}, 1) == std::vector<int>{2, 2, 1}));
    assert(sliding_max({1, 2}, 3).empty());
    std::vector<int> many(200000);
    for (int i = 0; i < 200000; ++i) many[i] = -i;
    assert(sliding_max(many, 100000).back() == -100000);
}
