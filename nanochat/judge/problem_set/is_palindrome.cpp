//@ difficulty: easy
//@ prompt
#include <cctype>
#include <string>

// Returns whether the text reads the same from both ends, if only its letters and digits count and
// not their case.
bool is_palindrome(const std::string& text) {
//@ solution
    std::string kept;
    for (unsigned char c : text) {
        if (std::isalnum(c)) kept += static_cast<char>(std::tolower(c));
    }
    return kept == std::string(kept.rbegin(), kept.rend());
}
//@ tests
#include <cassert>

int main() {
    assert(is_palindrome("A man, a plan, a canal: Panama!"));
    assert(is_palindrome("12 21"));
    assert(is_palindrome(""));
    assert(!is_palindrome("ab"));
    assert(!is_palindrome("Abc, bb"));
}
