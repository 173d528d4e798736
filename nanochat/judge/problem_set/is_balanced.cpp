//@ difficulty: medium
//@ prompt
#include <string>
#include <vector>

// Returns whether every bracket of the text, ( [ or {, is closed by one of its own kind, in the
// right order. All other characters are ignored.
bool is_balanced(const std::string& text) {
//@ solution
    std::vector<char> expected;
    for (char c : text) {
        if (c == '(') expected.push_back(')');
        if (c == '[') expected.push_back(']');
        if (c == '{') expected.push_back('}');
        if (c == ')' || c == ']' || c == '}') {
            if (expected.empty() || expected.back() != c) return false;
            expected.pop_back();
        }
    }
    return expected.empty();
}
//@ tests
#include <cassert>

int main() {
    assert(is_balanced("f(a[1], {2})"));
    assert(is_balanced(""));
    assert(is_balanced("{}[]()"));
    assert(!is_balanced("(]"));
    assert(!is_balanced("([)]"));
    assert(!is_balanced("(("));
    assert(!is_balanced(")("));
}
