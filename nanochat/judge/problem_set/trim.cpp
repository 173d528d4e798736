//@ difficulty: easy
//@ prompt
#include <string>

// Returns the text without the spaces, tabs and line ends at its beginning and at its end.
std::string trim(const std::string& text) {
//@ solution
    const char* blank = " \t\r\n";
    const std::size_t first = text.find_first_not_of(blank);
    if (first == std::string::npos) return "";
    return text.substr(first, text.find_last_not_of(blank) - first + 1);
}
//@ tests
#include <cassert>

int main() {
    assert(trim("  two words \t\r\n") == "two words");
    assert(trim("x") == "x");
    assert(trim("\n x") == "x");
    assert(trim(" \t ") == "");
    assert(trim("") == "");
}
