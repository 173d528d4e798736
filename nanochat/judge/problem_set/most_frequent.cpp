//@ difficulty: medium
//@ prompt
#include <map>
#include <string>
#include <vector>

// Returns the word that occurs most often in the list. Of several such words, it is the first in
// alphabetical order. The list is not empty.
std::string most_frequent(const std::vector<std::string>& words) {
//@ solution
    std::map<std::string, int> counts;
    for (const std::string& word : words) ++counts[word];
    std::string best;
    for (const auto& [word, count] : counts) {
        if (best.empty() || count > counts[best]) best = word;
    }
    return best;
}
//@ tests
#include <cassert>

int main() {
    assert(most_frequent({"b", "a", "b"}) == "b");
    assert(most_frequent({"pear", "fig", "fig", "pear", "apple"}) == "fig");
    assert(most_frequent({"z", "y"}) == "y");
    assert(most_frequent({"only"}) == "only");
}
