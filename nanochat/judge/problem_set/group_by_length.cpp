//@ difficulty: easy
//@ prompt
#include <map>
#include <string>
#include <vector>

// Returns, for each length that occurs, the words of that length in the order in which they were
// given.
std::map<std::size_t, std::vector<std::string>> group_by_length(const std::vector<std::string>& words) {
//@ solution
    std::map<std::size_t, std::vector<std::string>> groups;
    for (const std::string& word : words) {
        groups[word.size()].push_back(word);
    }
    return groups;
}
//@ tests
#include <cassert>

int main() {
    auto groups = group_by_length({"to", "be", "or", "not", "a"});
    assert(groups.size() == 3);
    assert((groups[2] == std::vector<std::string>{"to", "be", "or"}));
    assert((groups[3] == std::vector<std::string>{"not"}));
    assert((groups[1] == std::vector<std::string>{"a"}));
    assert(group_by_length({}).empty());
}
