//@ difficulty: medium
//@ prompt
#include <map>
#include <sstream>
#include <string>

// Reads lines of the form key=value into a map. A line without = and a line that begins with # are
// skipped. Only the first = of a line separates, and a later line for the same key wins.
std::map<std::string, std::string> parse_settings(const std::string& text) {
//@ solution
    std::map<std::string, std::string> settings;
    std::istringstream input(text);
    std::string line;
    while (std::getline(input, line)) {
        const std::size_t equals = line.find('=');
        if (equals == std::string::npos || line[0] == '#') continue;
        settings[line.substr(0, equals)] = line.substr(equals + 1);
    }
    return settings;
}
//@ tests
#include <cassert>

int main() {
    auto settings = parse_settings("name=x\n# a=b\nno separator\nurl=a?b=c\nname=y\nempty=");
    assert(settings.size() == 3);
    assert(settings["name"] == "y");
    assert(settings["url"] == "a?b=c");
    assert(settings.count("empty") == 1 && settings["empty"] == "");
    assert(parse_settings("").empty());
}
