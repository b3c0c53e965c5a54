// Large blocks of host memory, kept when they are given back and handed out again.
//
// The system gives pages filled with zeros, one fault for each: for the tensors of a training step,
// which come and go in the same sizes at every step, that costs more than many a kernel. So blocks
// of kLeastNbytes and more are taken from the system once. Sizes are rounded up to one of eight
// classes per power of two (at most an eighth is lost), and a free block serves a request of its
// class or of the two below. From 2 MiB on blocks begin at a multiple of that, and the system is
// asked for huge pages. Free blocks hold at most `limit` bytes: the one that has been free for
// longest goes back to the system first.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>

namespace anychip::host {

constexpr size_t kPageNbytes = 4096;
constexpr size_t kHugeNbytes = size_t{2} << 20;
constexpr size_t kLeastNbytes = size_t{64} << 10;
constexpr size_t kMostNbytes = size_t{1} << 46;
constexpr int kClassesPerDoubling = 8;
constexpr int kClassesAbove = 2;  // a request may get a block so many classes larger

// How many bytes a block for a request has.
inline size_t class_nbytes(size_t nbytes) {
  size_t step = kPageNbytes;
  while (step * 2 * kClassesPerDoubling <= nbytes) step *= 2;
  return (nbytes + step - 1) / step * step;
}

// Counts since the blocks were made; all in bytes but the last two.
struct Statistics {
  uint64_t allocated;       // of blocks in use
  uint64_t reserved;        // of all blocks
  uint64_t peak_allocated;  // the highest so far
  uint64_t taken;           // how many blocks came from the system
  uint64_t reused;          // how many did not
};

class Blocks {
 public:
  Blocks(size_t limit, bool huge_pages) : limit_(limit), huge_pages_(huge_pages) {}
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  ~Blocks() { trim(0); }

  // At least so many bytes, from kLeastNbytes on, with contents that nobody has set; null if the
  // system has no more, even after every free block went back to it.
  void* allocate(size_t nbytes) {
    if (nbytes > kMostNbytes) return nullptr;
    const size_t wanted = class_nbytes(nbytes);
    std::lock_guard<std::mutex> lock(mutex_);
    void* block = take_free(wanted);
    if (block == nullptr) {
      block = map(wanted);
      if (block == nullptr && statistics_.reserved > statistics_.allocated) {
        trim_locked(0);
        block = map(wanted);
      }
      if (block == nullptr) return nullptr;
      in_use_.emplace(block, wanted);
      statistics_.allocated += wanted;
      statistics_.reserved += wanted;
      ++statistics_.taken;
    }
    if (statistics_.allocated > statistics_.peak_allocated) {
      statistics_.peak_allocated = statistics_.allocated;
    }
    return block;
  }

  // Keeps a block for later. False if it is none that is in use.
  bool release(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = in_use_.find(block);
    if (found == in_use_.end()) return false;
    const size_t nbytes = found->second;
    in_use_.erase(found);
    statistics_.allocated -= nbytes;
    free_[nbytes].push_back({block, ++clock_});
    trim_locked(limit_);
    return true;
  }

  // Gives free blocks back to the system until they hold at most so many bytes.
  void trim(size_t keep) {
    std::lock_guard<std::mutex> lock(mutex_);
    trim_locked(keep);
  }

  void set_limit(size_t limit, bool huge_pages) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = limit;
    huge_pages_ = huge_pages;
    trim_locked(limit_);
  }

  Statistics statistics() {
    std::lock_guard<std::mutex> lock(mutex_);
    return statistics_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    statistics_.peak_allocated = statistics_.allocated;
  }

  // Around fork(): a child begins with one thread, and must not find the lock taken by another.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Free {
    void* block;
    uint64_t since;
  };

  void* take_free(size_t wanted) {
    int classes = 0;
    for (auto at = free_.lower_bound(wanted); at != free_.end() && classes <= kClassesAbove; ++at) {
      const size_t nbytes = at->first;
      if (nbytes > wanted + wanted / kClassesPerDoubling * kClassesAbove) break;
      ++classes;
      void* block = at->second.back().block;  // the last one freed: its bytes are in caches
      at->second.pop_back();
      if (at->second.empty()) free_.erase(at);
      in_use_.emplace(block, nbytes);
      statistics_.allocated += nbytes;
      ++statistics_.reused;
      return block;
    }
    return nullptr;
  }

  void trim_locked(size_t keep) {
    while (statistics_.reserved - statistics_.allocated > keep) {
      auto oldest = free_.begin();
      for (auto at = free_.begin(); at != free_.end(); ++at) {
        if (at->second.front().since < oldest->second.front().since) oldest = at;
      }
      munmap(oldest->second.front().block, oldest->first);
      statistics_.reserved -= oldest->first;
      oldest->second.pop_front();
      if (oldest->second.empty()) free_.erase(oldest);
    }
  }

  void* map(size_t nbytes) const {
    const bool aligned = nbytes >= kHugeNbytes;
    const size_t asked = aligned ? nbytes + kHugeNbytes : nbytes;
    void* got = mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED) return nullptr;
    if (!aligned) return got;
    const auto start = reinterpret_cast<uintptr_t>(got);
    const uintptr_t block = (start + kHugeNbytes - 1) / kHugeNbytes * kHugeNbytes;
    const uintptr_t end = start + asked;
    if (block > start) munmap(got, block - start);
    if (end > block + nbytes) munmap(reinterpret_cast<void*>(block + nbytes), end - block - nbytes);
    // Advice: a system that has no huge pages says no, and gives small ones.
    if (huge_pages_) madvise(reinterpret_cast<void*>(block), nbytes, MADV_HUGEPAGE);
    return reinterpret_cast<void*>(block);
  }

  std::mutex mutex_;
  std::map<size_t, std::deque<Free>> free_;  // by bytes; of each the longest free one first
  std::unordered_map<void*, size_t> in_use_;
  Statistics statistics_ = {};
  uint64_t clock_ = 0;
  size_t limit_;
  bool huge_pages_;
};

}  // namespace anychip::host
