//@ difficulty: easy
//@ prompt
#include <string>

// Moves every letter `shift` places (0 to 25) further in the alphabet, from the last letter on to
// the first. Small letters stay small and capital letters capital; all other characters stay as
// they are.
std::string caesar(std::string text, int shift) {
//@ solution
    for (char& c : text) {
        if (c >= 'a' && c <= 'z') c = static_cast<char>('a' + (c - 'a' + shift) % 26);
        else if (c >= 'A' && c <= 'Z') c = static_cast<char>('A' + (c - 'A' + shift) % 26);
    }
    return text;
}
//@ tests
#include <cassert>

int main() {
    assert(caesar("Hello, World!", 3) == "Khoor, Zruog!");
    assert(caesar("xyz XYZ", 3) == "abc ABC");
    assert(caesar(caesar("There and back.", 11), 15) == "There and back.");
    assert(caesar("same", 0) == "same");
}
