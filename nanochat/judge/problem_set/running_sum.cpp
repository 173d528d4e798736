//@ difficulty: easy
//@ prompt
#include <vector>

// Returns, for each position, the sum of all values up to and with the value at that position.
std::vector<long> running_sum(const std::vector<int>& values) {
//@ solution
    std::vector<long> sums;
    long sum = 0;
    for (int value : values) {
        sum += value;
        sums.push_back(sum);
    }
    return sums;
}
//@ tests
#include <cassert>

int main() {
    assert((running_sum({1, 2, 3, 4}) == std::vector<long>{1, 3, 6, 10}));
    assert((running_sum({5, -5, 2}) == std::vector<long>{5, 0, 2}));
    assert((running_sum({2000000000, 2000000000}) == std::vector<long>{2000000000, 4000000000}));
    assert(running_sum({}).empty());
}
