//@ difficulty: medium
//@ prompt
#include <string>
#include <vector>

// Returns the longest text with which all of the words begin. If there are no words at all, it is
// empty.
std::string common_prefix(const std::vector<std::string>& words) {
//@ solution
    if (words.empty()) return "";
    std::string prefix = words.front();
    for (const std::string& word : words) {
        while (word.compare(0, prefix.size(), prefix) != 0) prefix.pop_back();
    }
    return prefix;
}
//@ tests
#include <cassert>

int main() {
    assert(common_prefix({"interval", "internal", "interact"}) == "inter");
    assert(common_prefix({"same", "same"}) == "same");
    assert(common_prefix({"ab", "abc", "a"}) == "a");
    assert(common_prefix({"x", "y"}) == "");
    assert(common_prefix({}) == "");
}
