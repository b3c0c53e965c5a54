// top_k over the threads, which share the rows.
//
// Of a long row only numbers are sorted that may be among the largest: those from a size on that a
// sample names. When these are too few the whole row is sorted, so that the sample decides about
// time alone.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {
namespace {

using Found = std::unique_ptr<uint64_t[]>;

// Up to so many, comparisons cost less than counting what digits there are.
constexpr int64_t kFewFound = 768;

constexpr int kDigitBits = 11, kSizeBits = 31;

int64_t digit_of(uint64_t place, int shift) {
  return static_cast<int64_t>(place >> shift & ((1u << kDigitBits) - 1u));
}

// Sorts by size, the lowest digit first, which keeps equal sizes in order; `other` is as long as
// `found`, and they may have changed places after it.
void sort_by_digits(Found& found, Found& other, int64_t n) {
  for (int shift = 32; shift < 32 + kSizeBits; shift += kDigitBits) {
    int64_t next[1 << kDigitBits] = {};
    for (int64_t i = 0; i < n; ++i) ++next[digit_of(found[i], shift)];
    if (next[digit_of(found[0], shift)] == n) continue;  // one and the same digit
    int64_t total = 0;
    for (int64_t& count : next) total += std::exchange(count, total);
    for (int64_t i = 0; i < n; ++i) other[next[digit_of(found[i], shift)]++] = found[i];
    found.swap(other);
  }
}

// What one thread needs for its rows.
class Selection {
 public:
  explicit Selection(const TopK& args)
      : args_(args),
        nbytes_(args.dtype == DType::kFloat32 ? 4 : 2),
        found_(new uint64_t[static_cast<size_t>(std::max(args.width, kTogether))]),
        other_(new uint64_t[static_cast<size_t>(args.width)]) {}

  void select(Range rows) {
    const int64_t together = std::max<int64_t>(1, kTogether / std::max<int64_t>(1, args_.width));
    for (int64_t row = rows.begin; row < rows.end; row += together) {
      const int64_t end = std::min(rows.end, row + together);
      end - row > 1 ? select_together({row, end}) : select_alone(row);
    }
  }

 private:
  // Elements of rows that are looked at in one go.
  static constexpr int64_t kTogether = 256;
  static constexpr int64_t kBlock = 16, kBlocks = 512;

  const char* row_at(int64_t row) const {
    return static_cast<const char*>(args_.x) + row * args_.width * nbytes_;
  }

  int64_t find_from(uint32_t smallest, const char* x, int64_t n, uint64_t* found) const {
    return kernels().find_large(args_.dtype, x, n, smallest, found);
  }

  void select_together(Range rows) {
    find_from(0, row_at(rows.begin), (rows.end - rows.begin) * args_.width, found_.get());
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const int64_t before = (row - rows.begin) * args_.width;
      sort_by_comparison(found_.get() + before, args_.width);
      write(row, found_.get() + before, before);
    }
  }

  void select_alone(int64_t row) {
    const int64_t n = find(row_at(row));
    if (n > kFewFound) {
      sort_by_digits(found_, other_, n);
    } else {
      sort_by_comparison(found_.get(), n);
    }
    write(row, found_.get(), 0);
  }

  void sort_by_comparison(uint64_t* found, int64_t n) const {
    if (args_.count <= n / 4) {
      std::partial_sort(found, found + args_.count, found + n);
    } else {
      std::sort(found, found + n);
    }
  }

  // found: places in the order of their sizes, `before` too high.
  void write(int64_t row, const uint64_t* found, int64_t before) const {
    const char* x = row_at(row);
    char* y = static_cast<char*>(args_.y) + row * args_.count * nbytes_;
    int64_t* indices = args_.indices + row * args_.count;
    for (int64_t i = 0; i < args_.count; ++i) {
      indices[i] = static_cast<int64_t>(found[i] & 0xffffffffu) - before;
      std::memcpy(y + i * nbytes_, x + indices[i] * nbytes_, static_cast<size_t>(nbytes_));
    }
  }

  // Fills found_ with numbers of a row, all of its `count` largest among them.
  int64_t find(const char* x) {
    if (args_.width >= kTogether && args_.count <= args_.width / 16) {
      const int64_t number = find_from(likely_size(x), x, args_.width, found_.get());
      if (number >= args_.count) return number;
    }
    return find_from(0, x, args_.width, found_.get());
  }

  // A size that `count` numbers most likely reach, and few more: as far down in a sample of a
  // quarter of the row, or less, as is expected, and four standard deviations further.
  uint32_t likely_size(const char* x) {
    const int64_t blocks = std::min(kBlocks, args_.width / (4 * kBlock));
    const int64_t distance = args_.width / blocks;
    for (int64_t block = 0; block < blocks; ++block) {
      find_from(0, x + block * distance * nbytes_, kBlock, found_.get() + block * kBlock);
    }
    const double share = static_cast<double>(args_.count) / static_cast<double>(args_.width);
    const double expected = share * static_cast<double>(blocks * kBlock);
    const auto place = static_cast<int64_t>(expected + 4.0 * std::sqrt(expected)) + 8;
    if (place >= blocks * kBlock) return 0;
    std::nth_element(found_.get(), found_.get() + place, found_.get() + blocks * kBlock);
    return size_of_place(found_[static_cast<size_t>(place)]);
  }

  const TopK& args_;
  int64_t nbytes_;
  Found found_, other_;
};

}  // namespace

void top_k(const TopK& args) {
  const char* where = "top_k";
  const Size rows{"rows", args.rows};
  if (check_sizes(where, {rows, {"width", args.width}}) > 0) check_address(where, "x", args.x);
  const int64_t chosen = check_sizes(where, {rows, {"count", args.count}});
  check(args.width <= int64_t{1} << 32, where,
        "expected width <= 2^32, got " + std::to_string(args.width));
  check(args.count <= args.width, where,
        "expected count <= width " + std::to_string(args.width) + ", got " +
            std::to_string(args.count));
  if (chosen == 0) return;
  check_address(where, "y", args.y);
  check_address(where, "indices", args.indices);
  parallel_items(args.rows, args.width, [&](Range range) { Selection(args).select(range); });
}

}  // namespace anychip::cpu
