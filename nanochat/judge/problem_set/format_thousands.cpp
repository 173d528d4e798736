//@ difficulty: medium
//@ prompt
#include <string>

// Writes a whole number with a comma before every three digits from the right: 1234567 becomes
// "1,234,567".
std::string format_thousands(long long number) {
//@ solution
    std::string digits = std::to_string(number);
    const int begin = number < 0 ? 1 : 0;
    for (int i = static_cast<int>(digits.size()) - 3; i > begin; i -= 3) {
        digits.insert(i, ",");
    }
    return digits;
}
//@ tests
#include <cassert>

int main() {
    assert(format_thousands(1234567) == "1,234,567");
    assert(format_thousands(1000) == "1,000");
    assert(format_thousands(999) == "999");
    assert(format_thousands(-999) == "-999");
    assert(format_thousands(-123456) == "-123,456");
    assert(format_thousands(0) == "0");
}
