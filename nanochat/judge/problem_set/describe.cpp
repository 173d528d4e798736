//@ difficulty: hard
//@ prompt
#include <string>
#include <type_traits>
#include <vector>

template <typename T>
struct IsVector : std::false_type {};

template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

// Returns "bool", "whole number" or "fraction" for the numeric types, "list of …" for a
// std::vector, with the description of its element in place of …, and "something else" for all
// other types.
template <typename T>
std::string describe() {
//@ solution
    if constexpr (std::is_same_v<T, bool>) {
        return "bool";
    } else if constexpr (std::is_integral_v<T>) {
        return "whole number";
    } else if constexpr (std::is_floating_point_v<T>) {
        return "fraction";
    } else if constexpr (IsVector<T>::value) {
        return "list of " + describe<typename T::value_type>();
    } else {
        return "something else";
    }
}
//@ tests
#include <cassert>

int main() {
    assert(describe<bool>() == "bool");
    assert(describe<unsigned long>() == "whole number");
    assert(describe<float>() == "fraction");
    assert(describe<std::string>() == "something else");
    assert(describe<std::vector<int>>() == "list of whole number");
    assert(describe<std::vector<std::vector<double>>>() == "list of list of fraction");
}
