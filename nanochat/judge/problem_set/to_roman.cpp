//@ difficulty: medium
//@ prompt
#include <string>
#include <utility>

// Writes a number from 1 to 3999 in Roman numerals: 1994 becomes "MCMXCIV".
std::string to_roman(int number) {
//@ solution
    const std::pair<int, const char*> symbols[] = {
        {1000, "M"}, {900, "CM"}, {500, "D"}, {400, "CD"}, {100, "C"}, {90, "XC"},
        {50, "L"}, {40, "XL"}, {10, "X"}, {9, "IX"}, {5, "V"}, {4, "IV"}, {1, "I"}};
    std::string roman;
    for (const auto& [value, symbol] : symbols) {
        while (number >= value) {
            roman += symbol;
            number -= value;
        }
    }
    return roman;
}
//@ tests
#include <cassert>

int main() {
    assert(to_roman(1994) == "MCMXCIV");
    assert(to_roman(3999) == "MMMCMXCIX");
    assert(to_roman(448) == "CDXLVIII");
    assert(to_roman(1) == "I");
}
