// Products over the threads, in blocks that stay in the caches: of the right factor one for all
// threads, of the left one for each.
#include <algorithm>

#include "checks.h"
#include "parallel.h"
#include "scratch.h"

namespace anychip::cpu {

namespace {

constexpr int64_t kBlockRows = 24 * kTileRows;  // times kProductDepth: 144 KiB, of the second cache
constexpr int64_t kBlockColumns = 2048;         // likewise: 2 MiB, of the last one

thread_local Room left_room, right_room;

int64_t panels(int64_t count, int64_t width) { return (count + width - 1) / width; }

// The rows of the range in even parts of at most `most`.
template <class Work>
void for_each_part(Range range, int64_t most, const Work& work) {
  const int64_t count = range.end - range.begin, parts = panels(count, most);
  for (int64_t part = 0; part < parts; ++part) {
    work(Range{range.begin + part * count / parts, range.begin + (part + 1) * count / parts});
  }
}

// One block of the right factor with everything on its left.
class Block {
 public:
  Block(const Product& args, Range columns, Range depth)
      : args_(args), columns_(columns), begin_(depth.begin), depth_(depth.end - depth.begin) {}

  void run() const {
    const int64_t width = columns_.end - columns_.begin;
    const int64_t across = panels(width, kTileColumns), down = panels(args_.rows, kTileRows);
    float* right = right_room.of<float>(across * panel_size(kTileColumns, depth_));
    parallel_items(across, kTileColumns * depth_, [&](Range range) { pack(range, right); });
    // Every thread copies the left rows that it needs: of few rows all, where it has columns.
    const bool cuts_rows = down >= across || down >= 8 * num_threads();
    const int64_t cost = kTileRows * kTileColumns * depth_ / 16;
    if (cuts_rows) {
      parallel_items(down, across * cost,
                     [&](Range range) { multiply(range, {0, across}, right); });
    } else {
      parallel_items(across, down * cost, [&](Range range) { multiply({0, down}, range, right); });
    }
  }

 private:
  void pack(Range range, float* right) const {
    const int64_t first = columns_.begin + range.begin * kTileColumns;
    const int64_t last = std::min(columns_.end, columns_.begin + range.end * kTileColumns);
    const bool along = args_.right_transposed;
    const int64_t stride = along ? args_.depth : args_.columns;
    const float* from = args_.right + (along ? first * stride + begin_ : begin_ * stride + first);
    kernels().pack_right({from, stride, last - first, depth_, along},
                         right + range.begin * panel_size(kTileColumns, depth_));
  }

  // Of these panels on the left and on the right.
  void multiply(Range down, Range across, const float* right) const {
    for_each_part(down, kBlockRows / kTileRows, [&](Range part) {
      const Range rows{part.begin * kTileRows, std::min(args_.rows, part.end * kTileRows)};
      const int64_t count = rows.end - rows.begin;
      float* left = left_room.of<float>((part.end - part.begin) * panel_size(kTileRows, depth_));
      const bool along = !args_.left_transposed;
      const int64_t stride = along ? args_.depth : args_.rows;
      const float* from =
          args_.left + (along ? rows.begin * stride + begin_ : begin_ * stride + rows.begin);
      kernels().pack_left({from, stride, count, depth_, along}, left);
      const int64_t first = columns_.begin + across.begin * kTileColumns;
      const int64_t last = std::min(columns_.end, columns_.begin + across.end * kTileColumns);
      const bool adds = args_.adds || begin_ > 0;
      kernels().multiply_panels({left, right + across.begin * panel_size(kTileColumns, depth_),
                                 args_.bias && !adds ? args_.bias + first : nullptr,
                                 args_.out + rows.begin * args_.columns + first, args_.columns,
                                 count, last - first, depth_, adds});
    });
  }

  const Product& args_;
  Range columns_;
  int64_t begin_, depth_;
};

}  // namespace

void product(const Product& args) {
  const char* where = "product";
  const Size rows{"rows", args.rows}, columns{"columns", args.columns}, depth{"depth", args.depth};
  const int64_t results = check_sizes(where, {rows, columns});
  const bool is_deep = check_sizes(where, {rows, depth}) + check_sizes(where, {columns, depth}) > 0;
  check(!args.bias || !args.adds, where, "expected a bias or what is added to, got both");
  if (results == 0) return;
  check_address(where, "out", args.out);
  if (!is_deep) {  // a part without terms, for what there is beside it
    return Block(args, {0, args.columns}, {0, 0}).run();
  }
  check_address(where, "left", args.left);
  check_address(where, "right", args.right);
  const int64_t parts = panels(args.depth, kProductDepth);
  const int64_t step = panels(panels(args.depth, parts), 8) * 8;
  for (int64_t j = 0; j < args.columns; j += kBlockColumns) {
    for (int64_t k = 0; k < args.depth; k += step) {
      Block(args, {j, std::min(args.columns, j + kBlockColumns)},
            {k, std::min(args.depth, k + step)})
          .run();
    }
  }
}

}  // namespace anychip::cpu
