//@ difficulty: medium
//@ prompt
#include <map>
#include <set>
#include <string>

// Returns the map the other way round: for each value, the set of all keys that have it.
std::map<std::string, std::set<int>> invert_map(const std::map<int, std::string>& names) {
//@ solution
    std::map<std::string, std::set<int>> inverted;
    for (const auto& [key, name] : names) {
        inverted[name].insert(key);
    }
    return inverted;
}
//@ tests
#include <cassert>

int main() {
    auto inverted = invert_map({{1, "odd"}, {2, "even"}, {3, "odd"}});
    assert(inverted.size() == 2);
    assert((inverted["odd"] == std::set<int>{1, 3}));
    assert((inverted["even"] == std::set<int>{2}));
    assert(invert_map({}).empty());
}
