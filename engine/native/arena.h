// Memory of one thread that grows with the largest use.

#pragma once

#include <cstddef>
#include <cstdlib>

namespace baton {

class Arena {
 public:
  ~Arena() { std::free(memory_); }
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    std::free(memory_);
    size_ = (bytes + 4095) / 4096 * 4096;
    memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
    if (memory_ == nullptr) std::abort();  // nothing sensible is left to do in a parallel region
  }
  char* data() { return memory_; }

 private:
  char* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace baton
