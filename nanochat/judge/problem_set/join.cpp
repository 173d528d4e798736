//@ difficulty: easy
//@ prompt
#include <string>
#include <vector>

// Returns all the words in one string, with the separator between any two of them and none at the
// ends.
std::string join(const std::vector<std::string>& words, const std::string& separator) {
//@ solution
    std::string joined;
    for (std::size_t i = 0; i < words.size(); ++i) {
        if (i > 0) joined += separator;
        joined += words[i];
    }
    return joined;
}
//@ tests
#include <cassert>

int main() {
    assert(join({"a", "b", "c"}, ", ") == "a, b, c");
    assert(join({"", ""}, "-") == "-");
    assert(join({"one"}, "-") == "one");
    assert(join({}, "-") == "");
}
