//@ difficulty: medium
//@ prompt
#include <cctype>
#include <string>

// Returns the seconds of a duration such as "1h30m", "45s" or "2h5s": whole numbers, each followed
// by its unit, h, m or s. For a text of any other form it returns -1.
long parse_duration(const std::string& text) {
//@ solution
    long seconds = 0, number = -1;
    for (unsigned char c : text) {
        if (std::isdigit(c)) {
            number = (number < 0 ? 0 : 10 * number) + (c - '0');
            continue;
        }
        const long unit = c == 'h' ? 3600 : c == 'm' ? 60 : c == 's' ? 1 : -1;
        if (unit < 0 || number < 0) return -1;
        seconds += unit * number;
        number = -1;
    }
    return text.empty() || number >= 0 ? -1 : seconds;
}
//@ tests
#include <cassert>

int main() {
    assert(parse_duration("1h30m") == 5400);
    assert(parse_duration("45s") == 45);
    assert(parse_duration("2h5s") == 7205);
    assert(parse_duration("100m") == 6000);
    assert(parse_duration("0s") == 0);
    assert(parse_duration("10") == -1);
    assert(parse_duration("h") == -1);
    assert(parse_duration("1hm") == -1);
    assert(parse_duration("5x") == -1);
    assert(parse_duration("") == -1);
}
