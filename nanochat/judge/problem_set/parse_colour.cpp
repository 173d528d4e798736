//@ difficulty: medium
//@ prompt
#include <array>
#include <cctype>
#include <optional>
#include <string>

// Reads a colour such as "#ff8000" and returns its red, green and blue parts, 0 to 255. The digits
// may be small or capital letters. Returns nothing for any other text.
std::optional<std::array<int, 3>> parse_colour(const std::string& text) {
//@ solution
    if (text.size() != 7 || text[0] != '#') return std::nullopt;
    std::array<int, 3> parts{};
    for (std::size_t i = 1; i < 7; ++i) {
        const unsigned char c = text[i];
        if (!std::isxdigit(c)) return std::nullopt;
        const int digit = std::isdigit(c) ? c - '0' : std::tolower(c) - 'a' + 10;
        parts[(i - 1) / 2] = 16 * parts[(i - 1) / 2] + digit;
    }
    return parts;
}
//@ tests
#include <cassert>

int main() {
    assert((parse_colour("#ff8000") == std::array<int, 3>{255, 128, 0}));
    assert((parse_colour("#0A1b2C") == std::array<int, 3>{10, 27, 44}));
    assert(!parse_colour("ff8000#"));
    assert(!parse_colour("0ff8000"));
    assert(!parse_colour("#ff80000"));
    assert(!parse_colour("#ff80"));
    assert(!parse_colour("#ff80zz"));
    assert(!parse_colour(""));
}
