//@ difficulty: hard
//@ prompt
#include <string>
#include <vector>

// Returns the fields of one line of a CSV file. Commas separate fields; in a field between double
// quotes a comma is text, and two double quotes stand for one.
std::vector<std::string> parse_csv_line(const std::string& line) {
//@ solution
    std::vector<std::string> fields(1);
    bool quoted = false;
    for (std::size_t i = 0; i < line.size(); ++i) {
        if (quoted && line[i] == '"' && i + 1 < line.size() && line[i + 1] == '"') {
            fields.back() += '"';
            ++i;
        } else if (line[i] == '"') {
            quoted = !quoted;
        } else if (line[i] == ',' && !quoted) {
            fields.emplace_back();
        } else {
            fields.back() += line[i];
        }
    }
    return fields;
}
//@ tests
#include <cassert>

int main() {
    using Fields = std::vector<std::string>;
    assert((parse_csv_line("a,b,,c") == Fields{"a", "b", "", "c"}));
    assert((parse_csv_line("\"x, y\",z") == Fields{"x, y", "z"}));
    assert((parse_csv_line("\"say \"\"hi\"\"\",1") == Fields{"say \"hi\"", "1"}));
    assert((parse_csv_line("\"a\"\"b,c\"") == Fields{"a\"b,c"}));
    assert((parse_csv_line("\"\",a") == Fields{"", "a"}));
    assert((parse_csv_line("") == Fields{""}));
}
