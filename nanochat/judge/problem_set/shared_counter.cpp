//@ difficulty: hard
//@ prompt
#include <utility>

// Counts how many handles share a number. Copies of a handle share it; the number is deleted with
// the last of them. count() is the number of handles that share it, and value() refers to the
// number.
class SharedNumber {
public:
    explicit SharedNumber(int value) : shared_(new Shared{value, 1}) { ++alive; }

    static inline int alive = 0;

    SharedNumber(const SharedNumber& other) : shared_(other.shared_) {
//@ solution
        ++shared_->count;
    }

    SharedNumber& operator=(SharedNumber other) {
        std::swap(shared_, other.shared_);
        return *this;
    }

    ~SharedNumber() {
        if (--shared_->count > 0) return;
        delete shared_;
        --alive;
    }

    int& value() { return shared_->value; }

    int count() const { return shared_->count; }

private:
    struct Shared {
        int value;
        int count;
    };
    Shared* shared_;
};
//@ tests
#include <cassert>

int main() {
    {
        SharedNumber first(5);
        assert(first.count() == 1 && SharedNumber::alive == 1);
        {
            SharedNumber second = first;
            second.value() = 6;
            assert(first.value() == 6 && first.count() == 2);
            SharedNumber third(1);
            assert(SharedNumber::alive == 2);
            third = first;
            assert(SharedNumber::alive == 1 && first.count() == 3 && third.value() == 6);
        }
        assert(first.count() == 1 && SharedNumber::alive == 1);
    }
    assert(SharedNumber::alive == 0);
}
