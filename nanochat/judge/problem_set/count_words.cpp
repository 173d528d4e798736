//@ difficulty: easy
//@ prompt
#include <cctype>
#include <string>

// Returns the number of words in the text. Words are separated by one or more characters of white
// space.
int count_words(const std::string& text) {
//@ solution
    int count = 0;
    bool inside = false;
    for (unsigned char c : text) {
        const bool is_space = std::isspace(c) != 0;
        if (!is_space && !inside) ++count;
        inside = !is_space;
    }
    return count;
}
//@ tests
#include <cassert>

int main() {
    assert(count_words("one two  three\n") == 3);
    assert(count_words("  one") == 1);
    assert(count_words("word") == 1);
    assert(count_words(" \t\n") == 0);
    assert(count_words("") == 0);
}
