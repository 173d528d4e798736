//@ difficulty: medium
//@ prompt
#include <functional>
#include <utility>

// Calls a function when it goes out of scope, however the scope is left, unless dismiss() was
// called before. It can be neither copied nor assigned.
class ScopeGuard {
public:
    explicit ScopeGuard(std::function<void()> action) : action_(std::move(action)) {}
//@ solution

    ScopeGuard(const ScopeGuard&) = delete;

    ScopeGuard& operator=(const ScopeGuard&) = delete;

    ~ScopeGuard() {
        if (action_) action_();
    }

    void dismiss() { action_ = nullptr; }

private:
    std::function<void()> action_;
};
//@ tests
#include <cassert>
#include <stdexcept>
#include <type_traits>

static_assert(!std::is_copy_constructible_v<ScopeGuard> && !std::is_copy_assignable_v<ScopeGuard>);

int main() {
    int calls = 0;
    {
        ScopeGuard guard([&] { ++calls; });
        assert(calls == 0);
    }
    assert(calls == 1);
    {
        ScopeGuard guard([&] { ++calls; });
        guard.dismiss();
    }
    assert(calls == 1);
    try {
        ScopeGuard guard([&] { ++calls; });
        throw std::runtime_error("stop");
    } catch (const std::runtime_error&) {
    }
    assert(calls == 2);
}
