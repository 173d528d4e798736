//@ difficulty: hard
//@ prompt
#include <cctype>
#include <string>

// Computes an expression of whole numbers with +, *, parentheses and spaces, such as "2 * (3 + 4)".
// The operator * binds more tightly than +. The expression is well formed.
class Calculator {
public:
    static long evaluate(const std::string& text) {
        Calculator calculator{text};
        return calculator.sum();
    }

private:
    explicit Calculator(const std::string& text) : text_(text) {}

    char peek() {
        while (position_ < text_.size() && text_[position_] == ' ') ++position_;
        return position_ < text_.size() ? text_[position_] : '\0';
    }

    std::string text_;
    std::size_t position_ = 0;

    long sum() {
//@ solution
        long value = product();
        while (peek() == '+') {
            ++position_;
            value += product();
        }
        return value;
    }

    long product() {
        long value = factor();
        while (peek() == '*') {
            ++position_;
            value *= factor();
        }
        return value;
    }

    long factor() {
        if (peek() == '(') {
            ++position_;
            const long value = sum();
            peek();
            ++position_;
            return value;
        }
        long value = 0;
        while (std::isdigit(static_cast<unsigned char>(text_[position_]))) {
            value = 10 * value + (text_[position_++] - '0');
        }
        return value;
    }
};
//@ tests
#include <cassert>

int main() {
    assert(Calculator::evaluate("42") == 42);
    assert(Calculator::evaluate("2+3*4") == 14);
    assert(Calculator::evaluate("2 * 3 + 4") == 10);
    assert(Calculator::evaluate("2 * ( 3 + (4 ) ) * 10") == 140);
    assert(Calculator::evaluate("((1+1))*(2)") == 4);
}
