//@ difficulty: hard
//@ prompt
#include <cstddef>
#include <list>
#include <optional>
#include <unordered_map>
#include <utility>

// A cache of at most `capacity` numbers by their keys. When it is full, put() first drops the key
// that has not been used for the longest time; get() and put() both use a key. get() returns
// nothing for a key that is not there.
class LruCache {
public:
    explicit LruCache(std::size_t capacity) : capacity_(capacity) {}

    std::optional<int> get(int key) {
//@ solution
        auto found = places_.find(key);
        if (found == places_.end()) return std::nullopt;
        items_.splice(items_.begin(), items_, found->second);
        return found->second->second;
    }

    void put(int key, int value) {
        if (get(key)) {
            items_.front().second = value;
            return;
        }
        if (items_.size() == capacity_) {
            places_.erase(items_.back().first);
            items_.pop_back();
        }
        items_.emplace_front(key, value);
        places_[key] = items_.begin();
    }

private:
    std::size_t capacity_;
    std::list<std::pair<int, int>> items_;
    std::unordered_map<int, std::list<std::pair<int, int>>::iterator> places_;
};
//@ tests
#include <cassert>

int main() {
    LruCache cache(2);
    cache.put(1, 10);
    cache.put(2, 20);
    assert(cache.get(1) == 10);
    cache.put(3, 30);
    assert(!cache.get(2));
    assert(cache.get(1) == 10 && cache.get(3) == 30);
    cache.put(1, 11);
    cache.put(4, 40);
    assert(!cache.get(3));
    assert(cache.get(1) == 11 && cache.get(4) == 40);
    cache.put(5, 50);
    cache.put(6, 60);
    assert(!cache.get(1) && !cache.get(4) && cache.get(5) == 50 && cache.get(6) == 60);
}
