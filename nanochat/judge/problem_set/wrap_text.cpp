//@ difficulty: hard
//@ prompt
#include <sstream>
#include <string>
#include <vector>

// Breaks the text into lines of at most `width` characters, with one space between the words of a
// line and as many words on each line as fit. A word longer than the width stands alone on its
// line.
std::vector<std::string> wrap_text(const std::string& text, std::size_t width) {
//@ solution
    std::istringstream input(text);
    std::vector<std::string> lines;
    std::string word;
    while (input >> word) {
        if (!lines.empty() && lines.back().size() + 1 + word.size() <= width) {
            lines.back() += " " + word;
        } else {
            lines.push_back(word);
        }
    }
    return lines;
}
//@ tests
#include <cassert>

int main() {
    using Lines = std::vector<std::string>;
    assert((wrap_text("the quick brown fox", 10) == Lines{"the quick", "brown fox"}));
    assert((wrap_text("the quick brown fox", 9) == Lines{"the quick", "brown fox"}));
    assert((wrap_text("a   bb\nccc", 4) == Lines{"a bb", "ccc"}));
    assert((wrap_text("a enormous b", 3) == Lines{"a", "enormous", "b"}));
    assert(wrap_text("  ", 5).empty());
}
