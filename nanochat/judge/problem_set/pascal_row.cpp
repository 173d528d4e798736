//@ difficulty: easy
//@ prompt
#include <vector>

// Returns row n of Pascal's triangle, in which each number is the sum of the two above it. Row 0 is
// a single 1.
std::vector<long long> pascal_row(int n) {
//@ solution
    std::vector<long long> row{1};
    for (int i = 0; i < n; ++i) {
        row.push_back(0);
        for (std::size_t j = row.size() - 1; j > 0; --j) {
            row[j] += row[j - 1];
        }
    }
    return row;
}
//@ tests
#include <cassert>

int main() {
    assert((pascal_row(0) == std::vector<long long>{1}));
    assert((pascal_row(1) == std::vector<long long>{1, 1}));
    assert((pascal_row(4) == std::vector<long long>{1, 4, 6, 4, 1}));
    assert(pascal_row(40)[20] == 137846528820LL);
}
