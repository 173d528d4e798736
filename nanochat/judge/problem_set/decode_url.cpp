//@ difficulty: medium
//@ prompt
#include <cctype>
#include <string>

// Decodes a part of a URL: %41 stands for the character with the hexadecimal code 41, and + for a
// space. A % that is not followed by two hexadecimal digits stays as it is.
std::string decode_url(const std::string& text) {
//@ solution
    std::string decoded;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '+') {
            decoded += ' ';
        } else if (text[i] == '%' && i + 2 < text.size() && std::isxdigit(static_cast<unsigned char>(text[i + 1])) &&
                   std::isxdigit(static_cast<unsigned char>(text[i + 2]))) {
            decoded += static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16));
            i += 2;
        } else {
            decoded += text[i];
        }
    }
    return decoded;
}
//@ tests
#include <cassert>

int main() {
    assert(decode_url("a%20b+c") == "a b c");
    assert(decode_url("%41%6a") == "Aj");
    assert(decode_url("100%") == "100%");
    assert(decode_url("%4") == "%4");
    assert(decode_url("%zz1%4g") == "%zz1%4g");
    assert(decode_url("") == "");
}
