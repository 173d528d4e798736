//@ difficulty: easy
//@ prompt
// Returns the sum of all its arguments, which may be of different types and of which there is at
// least one.
template <typename... Numbers>
auto sum_all(Numbers... numbers) {
//@ solution
    return (numbers + ...);
}
//@ tests
#include <cassert>
#include <string>

int main() {
    assert(sum_all(1) == 1);
    assert(sum_all(1, 2, 3) == 6);
    assert(sum_all(1, 0.5) == 1.5);
    assert(sum_all(std::string("a"), "b") == "ab");
}
