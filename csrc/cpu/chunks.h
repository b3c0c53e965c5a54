// How the tensors of a list are shared among the threads.
//
// All tensors of a list are cut into chunks of 16384 elements, each tensor on its own, and the
// chunks are shared among the threads: many small tensors cost one parallel region.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {

constexpr int64_t kChunk = 16384;

// Which tensor a chunk belongs to, and its elements.
class ChunkGrid {
 public:
  explicit ChunkGrid(size_t tensors, int64_t chunk = kChunk) : chunk_(chunk) {
    first_.reserve(tensors + 1);
  }

  // Raises for a size that is below 0, or too large together with those before.
  void add(const char* where, int64_t numel) {
    total_ += check_sizes(where, {{"numel", numel}});
    check_sizes(where, {{"numel of all tensors", total_}});
    numel_.push_back(numel);
    first_.push_back(first_.back() + (numel + chunk_ - 1) / chunk_);
  }

  int64_t chunks() const { return first_.back(); }

  // work(tensor, chunk, elements) for every chunk.
  template <class Work>
  void run(const Work& work) const {
    parallel_items(chunks(), average(), [&](Range range) {
      auto next = std::upper_bound(first_.begin(), first_.end(), range.begin);
      for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
        while (*next <= chunk) ++next;
        const size_t tensor = static_cast<size_t>(next - first_.begin()) - 1;
        const int64_t begin = (chunk - first_[tensor]) * chunk_;
        work(tensor, chunk, Range{begin, std::min(numel_[tensor], begin + chunk_)});
      }
    });
  }

 private:
  // Elements per chunk, so that a list of many tiny tensors is not taken for a large one.
  int64_t average() const { return chunks() == 0 ? 0 : (total_ + chunks() - 1) / chunks(); }

  int64_t chunk_;
  int64_t total_ = 0;
  std::vector<int64_t> numel_;
  std::vector<int64_t> first_ = {0};
};

// Whole blocks make a chunk; both are powers of two.
inline int64_t chunk_of_blocks(int64_t block) { return std::max(kChunk, block); }

// A thread has a block in float32, or two.
constexpr int64_t kMaxBlock = int64_t{1} << 24;

inline void check_block_grid(const char* where, const BlockGrid& blocks, size_t tensors) {
  check(blocks.block > 0 && blocks.block <= kMaxBlock && (blocks.block & (blocks.block - 1)) == 0,
        where,
        "expected a block up to 2^24 that is a power of two, got " + std::to_string(blocks.block));
  check(blocks.first.size() == tensors, where,
        "expected a first block for each of " + std::to_string(tensors) + " tensors, got " +
            std::to_string(blocks.first.size()));
}

// The blocks of a tensor are among the `total` that there is room for.
inline void check_place(const char* where, const BlockGrid& blocks, size_t tensor, int64_t numel,
                        int64_t total) {
  const int64_t first = blocks.first[tensor];
  const int64_t count = (numel + blocks.block - 1) / blocks.block;
  check(first >= 0 && first <= total - count, where,
        "expected a first block from 0 to " + std::to_string(total - count) + " for tensor " +
            std::to_string(tensor) + ", got " + std::to_string(first));
}

// work(elements, out) for every block of a chunk of a tensor.
template <class Work>
void for_each_block(const BlockGrid& blocks, size_t tensor, Range elements, const Work& work) {
  float* out = blocks.out + blocks.first[tensor] + elements.begin / blocks.block;
  for (int64_t begin = elements.begin; begin < elements.end; begin += blocks.block) {
    work(Range{begin, std::min(elements.end, begin + blocks.block)}, out++);
  }
}

}  // namespace anychip::cpu
