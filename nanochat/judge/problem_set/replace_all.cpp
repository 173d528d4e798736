//@ difficulty: medium
//@ prompt
#include <string>

// Returns the text with every occurrence of `from` replaced by `to`, found from left to right. What
// was inserted is not searched again. If `from` is empty, the text is returned as it is.
std::string replace_all(std::string text, const std::string& from, const std::string& to) {
//@ solution
    if (from.empty()) return text;
    std::size_t position = 0;
    while ((position = text.find(from, position)) != std::string::npos) {
        text.replace(position, from.size(), to);
        position += to.size();
    }
    return text;
}
//@ tests
#include <cassert>

int main() {
    assert(replace_all("a-b-c", "-", "--") == "a--b--c");
    assert(replace_all("aaa", "aa", "b") == "ba");
    assert(replace_all("abc", "x", "y") == "abc");
    assert(replace_all("abab", "ab", "") == "");
    assert(replace_all("abc", "", "y") == "abc");
}
