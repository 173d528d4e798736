//@ difficulty: easy
//@ prompt
#include <string>
#include <vector>

// Returns the parts of the text between the separators, the empty parts too. An empty text has one
// part, which is empty.
std::vector<std::string> split(const std::string& text, char separator) {
//@ solution
    std::vector<std::string> parts(1);
    for (char c : text) {
        if (c == separator) {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}
//@ tests
#include <cassert>

int main() {
    assert((split("a,bc,,d", ',') == std::vector<std::string>{"a", "bc", "", "d"}));
    assert((split(";", ';') == std::vector<std::string>{"", ""}));
    assert((split("a b", ',') == std::vector<std::string>{"a b"}));
    assert((split("", ',') == std::vector<std::string>{""}));
}
