//@ difficulty: medium
//@ prompt
#include <cctype>
#include <string>

// Unpacks a text in which a number before a character says how often to repeat it: "3ab2c" becomes
// "aaabcc". A character without a number stands for itself.
std::string expand(const std::string& packed) {
//@ solution
    std::string text;
    std::size_t count = 0;
    bool has_count = false;
    for (unsigned char c : packed) {
        if (std::isdigit(c)) {
            count = 10 * count + (c - '0');
            has_count = true;
        } else {
            text.append(has_count ? count : 1, static_cast<char>(c));
            count = 0;
            has_count = false;
        }
    }
    return text;
}
//@ tests
#include <cassert>

int main() {
    assert(expand("3ab2c") == "aaabcc");
    assert(expand("12x") == "xxxxxxxxxxxx");
    assert(expand("0ab") == "b");
    assert(expand("abc") == "abc");
    assert(expand("") == "");
}
