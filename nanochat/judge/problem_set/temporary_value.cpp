//@ difficulty: easy
//@ prompt
#include <utility>

// Gives a variable another value for the time of a scope: the old value comes back when the object
// is destroyed.
template <typename T>
class TemporaryValue {
public:
//@ solution
    TemporaryValue(T& variable, T value) : variable_(variable), old_(std::move(variable)) {
        variable_ = std::move(value);
    }

    ~TemporaryValue() { variable_ = std::move(old_); }

private:
    T& variable_;
    T old_;
};
//@ tests
#include <cassert>
#include <string>

int main() {
    int depth = 1;
    std::string name = "outer";
    {
        TemporaryValue<int> other_depth(depth, 2);
        TemporaryValue<std::string> other_name(name, "inner");
        assert(depth == 2 && name == "inner");
        depth = 7;
    }
    assert(depth == 1 && name == "outer");
}
