// Sums over rows, and what is added to every row or multiplied with it.
//
// Note [Sums over rows]: the gradients of weights and biases are sums over rows. The rows are cut
// into blocks of max(16, ceil(rows / 64)) whatever the number of threads; a block adds its rows in
// order to a float32 partial sum, and the partial sums are added in order. A term passes at most
// rows / 64 + 64 roundings.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "parallel.h"

namespace anychip::cpu {

// `weight` as float32: itself, or a converted copy. Null stays null.
class FloatVector {
 public:
  FloatVector(const void* values, DType dtype, int64_t numel) {
    if (!values || dtype == DType::kFloat32) {
      data_ = static_cast<const float*>(values);
      return;
    }
    copy_.reset(new float[static_cast<size_t>(numel)]);
    kernels().to_float(dtype, values, copy_.get(), numel);
    data_ = copy_.get();
  }
  const float* data() const { return data_; }

 private:
  std::unique_ptr<float[]> copy_;
  const float* data_;
};

// Note [Sums over rows]: `count` sums of `hidden` numbers each, for every block of rows.
class RowBlocks {
 public:
  RowBlocks(int64_t rows, int64_t hidden, int64_t count)
      : rows_(rows),
        hidden_(hidden),
        block_(std::max<int64_t>(16, (rows + 63) / 64)),
        blocks_((rows + block_ - 1) / block_),
        stride_(count * hidden),
        partial_(new float[static_cast<size_t>(std::max<int64_t>(1, blocks_) * stride_)]()) {}

  // work(rows, sums) for every block; sums: (count, hidden).
  template <class Work>
  void run(const Work& work) const {
    parallel_items(blocks_, block_ * hidden_, [&](Range blocks) {
      for (int64_t b = blocks.begin; b < blocks.end; ++b) {
        const Range rows{b * block_, std::min(rows_, (b + 1) * block_)};
        work(rows, partial_.get() + b * stride_);
      }
    });
  }

  // repeats: of the numbers in a row that are of one sum.
  void write_sum(int64_t which, DType dtype, void* out, int64_t repeats = 1) const {
    float* sum = partial_.get() + which * hidden_;
    for (int64_t b = 1; b < blocks_; ++b) {
      kernels().add_to(sum, sum + b * stride_, hidden_);
    }
    const int64_t width = hidden_ / repeats;
    for (int64_t k = 1; k < repeats; ++k) kernels().add_to(sum, sum + k * width, width);
    kernels().from_float(dtype, sum, out, width);
  }

 private:
  int64_t rows_, hidden_, block_, blocks_, stride_;
  std::unique_ptr<float[]> partial_;
};

// Rows of which many narrow ones are taken for one: their number, their width, and the bias as
// often.
class WideRows {
 public:
  WideRows(const void* bias, DType dtype, int64_t rows, int64_t hidden, bool may_join = true)
      : numel_(rows * hidden),
        repeats_(may_join && hidden < kNarrow ? std::max<int64_t>(1, std::min(rows, kWide / hidden))
                                              : 1),
        width_(hidden * repeats_),
        bias_(bias, dtype, hidden) {
    if (!bias || repeats_ == 1) return;
    copies_.reset(new float[static_cast<size_t>(width_)]);
    for (int64_t k = 0; k < repeats_; ++k) {
      std::memcpy(copies_.get() + k * hidden, bias_.data(),
                  static_cast<size_t>(hidden) * sizeof(float));
    }
  }

  const float* bias() const { return copies_ ? copies_.get() : bias_.data(); }
  int64_t width() const { return width_; }

  // work(elements) over the threads.
  template <class Work>
  void run(const Work& work) const {
    parallel_items(count(), width_, [&](Range rows) { work(elements(rows)); });
  }

  // The same with work(elements, sums) for sums of each column, which are written to `out`.
  template <class Work>
  void run_sum(DType dtype, void* out, const Work& work) const {
    const RowBlocks blocks(count(), width_, 1);
    blocks.run([&](Range rows, float* sums) { work(elements(rows), sums); });
    blocks.write_sum(0, dtype, out, repeats_);
  }

 private:
  static constexpr int64_t kNarrow = 256, kWide = 1024;

  int64_t count() const { return (numel_ + width_ - 1) / width_; }
  Range elements(Range rows) const {
    return {rows.begin * width_, std::min(numel_, rows.end * width_)};
  }

  int64_t numel_, repeats_, width_;
  FloatVector bias_;
  std::unique_ptr<float[]> copies_;
};

}  // namespace anychip::cpu
