//@ difficulty: easy
//@ prompt
#include <vector>

// Returns the matrix with its rows as columns. All rows of the matrix have the same length, and
// there is at least one.
std::vector<std::vector<int>> transpose(const std::vector<std::vector<int>>& matrix) {
//@ solution
    std::vector<std::vector<int>> turned(matrix[0].size());
    for (const auto& row : matrix) {
        for (std::size_t i = 0; i < row.size(); ++i) {
            turned[i].push_back(row[i]);
        }
    }
    return turned;
}
//@ tests
#include <cassert>

int main() {
    using Matrix = std::vector<std::vector<int>>;
    assert((transpose({{1, 2, 3}, {4, 5, 6}}) == Matrix{{1, 4}, {2, 5}, {3, 6}}));
    assert((transpose({{1}}) == Matrix{{1}}));
    assert((transpose({{1, 2}}) == Matrix{{1}, {2}}));
}
