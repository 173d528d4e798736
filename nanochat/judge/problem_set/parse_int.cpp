//@ difficulty: medium
//@ prompt
#include <limits>
#include <optional>
#include <string>

// Reads a decimal number with an optional sign, + or -. Returns nothing if the text is anything
// else, such as empty or with a character after the number, or if the number does not fit into an
// int.
std::optional<int> parse_int(const std::string& text) {
//@ solution
    const bool has_sign = !text.empty() && (text[0] == '+' || text[0] == '-');
    if (text.size() == (has_sign ? 1u : 0u)) return std::nullopt;
    long long value = 0;
    for (std::size_t i = has_sign ? 1 : 0; i < text.size(); ++i) {
        if (text[i] < '0' || text[i] > '9') return std::nullopt;
        value = 10 * value + (text[i] - '0');
        if (value > 1LL + std::numeric_limits<int>::max()) return std::nullopt;
    }
    if (text[0] == '-') value = -value;
    if (value > std::numeric_limits<int>::max()) return std::nullopt;
    return static_cast<int>(value);
}
//@ tests
#include <cassert>

int main() {
    assert(parse_int("42") == 42);
    assert(parse_int("-17") == -17);
    assert(parse_int("+5") == 5);
    assert(parse_int("2147483647") == 2147483647);
    assert(parse_int("-2147483648") == std::numeric_limits<int>::min());
    assert(!parse_int("2147483648"));
    assert(!parse_int("99999999999999999999999"));
    assert(!parse_int("18446744073709551617"));
    assert(!parse_int(""));
    assert(!parse_int("-"));
    assert(!parse_int("1a"));
}
