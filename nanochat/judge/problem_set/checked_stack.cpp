//@ difficulty: medium
//@ prompt
#include <stdexcept>
#include <utility>
#include <vector>

// A stack of values of any type. pop() removes the value on top and returns it; on an empty stack
// it throws std::out_of_range. push() returns the stack itself, so that calls can be chained.
template <typename T>
class Stack {
public:
//@ solution
    Stack& push(T value) {
        values_.push_back(std::move(value));
        return *this;
    }

    T pop() {
        if (values_.empty()) throw std::out_of_range("the stack is empty");
        T top = std::move(values_.back());
        values_.pop_back();
        return top;
    }

    std::size_t size() const { return values_.size(); }

private:
    std::vector<T> values_;
};
//@ tests
#include <cassert>
#include <memory>

int main() {
    Stack<int> numbers;
    numbers.push(1).push(2);
    assert(numbers.size() == 2);
    assert(numbers.pop() == 2 && numbers.pop() == 1);
    bool thrown = false;
    try {
        numbers.pop();
    } catch (const std::out_of_range&) {
        thrown = true;
    }
    assert(thrown && numbers.size() == 0);
    Stack<std::unique_ptr<int>> owners;
    owners.push(std::make_unique<int>(3));
    assert(*owners.pop() == 3);
}
