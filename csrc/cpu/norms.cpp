// RMSNorm and LayerNorm, also of a sum with a residual, over the threads.
//
// Note [Sums over rows]: the gradients of weight and bias are sums over rows. The rows are cut into
// blocks of max(16, ceil(rows / 64)) whatever the number of threads; a block adds its rows in order
// to a float32 partial sum, and the partial sums are added in order. A term passes at most
// rows / 64 + 64 roundings.
#include <algorithm>
#include <memory>

#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {
namespace {

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

  void write_sum(int64_t which, DType dtype, void* out) const {
    float* sum = partial_.get() + which * hidden_;
    for (int64_t b = 1; b < blocks_; ++b) {
      kernels().add_to(sum, sum + b * stride_, hidden_);
    }
    kernels().from_float(dtype, sum, out, hidden_);
  }

 private:
  int64_t rows_, hidden_, block_, blocks_, stride_;
  std::unique_ptr<float[]> partial_;
};

int64_t check_rows(const char* where, int64_t rows, int64_t hidden) {
  return check_sizes(where, {{"rows", rows}, {"hidden", hidden}});
}

void check_sum(const char* where, const ResidualSum& sum) {
  if (sum.residual) check_address(where, "total", sum.total);
}

// A row of float32 for one thread.
std::unique_ptr<float[]> scratch_row(int64_t hidden) {
  return std::unique_ptr<float[]>(new float[static_cast<size_t>(hidden)]);
}

}  // namespace

void rms_norm_forward(const RmsNormForward& args) {
  const char* where = "rms_norm_forward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "y", args.y);
    check_sum(where, args.sum);
  }
  if (args.hidden == 0 && !args.rstd) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  parallel_items(args.rows, args.hidden, [&](Range rows) {
    const auto scratch = scratch_row(args.hidden);
    kernels().rms_norm_forward(args, weight.data(), scratch.get(), rows);
  });
}

void rms_norm_backward(const RmsNormBackward& args) {
  const char* where = "rms_norm_backward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "rstd", args.rstd);
  }
  if (args.hidden == 0) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  if (!args.dweight) {
    parallel_items(args.rows, args.hidden, [&](Range rows) {
      kernels().rms_norm_backward(args, weight.data(), nullptr, rows);
    });
    return;
  }
  const RowBlocks blocks(args.rows, args.hidden, 1);
  blocks.run([&](Range rows, float* dweight) {
    kernels().rms_norm_backward(args, weight.data(), dweight, rows);
  });
  blocks.write_sum(0, args.weight_dtype, args.dweight);
}

void layer_norm_forward(const LayerNormForward& args) {
  const char* where = "layer_norm_forward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "y", args.y);
    check_sum(where, args.sum);
  }
  if (args.hidden == 0 && !args.mean && !args.rstd) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  const FloatVector bias(args.bias, args.weight_dtype, args.hidden);
  parallel_items(args.rows, args.hidden, [&](Range rows) {
    const auto scratch = scratch_row(args.hidden);
    kernels().layer_norm_forward(args, weight.data(), bias.data(), scratch.get(), rows);
  });
}

void layer_norm_backward(const LayerNormBackward& args) {
  const char* where = "layer_norm_backward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "mean", args.mean);
    check_address(where, "rstd", args.rstd);
  }
  if (args.hidden == 0) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  if (!args.dweight && !args.dbias) {
    parallel_items(args.rows, args.hidden, [&](Range rows) {
      kernels().layer_norm_backward(args, weight.data(), nullptr, nullptr, rows);
    });
    return;
  }
  const RowBlocks blocks(args.rows, args.hidden, 2);
  blocks.run([&](Range rows, float* sums) {
    kernels().layer_norm_backward(args, weight.data(), args.dweight ? sums : nullptr,
                                  args.dbias ? sums + args.hidden : nullptr, rows);
  });
  if (args.dweight) blocks.write_sum(0, args.weight_dtype, args.dweight);
  if (args.dbias) blocks.write_sum(1, args.weight_dtype, args.dbias);
}

}  // namespace anychip::cpu
