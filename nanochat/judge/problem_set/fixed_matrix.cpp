//@ difficulty: hard
//@ prompt
#include <array>
#include <cstddef>

// A matrix with R rows and C columns. Only matrices whose sizes match can be multiplied, and the
// compiler checks that.
template <typename T, std::size_t R, std::size_t C>
struct Matrix {
    std::array<std::array<T, C>, R> rows{};
};

template <typename T, std::size_t R, std::size_t N, std::size_t C>
Matrix<T, R, C> operator*(const Matrix<T, R, N>& left, const Matrix<T, N, C>& right) {
//@ solution
    Matrix<T, R, C> product;
    for (std::size_t i = 0; i < R; ++i) {
        for (std::size_t j = 0; j < C; ++j) {
            for (std::size_t k = 0; k < N; ++k) {
                product.rows[i][j] += left.rows[i][k] * right.rows[k][j];
            }
        }
    }
    return product;
}
//@ tests
#include <cassert>

int main() {
    const Matrix<int, 2, 3> left{{{{1, 2, 3}, {4, 5, 6}}}};
    const Matrix<int, 3, 2> right{{{{7, 8}, {9, 10}, {11, 12}}}};
    const auto product = left * right;
    assert(product.rows[0][0] == 58 && product.rows[0][1] == 64);
    assert(product.rows[1][0] == 139 && product.rows[1][1] == 154);
    const Matrix<double, 1, 1> one{{{{1.5}}}};
    assert((one * one).rows[0][0] == 2.25);
}
