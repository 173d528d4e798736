//@ difficulty: medium
//@ prompt
#include <vector>

// A number is halved if it is even, and else tripled and increased by one, until it is 1. Returns
// the number below the limit (and at least 1) that needs the most steps; of several, the smallest.
// The limit is at least 2.
int longest_collatz(int limit) {
//@ solution
    int best = 1, most_steps = 0;
    for (int start = 1; start < limit; ++start) {
        int steps = 0;
        for (long long number = start; number != 1; ++steps) {
            number = number % 2 == 0 ? number / 2 : 3 * number + 1;
        }
        if (steps > most_steps) {
            most_steps = steps;
            best = start;
        }
    }
    return best;
}
//@ tests
#include <cassert>

int main() {
    assert(longest_collatz(2) == 1);
    assert(longest_collatz(4) == 3);
    assert(longest_collatz(10) == 9);
    assert(longest_collatz(20) == 18);
    assert(longest_collatz(1000) == 871);
}
