// Products of bfloat16 matrices with sums in float32, over the threads: blocks of rows of the left
// factor by panels of columns of the right one.
//
// torch's operators round a product to bfloat16, and copy the right factor in every call. The
// kernel of a block, oneDNN's, is compiled at run time for each size: blocks have few.
#include "bfloat16_product.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>

#include "checks.h"
#include "operators.h"
#include "parallel.h"
#include "scratch.h"

namespace anychip::cpu {

namespace {

constexpr int64_t kRightAtOnce = int64_t{1} << 23;  // numbers: 16 MiB, of the last cache
constexpr int64_t kLeftAtOnce = int64_t{1} << 18;   // likewise of the second one
constexpr int64_t kMostRows = 512;                  // at once, and
constexpr int64_t kBlockRows = 128;                 // rows and
constexpr int64_t kPartDepth = 1024;                // terms of a block,
constexpr int64_t kUnit = 32;                       // of which there are so many, or zeros
// From so many multiplications on the kernels for a matrix's own strides are worth their making.
constexpr int64_t kWorthAKernel = int64_t{1} << 24;

// Where torch's library has none that runs here: for whoever asks all the same.
void plain_product(int64_t rows, int64_t columns, int64_t depth, int64_t left_stride,
                   int64_t right_stride, int64_t sums_stride, bool adds, const BFloat16* left,
                   const BFloat16* right, float* sums, bool) {
  const auto wide = [](BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (int64_t i = 0; i < rows; ++i) {
    float* row = sums + i * sums_stride;
    if (!adds) std::fill(row, row + columns, 0.0f);
    for (int64_t k = 0; k < depth; ++k) {
      const float factor = wide(left[i * left_stride + k]);
      const BFloat16* terms = right + k / 2 * 2 * right_stride + k % 2;
      for (int64_t j = 0; j < columns; ++j) row[j] += factor * wide(terms[2 * j]);
    }
  }
}

const BlockProducts plain{plain_product, nullptr};
BlockProducts blocks = plain;

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

thread_local Room left_room, right_room;

// The depth in parts of a length that is whole units: so are all but the last one.
struct Parts {
  explicit Parts(int64_t depth) : depth(depth) {
    count = (depth + kPartDepth - 1) / kPartDepth;
    length = count ? round_up((depth + count - 1) / count, kUnit) : 0;
    count = count ? (depth + length - 1) / length : 0;
  }
  int64_t begin(int64_t part) const { return part * length; }
  int64_t terms(int64_t part) const { return std::min(length, depth - begin(part)); }
  int64_t room(int64_t part) const { return round_up(terms(part), kUnit); }
  int64_t depth, count, length;
};

int64_t panels(int64_t columns) { return (columns + kPairColumns - 1) / kPairColumns; }

// Columns of the right factor in one part of its depth, as panels.
void pack(const BFloat16Panels& right, const Parts& parts, int64_t part, Range range,
          BFloat16* to) {
  const int64_t k = parts.begin(part), size = parts.room(part) * kPairColumns;
  const int64_t stride = right.transposed ? right.depth : right.columns;
  parallel_items(range.end - range.begin, size, [&](Range some) {
    for (int64_t i = some.begin; i < some.end; ++i) {
      const int64_t first = (range.begin + i) * kPairColumns;
      const BFloat16* from =
          right.right + (right.transposed ? first * stride + k : k * stride + first);
      kernels().pack_panel16({from, stride, std::min(kPairColumns, right.columns - first),
                              parts.terms(part), parts.room(part), right.transposed},
                             to + i * size);
    }
  });
}

// One part of the depth, for all rows and some columns.
class Part {
 public:
  Part(const BFloat16Product& args, const Parts& parts, int64_t part)
      : args_(args), begin_(parts.begin(part)), terms_(parts.terms(part)), room_(parts.room(part)) {
    rows_ = std::clamp(kLeftAtOnce / room_ / kBlockRows * kBlockRows, kBlockRows, kMostRows);
    is_large_ = args.rows * args.columns * terms_ >= kWorthAKernel;
    adds_ = args.adds || part > 0;
  }

  void multiply(Range panels, const BFloat16* right) const {
    const int64_t across = panels.end - panels.begin;
    const int64_t down = (args_.rows + rows_ - 1) / rows_;
    parallel_items(down * across, rows_ * kPairColumns * room_ / 64, [&](Range items) {
      int64_t begun = -1;
      for (int64_t item = items.begin; item < items.end; ++item) {
        const int64_t block = item / across, panel = item % across;
        const Range rows{block * rows_, std::min(args_.rows, (block + 1) * rows_)};
        const Left left = begun == block ? made(rows) : make(rows);
        begun = block;
        finish(rows, left, (panels.begin + panel) * kPairColumns,
               right + panel * room_ * kPairColumns);
      }
      if (blocks.release) blocks.release(true);
    });
  }

 private:
  struct Left {
    const BFloat16* rows;
    int64_t stride;
  };

  // A left factor that lies as it is read is not copied.
  Left made(Range rows) const {
    const bool lies = !args_.left_transposed && (rows.end - rows.begin) % kUnit == 0;
    if (is_large_ && lies && terms_ == room_) {
      return {args_.left + rows.begin * args_.depth + begin_, args_.depth};
    }
    return {left_room.of<BFloat16>(rows_ * room_), room_};
  }

  Left make(Range rows) const {
    const Left left = made(rows);
    BFloat16* to = left_room.of<BFloat16>(rows_ * room_);
    if (left.rows != to) return left;
    const int64_t count = rows.end - rows.begin;
    const bool along = !args_.left_transposed;
    const int64_t stride = along ? args_.depth : args_.rows;
    const BFloat16* from =
        args_.left + (along ? rows.begin * stride + begin_ : begin_ * stride + rows.begin);
    kernels().pack_rows16({from, stride, count, terms_, room_, along}, to);
    std::fill(to + count * room_, to + round_up(count, kUnit) * room_, BFloat16{0});
    return left;
  }

  // By blocks whose sums the first cache holds, or that are written where they belong.
  void finish(Range rows, Left left, int64_t column, const BFloat16* right) const {
    alignas(64) float sums[kBlockRows * kPairColumns];
    const int64_t columns = std::min(kPairColumns, args_.columns - column);
    for (int64_t row = rows.begin; row < rows.end; row += kBlockRows) {
      const int64_t count = std::min(kBlockRows, rows.end - row);
      const BFloat16* from = left.rows + (row - rows.begin) * left.stride;
      float* to = args_.out + row * args_.columns + column;
      const auto multiply_block = [&](float* out, int64_t stride, bool adds) {
        blocks.product(round_up(count, kUnit), kPairColumns, room_, left.stride, kPairColumns,
                       stride, adds, from, right, out, true);
      };
      const bool is_whole = columns == kPairColumns && count % kUnit == 0;
      if (is_large_ && is_whole && (adds_ || !args_.bias)) {
        multiply_block(to, args_.columns, adds_);
        continue;
      }
      multiply_block(sums, kPairColumns, false);
      const float* bias = adds_ || !args_.bias ? nullptr : args_.bias + column;
      kernels().write_sums({sums, bias, to, args_.columns, count, columns, adds_});
    }
  }

  const BFloat16Product& args_;
  int64_t begin_, terms_, room_, rows_;
  bool is_large_, adds_;
};

// Without a term: the bias, or zeros.
void write_nothing(const BFloat16Product& args) {
  for (int64_t row = 0; row < args.rows && !args.adds; ++row) {
    float* to = args.out + row * args.columns;
    if (args.bias) std::copy(args.bias, args.bias + args.columns, to);
    if (!args.bias) std::fill(to, to + args.columns, 0.0f);
  }
}

// Whether a block's product runs here, on whatever the processor has: it says so by what it throws.
bool runs(const BlockProducts& found) {
  std::array<BFloat16, kUnit * kUnit> left{}, right{};
  left.fill({0x3f80});
  right.fill({0x4000});
  std::array<float, kUnit * kUnit> sums{};
  try {
    found.product(kUnit, kUnit, kUnit, kUnit, kUnit, kUnit, false, left.data(), right.data(),
                  sums.data(), true);
    if (found.release) found.release(true);
  } catch (const std::exception&) {
    return false;
  }
  return std::all_of(sums.begin(), sums.end(), [](float sum) { return sum == 2.0f * kUnit; });
}

void check_product(const char* where, const BFloat16Product& args) {
  const Size rows{"rows", args.rows}, columns{"columns", args.columns}, depth{"depth", args.depth};
  check_sizes(where, {rows, columns});
  check_sizes(where, {rows, depth});
  check_sizes(where, {columns, depth});
  check(!args.bias || !args.adds, where, "expected a bias or what is added to, got both");
}

}  // namespace

bool has_block_products() { return blocks.product != plain_product; }

void bind_block_products(const char* soname) {
  blocks = plain;
  void* object = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD);
  if (!object) return;
  BlockProducts found;
  found.product = reinterpret_cast<BlockProduct>(
      dlsym(object, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"));
  found.release = reinterpret_cast<decltype(found.release)>(
      dlsym(object, "_ZN2at6native7cpublas14brgemm_releaseEb"));
  if (found.product && runs(found)) blocks = found;
}

int64_t packed_numel(int64_t columns, int64_t depth) {
  check_sizes("packed_numel", {{"columns", columns}, {"depth", depth}});
  return panels(columns) * kPairColumns * round_up(depth, kUnit);
}

void bfloat16_panels(const BFloat16Panels& args) {
  const char* where = "bfloat16_panels";
  if (check_sizes(where, {{"columns", args.columns}, {"depth", args.depth}}) == 0) return;
  check_address(where, "right", args.right);
  check_address(where, "panels", args.panels);
  const Parts parts(args.depth);
  for (int64_t part = 0; part < parts.count; ++part) {
    pack(args, parts, part, {0, panels(args.columns)},
         args.panels + parts.begin(part) * panels(args.columns) * kPairColumns);
  }
}

void bfloat16_product(const BFloat16Product& args) {
  const char* where = "bfloat16_product";
  check_product(where, args);
  if (args.rows == 0 || args.columns == 0) return;
  check_address(where, "out", args.out);
  if (args.depth == 0) return write_nothing(args);
  check_address(where, "left", args.left);
  check(args.right || args.panels, where, "expected the address of right or of panels, got 0");
  const Parts parts(args.depth);
  const BFloat16Panels right{args.right, nullptr, args.columns, args.depth, args.right_transposed};
  const int64_t all = panels(args.columns);
  const int64_t step = args.panels ? all : kRightAtOnce / kPartDepth / kPairColumns;
  for (int64_t first = 0; first < all; first += step) {
    const Range some{first, std::min(first + step, all)};
    for (int64_t part = 0; part < parts.count; ++part) {
      const BFloat16* packed = args.panels;
      if (packed) {
        packed += parts.begin(part) * all * kPairColumns;
      } else {
        BFloat16* room = right_room.of<BFloat16>(step * kPairColumns * parts.length);
        pack(right, parts, part, some, room);
        packed = room;
      }
      Part(args, parts, part).multiply(some, packed);
    }
  }
}

}  // namespace anychip::cpu
