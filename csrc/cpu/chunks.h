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
  explicit ChunkGrid(size_t tensors) { first_.reserve(tensors + 1); }

  // Raises for a size that is below 0, or too large together with those before.
  void add(const char* where, int64_t numel) {
    total_ += check_sizes(where, {{"numel", numel}});
    check_sizes(where, {{"numel of all tensors", total_}});
    numel_.push_back(numel);
    first_.push_back(first_.back() + (numel + kChunk - 1) / kChunk);
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
        const int64_t begin = (chunk - first_[tensor]) * kChunk;
        work(tensor, chunk, Range{begin, std::min(numel_[tensor], begin + kChunk)});
      }
    });
  }

 private:
  // Elements per chunk, so that a list of many tiny tensors is not taken for a large one.
  int64_t average() const { return chunks() == 0 ? 0 : (total_ + chunks() - 1) / chunks(); }

  int64_t total_ = 0;
  std::vector<int64_t> numel_;
  std::vector<int64_t> first_ = {0};
};

}  // namespace anychip::cpu
