//@ difficulty: hard
//@ prompt
#include <utility>

// Owns an object made with new, and deletes it at the end of its life. It cannot be copied. Moving
// it hands the object over and leaves the source empty; what the target owned before is deleted.
// get() returns a plain pointer.
template <typename T>
class Owner {
public:
    explicit Owner(T* object = nullptr) : object_(object) {}
    Owner(const Owner&) = delete;
//@ solution
    Owner(Owner&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}

    Owner& operator=(Owner&& other) noexcept {
        if (this != &other) {
            delete object_;
            object_ = std::exchange(other.object_, nullptr);
        }
        return *this;
    }

    ~Owner() { delete object_; }

    T* get() const { return object_; }

private:
    T* object_;
};
//@ tests
#include <cassert>

struct Counted {
    static inline int alive = 0;
    Counted() { ++alive; }
    ~Counted() { --alive; }
};

int main() {
    {
        Owner<Counted> first(new Counted);
        Owner<Counted> second(std::move(first));
        assert(first.get() == nullptr && second.get() != nullptr && Counted::alive == 1);
        Owner<Counted> third(new Counted);
        assert(Counted::alive == 2);
        Counted* moved = second.get();
        third = std::move(second);
        assert(third.get() == moved && second.get() == nullptr && Counted::alive == 1);
        Owner<Counted>& same = third;
        third = std::move(same);
        assert(third.get() == moved && Counted::alive == 1);
    }
    assert(Counted::alive == 0);
    Owner<int> empty;
    assert(empty.get() == nullptr);
}
