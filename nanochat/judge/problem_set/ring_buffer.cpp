//@ difficulty: medium
//@ prompt
#include <array>
#include <cstddef>

// A queue that holds the last N values. push() adds one and, if the buffer is full, overwrites the
// oldest. size() is the number of values, and buffer[0] is the oldest of them.
template <typename T, std::size_t N>
class RingBuffer {
public:
    void push(const T& value) {
//@ solution
        values_[(first_ + size_) % N] = value;
        if (size_ < N) {
            ++size_;
        } else {
            first_ = (first_ + 1) % N;
        }
    }

    std::size_t size() const { return size_; }

    const T& operator[](std::size_t i) const { return values_[(first_ + i) % N]; }

private:
    std::array<T, N> values_{};
    std::size_t first_ = 0, size_ = 0;
};
//@ tests
#include <cassert>
#include <string>

int main() {
    RingBuffer<int, 3> numbers;
    assert(numbers.size() == 0);
    for (int i = 1; i <= 3; ++i) numbers.push(i);
    assert(numbers.size() == 3 && numbers[0] == 1 && numbers[2] == 3);
    for (int i = 4; i <= 8; ++i) numbers.push(i);
    assert(numbers.size() == 3 && numbers[0] == 6 && numbers[1] == 7 && numbers[2] == 8);
    RingBuffer<std::string, 2> words;
    words.push("a");
    assert(words.size() == 1 && words[0] == "a");
}
