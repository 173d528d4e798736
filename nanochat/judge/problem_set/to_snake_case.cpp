//@ difficulty: medium
//@ prompt
#include <cctype>
#include <string>

// Converts a name such as "maxFileSize" or "MaxFileSize" to "max_file_size": every capital letter
// becomes a small one with an underscore before it, but there is no underscore at the beginning.
std::string to_snake_case(const std::string& name) {
//@ solution
    std::string snake;
    for (unsigned char c : name) {
        if (std::isupper(c) && !snake.empty()) snake += '_';
        snake += static_cast<char>(std::tolower(c));
    }
    return snake;
}
//@ tests
#include <cassert>

int main() {
    assert(to_snake_case("maxFileSize") == "max_file_size");
    assert(to_snake_case("MaxFileSize") == "max_file_size");
    assert(to_snake_case("x1Y") == "x1_y");
    assert(to_snake_case("plain") == "plain");
    assert(to_snake_case("") == "");
}
