// Every operator by every instruction set and any number of threads: the same bits, nothing written
// beside its results, and what it refuses. The sanitizers watch it (.ci/run native).
//
// That the values are those of float64, at these sizes and others, is asked of the operators by the
// conformance suite, and of the vector functions in test_math.cpp.
#include <algorithm>
#include <array>
#include <deque>
#include <memory>

#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

constexpr DType kWide = DType::kFloat32;
constexpr double kEps = 1e-5;

// What one run of a kernel writes: made as the kernel is called, and read when it has returned.
class Results {
 public:
  Tensor& make(DType dtype, int64_t numel) { return tensors_.emplace_back(dtype, numel); }
  // A tensor, or a list of them, that is read and written.
  Tensor& copy(const Tensor& tensor) { return tensors_.emplace_back(tensor); }
  std::vector<TensorRef> copy(const std::vector<Tensor>& list) {
    std::vector<TensorRef> refs;
    for (const Tensor& tensor : list) {
      Tensor& own = copy(tensor);
      refs.push_back({own.data(), own.numel(), own.dtype()});
    }
    return refs;
  }
  std::vector<int64_t>& rows_of_sums(size_t count) {
    return rows_.emplace_back(count * kDigits + 1, -1);
  }
  uint8_t* bytes_of(int64_t count) {
    return codes_.emplace_back(static_cast<size_t>(count) + kGuard, kPattern).data();
  }

  Bytes bytes(const std::string& name) const {
    Bytes all;
    for (const Tensor& tensor : tensors_) {
      check_that(tensor.guards_intact(), name + ": wrote outside of its output");
      tensor.append_to(all);
    }
    for (const std::vector<int64_t>& rows : rows_) {
      check_that(rows.back() == -1, name + ": wrote outside of its output");
      const auto* begin = reinterpret_cast<const unsigned char*>(rows.data());
      all.insert(all.end(), begin, begin + rows.size() * sizeof rows[0]);
    }
    for (const Bytes& codes : codes_) {
      const auto guard = codes.end() - kGuard;
      check_that(std::count(guard, codes.end(), kPattern) == kGuard,
                 name + ": wrote outside of its output");
      all.insert(all.end(), codes.begin(), guard);
    }
    return all;
  }

 private:
  std::deque<Tensor> tensors_;
  std::deque<std::vector<int64_t>> rows_;

  static constexpr int kGuard = 64;
  static constexpr unsigned char kPattern = 0xA5;
  std::deque<Bytes> codes_;
};

void check_kernel(const std::string& name, const std::function<void(Results&)>& kernel) {
  check_same_bits(name, [&] {
    Results results;
    kernel(results);
    return results.bytes(name);
  });
}

void check_equal(const std::string& name, const Tensor& one, const Tensor& other) {
  Bytes bytes, want;
  one.append_to(bytes), other.append_to(want);
  check_that(bytes == want, name + ": other bits when it is asked for alone");
}

// Normal numbers, and where there are enough of them some that reach the ends.
Tensor wide_values(DType dtype, int64_t numel, unsigned seed) {
  Tensor x(dtype, random_values(numel, seed, 3.0));
  const double special[] = {0.0, -0.0, 12.0, -12.0,    100.0,     -100.0,
                            6e4, -6e4, 1e-7, INFINITY, -INFINITY, NAN};
  for (int64_t i = 0; i < 12 && numel > 20; ++i) x.set(i * numel / 12, special[i]);
  return x;
}

struct Shape {
  int64_t rows, hidden;
};

// stream: the type of a residual that is added before the norm, or null.
void test_norms(Shape shape, DType dtype, DType weight_dtype, const DType* stream) {
  const int64_t rows = shape.rows, hidden = shape.hidden, numel = rows * hidden;
  const std::string name = label("norms", dtype, rows) + " x " + std::to_string(hidden) +
                           " weight " + name_of(weight_dtype) +
                           (stream ? std::string(" residual ") + name_of(*stream) : "");
  const DType total_dtype = stream ? *stream : dtype;
  Tensor x = wide_values(dtype, numel, 1), grad(dtype, random_values(numel, 2));
  Tensor weight(weight_dtype, random_values(hidden, 3));
  Tensor bias(weight_dtype, random_values(hidden, 4));
  Tensor residual(total_dtype, random_values(numel, 5)), dtotal = residual;
  const int64_t rng[2] = {42, 0xffffffff - 10};
  const Drop drop{stream && rows % 2 == 1 ? rng : nullptr, 0.3};
  for (const bool centred : {false, true}) {
    check_kernel(name, [&](Results& out) {
      Tensor &rstd = out.make(kWide, rows), &mean = out.make(kWide, centred ? rows : 0);
      Tensor &y = out.make(dtype, numel), &total = out.make(total_dtype, stream ? numel : 0);
      ResidualSum sum;
      if (stream) sum = {residual.data(), total.data(), *stream};
      if (centred) {
        layer_norm_forward({x.data(), weight.data(), bias.data(), y.data(), mean.floats(),
                            rstd.floats(), rows, hidden, kEps, dtype, weight_dtype, sum});
      } else {
        rms_norm_forward({x.data(), weight.data(), y.data(), rstd.floats(), rows, hidden, kEps,
                          dtype, weight_dtype, sum});
      }
      const void* seen = stream ? total.data() : x.data();
      const auto backward = [&](Tensor* dx, Tensor* dweight, Tensor* dbias, Tensor* dresidual) {
        const auto data = [](Tensor* tensor) { return tensor ? tensor->data() : nullptr; };
        ResidualGradient both;
        if (stream) both = {dtotal.data(), data(dresidual), *stream, drop};
        if (centred) {
          layer_norm_backward({grad.data(), seen, weight.data(), mean.floats(), rstd.floats(),
                               data(dx), data(dweight), data(dbias), rows, hidden, dtype,
                               weight_dtype, both});
        } else {
          rms_norm_backward({grad.data(), seen, weight.data(), rstd.floats(), data(dx),
                             data(dweight), rows, hidden, dtype, weight_dtype, both});
        }
      };
      Tensor *dx[2], *dweight[2], *dbias[2], *dresidual[2];
      for (int i = 0; i < 2; ++i) {
        dx[i] = &out.make(dtype, numel), dweight[i] = &out.make(weight_dtype, hidden);
        dbias[i] = &out.make(weight_dtype, hidden), dresidual[i] = &out.make(total_dtype, numel);
      }
      backward(dx[0], dweight[0], dbias[0], dresidual[0]);
      backward(dx[1], nullptr, nullptr, nullptr), check_equal(name, *dx[0], *dx[1]);
      backward(nullptr, dweight[1], dbias[1], nullptr), check_equal(name, *dweight[0], *dweight[1]);
      check_equal(name, *dbias[0], *dbias[1]);
      if (stream) backward(nullptr, nullptr, nullptr, dresidual[1]);
      check_equal(name, *dresidual[0], *dresidual[1]);
    });
  }
}

// Every function, those that have it with a factor.
void test_activations(DType dtype, int64_t numel) {
  Tensor x = wide_values(dtype, numel, 1), up(dtype, random_values(numel, 2));
  Tensor grad(dtype, random_values(numel, 3));
  for (int number = 0; number <= static_cast<int>(Activation::kSoftplus); ++number) {
    const auto function = static_cast<Activation>(number);
    const std::string name =
        label("activation", dtype, numel) + " number " + std::to_string(number);
    check_kernel(name, [&](Results& out) {
      const auto run = [&](const void* factor, bool first, bool second) {
        const auto make = [&](bool needed) {
          return needed ? out.make(dtype, numel).data() : nullptr;
        };
        activation_forward(
            {x.data(), factor, nullptr, make(true), 1, numel, function, 1.5, 1.0, dtype, dtype});
        activation_backward({grad.data(), x.data(), factor, nullptr, make(first), make(second),
                             nullptr, 1, numel, function, 1.5, 1.0, dtype, dtype});
      };
      run(nullptr, true, false);
      if (function > Activation::kSilu) return;
      run(up.data(), true, false);
      run(up.data(), false, true);
    });
  }
}

// Rows of which some see nothing, by a mask, by causality or by a bias of -infinity.
void test_softmax(DType dtype, DType bias_dtype, Shape shape) {
  const int64_t rows = shape.rows, keys = shape.hidden, numel = rows * keys;
  Tensor x = wide_values(dtype, numel, 1), grad(dtype, random_values(numel, 2));
  Tensor bias(bias_dtype, random_values(2 * keys, 3));
  const std::unique_ptr<bool[]> mask(new bool[static_cast<size_t>(numel)]);
  for (int64_t i = 0; i < numel; ++i)
    mask[static_cast<size_t>(i)] = i / keys % 3 != 1 && i % 5 != 0;
  std::vector<int64_t> mask_rows, bias_rows;
  for (int64_t i = 0; i < rows; ++i)
    mask_rows.push_back(i * keys), bias_rows.push_back(i % 2 * keys);
  check_kernel(label("softmax", dtype, keys), [&](Results& out) {
    for (const int options : {0, 1, 2, 4, 7}) {
      const bool masked = options & 1, biased = options & 2, causal = options & 4;
      void* y = out.make(dtype, numel).data();
      softmax_forward({x.data(), y, masked ? mask.get() : nullptr, mask_rows.data(),
                       biased ? bias.data() : nullptr, bias_rows.data(), numel, 2 * keys, rows,
                       keys + 2, keys, 0.5, causal, dtype, bias_dtype});
      softmax_backward({grad.data(), y, out.make(dtype, numel).data(), rows, keys, 0.5, dtype});
    }
  });
}

// columns: of each row, where the elements are rows -3, 4, 11 ... of a wider whole; 0: all of it.
void test_dropout(DType dtype, int64_t numel, int64_t columns) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; columns > 0 && i < numel / columns; ++i) rows.push_back(7 * i - 3);
  const int64_t rng[2] = {42, 0xffffffff - 10};  // the counter carries into its upper word
  Tensor x = wide_values(dtype, numel, 1);
  check_kernel(label("dropout", dtype, numel) + " columns " + std::to_string(columns),
               [&](Results& out) {
                 const Drop drop{rng, 0.3, columns > 0 ? rows.data() : nullptr, columns + 5, 2};
                 dropout({x.data(), out.make(dtype, numel).data(), numel, columns, dtype, drop});
               });
}

// numbers: rows have some.
void test_biases(DType dtype, DType other, Shape shape, bool numbers) {
  const int64_t rows = shape.rows, hidden = shape.hidden, numel = rows * hidden;
  const std::string name = label("biases", dtype, rows) + " x " + std::to_string(hidden);
  std::vector<int64_t> numbers_of_rows;
  for (int64_t i = 0; i < rows; ++i) numbers_of_rows.push_back(i % 5 == 0 ? i - 7 : i);
  const int64_t rng[2] = {42, 0xffffffff - 10};
  Tensor x = wide_values(dtype, numel, 1), grad(dtype, random_values(numel, 2));
  Tensor bias(other, random_values(hidden, 3)), residual(other, random_values(numel, 4));
  Drop drop{rng, 0.3};
  if (numbers) drop = {rng, 0.3, numbers_of_rows.data(), hidden, 0};
  check_kernel(name, [&](Results& out) {
    const auto make = [&] { return out.make(dtype, numel).data(); };
    for (const auto function : {Activation::kGelu, Activation::kGeluTanh}) {
      activation_forward(
          {x.data(), nullptr, bias.data(), make(), rows, hidden, function, 0.0, 0.0, dtype, other});
      const auto backward = [&](void* dx, void* dbias) {
        activation_backward({grad.data(), x.data(), nullptr, bias.data(), dx, nullptr, dbias, rows,
                             hidden, function, 0.0, 0.0, dtype, other});
      };
      backward(make(), nullptr);
      backward(nullptr, out.make(other, hidden).data());
    }
    for (const void* added :
         {static_cast<const void*>(nullptr), static_cast<const void*>(bias.data())}) {
      void* y = out.make(other, numel).data();
      bias_dropout_add(
          {x.data(), residual.data(), added, y, rows, hidden, dtype, other, other, drop});
    }
    bias_dropout_backward({grad.data(), make(), nullptr, rows, hidden, dtype, drop});
    float* dbias = out.make(kWide, hidden).floats();
    bias_dropout_backward({grad.data(), nullptr, dbias, rows, hidden, dtype, drop});
  });
}

// Rows of x chosen in an order that meets each once, and others that meet some never or often.
void test_row_sums(DType dtype, DType weight_dtype, Shape shape, int64_t terms) {
  const int64_t rows = shape.rows, width = shape.hidden, all = rows * terms;
  std::vector<int64_t> each, some;
  for (int64_t i = 0; i < all; ++i) each.push_back(i * 7919 % all), some.push_back(i * i % rows);
  Tensor x(dtype, random_values(all * width, 1)), y(dtype, random_values(rows * width, 2));
  Tensor weights(weight_dtype, random_values(all, 3));
  for (void* given : {static_cast<void*>(nullptr), weights.data()}) {
    check_kernel(label("row sums", dtype, width), [&](Results& out) {
      sum_rows({x.data(), each.data(), given, out.make(dtype, rows * width).data(), rows, terms,
                all, width, dtype, weight_dtype});
      void* dweights = given ? out.make(weight_dtype, all).data() : nullptr;
      spread_rows({y.data(), x.data(), each.data(), given, out.make(dtype, all * width).data(),
                   dweights, rows, terms, width, dtype, weight_dtype});
      sum_rows_by_index({x.data(), some.data(), nullptr, out.make(dtype, rows * width).data(), rows,
                         1, all, width, dtype, dtype});
    });
  }
}

// Blocks below and above a vector and a group, and of an odd number of half bytes.
void test_quantization(DType dtype, int64_t numel, int64_t block, CodeFormat format) {
  const bool is_mx = format >= CodeFormat::kMXE4M3;
  const bool is_random = format == CodeFormat::kInt8 || format == CodeFormat::kInt4;
  const int64_t blocks = (numel + block - 1) / block, rng[2] = {42, 0xffffffff - 10};
  const std::string name = label("quantize", dtype, numel) + " block " + std::to_string(block) +
                           " format " + std::to_string(static_cast<int>(format));
  Tensor x = wide_values(dtype, numel, 1);
  for (const int64_t* words : {static_cast<const int64_t*>(nullptr), rng}) {
    if (words && !is_random) continue;
    check_kernel(name, [&](Results& out) {
      uint8_t* codes = out.bytes_of(has_half_bytes(format) ? (numel + 1) / 2 : numel);
      void* scales = is_mx ? out.bytes_of(blocks) : out.make(kWide, blocks).data();
      quantize({x.data(), words, codes, scales, numel, block, format, dtype});
      dequantize({codes, scales, out.make(kWide, numel).floats(), numel, block, format});
    });
  }
}

// Of whole tiles and not, of a depth in several parts, both ways round.
void test_product(int64_t rows, int64_t columns, int64_t depth) {
  Tensor left(kWide, random_values(rows * depth, 1)),
      right(kWide, random_values(depth * columns, 2));
  Tensor bias(kWide, random_values(columns, 3)), before(kWide, random_values(rows * columns, 4));
  for (int way = 0; way < 4; ++way) {
    check_kernel(label("product", kWide, depth), [&](Results& out) {
      for (float* given : {static_cast<float*>(nullptr), bias.floats()}) {
        product({left.floats(), right.floats(), given, out.make(kWide, rows * columns).floats(),
                 rows, columns, depth, way % 2 == 1, way > 1, false});
      }
      product({left.floats(), right.floats(), nullptr, out.copy(before).floats(), rows, columns,
               depth, way % 2 == 1, way > 1, true});
    });
  }
}

void test_bfloat16_product(int64_t rows, int64_t columns, int64_t depth) {
  const DType bf16 = DType::kBFloat16;
  Tensor left(bf16, random_values(rows * depth, 1)), right(bf16, random_values(depth * columns, 2));
  Tensor bias(kWide, random_values(columns, 3)), before(kWide, random_values(rows * columns, 4));
  const auto numbers = [](Tensor& tensor) { return static_cast<BFloat16*>(tensor.data()); };
  for (int way = 0; way < 4; ++way) {
    check_kernel(label("bfloat16_product", bf16, depth), [&](Results& out) {
      Tensor& panels = out.make(bf16, packed_numel(columns, depth));
      bfloat16_panels({numbers(right), numbers(panels), columns, depth, way > 1});
      for (float* given : {static_cast<float*>(nullptr), bias.floats()}) {
        bfloat16_product({numbers(left), numbers(right), nullptr, given,
                          out.make(kWide, rows * columns).floats(), rows, columns, depth,
                          way % 2 == 1, way > 1, false});
      }
      bfloat16_product({numbers(left), nullptr, numbers(panels), nullptr, out.copy(before).floats(),
                        rows, columns, depth, way % 2 == 1, false, true});
    });
  }
}

void test_hadamard(DType dtype, int64_t numel, int64_t block) {
  Tensor x = wide_values(dtype, numel, 1);
  check_kernel(label("hadamard", dtype, numel) + " block " + std::to_string(block),
               [&](Results& out) {
                 hadamard({x.data(), out.make(dtype, numel).data(), numel, block, dtype});
               });
}

struct Heads {
  int64_t batch, seq, heads, kv_heads, head_dim;
};

// Rows of which there are many, few that are long, and one of many equal numbers.
void test_top_k(DType dtype, Shape shape, int64_t count, bool equal) {
  Tensor x = wide_values(dtype, shape.rows * shape.hidden, 1);
  for (int64_t i = 0; equal && i < x.numel(); ++i) x.set(i, i % 3 == 0 ? -1.0 : 1.0);
  std::vector<int64_t> indices(static_cast<size_t>(shape.rows * count));
  check_kernel(
      label("top_k", dtype, shape.hidden) + " of which " + std::to_string(count),
      [&](Results& out) {
        Tensor& y = out.make(dtype, shape.rows * count);
        top_k({x.data(), y.data(), indices.data(), shape.rows, shape.hidden, count, dtype});
        for (int64_t i = 0; i < y.numel(); ++i) {
          const int64_t at = i / count * shape.hidden + indices[static_cast<size_t>(i)];
          const double value = x.get(at);
          check_that(std::isnan(value) ? std::isnan(y.get(i)) : value == y.get(i),
                     "top_k: an index of another number");
          const double before = i % count == 0 ? INFINITY : std::fabs(y.get(i - 1));
          check_that(!(std::fabs(value) > before), "top_k: a number after a smaller one");
        }
      });
}

void test_rope(DType dtype, const Heads& s, bool interleaved, bool inverse) {
  const std::string name = label("rope", dtype, s.head_dim);
  const int64_t row = s.batch * s.seq * s.head_dim;
  Tensor q(dtype, random_values(row * s.heads, 1)), k(dtype, random_values(row * s.kv_heads, 2));
  Tensor cos(kWide, random_values(s.seq * s.head_dim / 2, 3)),
      sin(kWide, random_values(cos.numel(), 4));
  check_kernel(name, [&](Results& out) {
    Tensor &k_out = out.make(dtype, k.numel()), &k_alone = out.make(dtype, k.numel());
    Rope args{q.data(), k.data(), cos.floats(), sin.floats(), nullptr,     k_out.data(), s.batch,
              s.seq,    s.heads,  s.kv_heads,   s.head_dim,   interleaved, inverse,      dtype};
    args.q_out = out.make(dtype, q.numel()).data();
    rope(args);
    args.q = args.q_out = nullptr, args.k_out = k_alone.data();
    rope(args);
    check_equal(name, k_out, k_alone);
  });
}

void test_cross_entropy(DType dtype, Shape shape, Reduction reduction) {
  const int64_t rows = shape.rows, vocab = shape.hidden, ignored = -100;
  const int64_t losses = reduction == Reduction::kNone ? rows : 1;
  Tensor logits = wide_values(dtype, rows * vocab, 1), grad(kWide, random_values(losses, 2));
  std::vector<int64_t> target;
  for (int64_t i = 0; i < rows; ++i) target.push_back(i % 3 == 1 ? ignored : (i * 7919) % vocab);
  const CrossEntropyOptions options{rows, vocab, ignored, 0.1, 1e-3, reduction, dtype};
  check_kernel(label("cross_entropy", dtype, vocab), [&](Results& out) {
    Tensor &lse = out.make(kWide, rows), &dlogits = out.make(dtype, logits.numel());
    float* loss = out.make(kWide, losses).floats();
    cross_entropy_forward({logits.data(), target.data(), loss, lse.floats(), options});
    cross_entropy_backward(
        {grad.floats(), logits.data(), target.data(), lse.floats(), dlogits.data(), options});
  });
}

// Of some classes, in place of the logits too: the target's may be one of others.
void test_logit_partials(Shape shape) {
  const int64_t rows = shape.rows, vocab = shape.hidden, first = 5;
  const Tensor logits = wide_values(kWide, rows * vocab, 1);
  Tensor grads[3] = {Tensor(kWide, random_values(rows, 2)), Tensor(kWide, random_values(rows, 3)),
                     Tensor(kWide, random_values(rows, 4))};
  std::vector<int64_t> target;
  for (int64_t i = 0; i < rows; ++i)
    target.push_back(i % 3 == 1 ? i % 2 * 9999 : first + i % vocab);
  check_kernel(label("logit_partials", kWide, vocab), [&](Results& out) {
    float *lse = out.make(kWide, rows).floats(), *picked = out.make(kWide, rows).floats();
    float* total = out.make(kWide, rows).floats();
    Tensor &apart = out.make(kWide, logits.numel()), &placed = out.make(kWide, logits.numel());
    for (int64_t i = 0; i < logits.numel(); ++i) placed.set(i, logits.get(i));
    logit_partials_forward(
        {placed.floats(), target.data(), lse, picked, total, rows, vocab, first});
    for (Tensor* dlogits : {&apart, &placed}) {
      logit_partials_backward({grads[0].floats(), grads[1].floats(), grads[2].floats(),
                               placed.floats(), target.data(), lse, dlogits->floats(), rows, vocab,
                               first});
    }
    check_equal("logit_partials in place", apart, placed);
  });
}

// Sizes that straddle vectors and chunks (16384), together enough for several threads; numbers of
// so many exponents that tiles of sums of squares take two sums, three, or none.
std::vector<Tensor> random_list(DType dtype, unsigned seed, double exponents = 0.0) {
  std::vector<Tensor> list;
  for (const int64_t numel : {0, 1, 7, 8, 15, 16, 17, 63, 1000, 4097, 16384, 40001}) {
    Doubles values = random_values(numel, seed++);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::ldexp(values[i], -static_cast<int>(exponents * (i * 7919 % 4093) / 4093));
    }
    list.emplace_back(dtype, values);
  }
  return list;
}

void test_lists(DType dtype, double exponents, bool special) {
  std::vector<Tensor> list = random_list(dtype, 1, exponents);
  if (special) list.back().set(5, INFINITY), list.back().set(39999, NAN);
  const float norm = 7.0f, scale = 3.0f;
  const std::string name = std::string("lists ") + name_of(dtype) + " " + std::to_string(exponents);
  check_kernel(name, [&](Results& out) {
    l2_norm({out.copy(list), out.make(kWide, 1).floats()});
    sums_of_squares({out.copy(list), out.rows_of_sums(list.size()).data()});
    clip({out.copy(list), &norm, 1.0});
    unscale_and_check({out.copy(list), &scale, out.copy(Tensor(kWide, Doubles{0.0})).floats()});
  });
}

const float kOne = 1.0f;

// Every type of parameter, of gradient and of copy; they are converted apart from each other.
void test_updates(DType param, DType grad, const DType* low) {
  const std::string name = std::string("updates ") + name_of(param) + " grad " + name_of(grad);
  const std::vector<Tensor> params = random_list(param, 1), grads = random_list(grad, 2);
  const std::vector<Tensor> averages = random_list(kWide, 3);
  const float lr = 1e-2f, scale = 8.0f, clip = 0.25f;
  const auto update = [&](Results& out, size_t num_states) {
    Update result{{}, &lr, out.copy(Tensor(kWide, Doubles{4.0})).floats(), &scale, &clip, nullptr};
    const auto ps = out.copy(params), gs = out.copy(grads);
    const auto ms = out.copy(averages), vs = out.copy(averages);
    const auto lows = low ? out.copy(random_list(*low, 5)) : std::vector<TensorRef>(ps.size());
    for (size_t i = 0; i < ps.size(); ++i) {
      const auto state = [&](const TensorRef& tensor, size_t number) {
        return num_states > number ? static_cast<float*>(tensor.data) : nullptr;
      };
      result.tensors.push_back({ps[i], gs[i], {state(ms[i], 0), state(vs[i], 1)}, lows[i]});
    }
    return result;
  };
  const std::vector<float> trust(params.size(), 3.0f);
  check_kernel(name, [&](Results& out) {
    adamw({update(out, 2), 0.9, 0.999, 1e-8, 0.01});
    Update coded = update(out, 0);
    for (UpdateTensor& tensor : coded.tensors) {
      const int64_t numel = tensor.param.numel;
      for (int k = 0; k < 2; ++k) {
        uint8_t* codes = out.bytes_of(numel);
        for (int64_t i = 0; i < numel; ++i) codes[i] = static_cast<uint8_t>(i * 7);
        tensor.states[k] = codes;
        tensor.scales[k] = out.copy(Tensor(kWide, random_values((numel + 255) / 256, 6))).floats();
      }
    }
    adamw_8bit({coded, 0.9, 0.999, 1e-8, 0.01});
    lion({update(out, 1), 0.9, 0.999, 0.01});
    lamb({update(out, 2), trust.data(), &kOne, &kOne, 0.9, 0.999, 1e-6, 0.01});
    int64_t* sums = out.rows_of_sums(2 * params.size()).data();
    lamb_sums_of_squares({update(out, 2), sums, &kOne, &kOne, 0.9, 0.999, 1e-6, 0.01});
    for (const bool decoupled : {false, true}) {
      sgd({update(out, 0), 0.0, false, 0.1, decoupled});
      sgd({update(out, 1), 0.9, decoupled, 0.1, decoupled});
    }
  });
}

void test_wrong_arguments() {
  float value = 1.0f, *v = &value;
  const int64_t rng[2] = {0, 0};
  uint8_t bytes[1] = {0};
  int64_t place = 0;
  const TensorRef one{v, 1, kWide}, half{v, int64_t{1} << 46, kWide};
  const Update no_lr{{}, nullptr, v, nullptr, nullptr, nullptr};
  const Update no_state{{{one, one, {nullptr, nullptr}, {}}}, v, v, nullptr, nullptr, nullptr};
  const Update no_scales{{{one, one, {v, v}, {}}}, v, v, nullptr, nullptr, nullptr};
  const auto rows = [&](int64_t columns, int64_t column) {
    dropout({v, v, 1, columns, kWide, {rng, 0.5, rng, 4, column}});
  };
  const auto turned = [&](int64_t head_dim, void* q_out) {
    rope({v, v, v, v, q_out, v, 1, 1, 1, 1, head_dim, false, false, kWide});
  };
  const auto activate = [&](const void* x, const void* up, const void* bias, int64_t hidden,
                            Activation function) {
    activation_forward({x, up, bias, v, 1, hidden, function, 1.0, 20.0, kWide, kWide});
  };
  const auto weigh = [&](const void* bias, int64_t queries, int64_t begin) {
    softmax_forward(
        {v, v, nullptr, nullptr, bias, &begin, 0, 1, 1, queries, 1, 1.0, true, kWide, kWide});
  };
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"hidden >= 0, got -4",
       [&] { rms_norm_forward({v, v, v, nullptr, 2, -4, 0, kWide, kWide}); }},
      {"address of weight",
       [&] { layer_norm_forward({v, nullptr, v, v, v, v, 1, 1, 0, kWide, kWide}); }},
      {"address of total",
       [&] { rms_norm_forward({v, v, v, nullptr, 1, 1, 0, kWide, kWide, {v, nullptr, kWide}}); }},
      {"hidden >= 0, got -5", [&] { activate(v, nullptr, nullptr, -5, Activation::kGelu); }},
      {"address of x", [&] { activate(nullptr, nullptr, nullptr, 1, Activation::kGelu); }},
      {"up or bias, got both", [&] { activate(v, v, v, 1, Activation::kGelu); }},
      {"GELU or SILU with up", [&] { activate(v, v, nullptr, 1, Activation::kRelu); }},
      {"GELU with a bias", [&] { activate(v, nullptr, v, 1, Activation::kSilu); }},
      {"queries >= 1 where causal", [&] { weigh(nullptr, 0, 0); }},
      {"rows of bias within its 1 elements, got one from 1 on", [&] { weigh(v, 1, 1); }},
      {"rows of bias within its 1 elements, got one from -1 on", [&] { weigh(v, 1, -1); }},
      {"numel >= 0, got -1", [&] { dropout({v, v, -1, 0, kWide, {rng, 0.5}}); }},
      {"0 <= p <= 1", [&] { dropout({v, v, 1, 0, kWide, {rng, 1.5}}); }},
      {"1 elements in rows of 2", [&] { rows(2, 0); }},
      {"column 4 to 5 of 4", [&] { rows(1, 4); }},
      {"column -1 to 0 of 4", [&] { rows(1, -1); }},
      {"even head_dim, got 3", [&] { turned(3, v); }},
      {"q with q_out", [&] { turned(2, nullptr); }},
      {"block >= 1, got 0",
       [&] { quantize({v, nullptr, bytes, v, 1, 0, CodeFormat::kInt8, kWide}); }},
      {"address of codes",
       [&] { quantize({v, nullptr, nullptr, v, 1, 1, CodeFormat::kInt8, kWide}); }},
      {"address of scales", [&] { dequantize({bytes, nullptr, v, 1, 1, CodeFormat::kInt8}); }},
      {"3 elements in blocks of 2", [&] { hadamard({v, v, 3, 2, kWide}); }},
      {"6 elements in blocks of 6", [&] { hadamard({v, v, 6, 6, kWide}); }},
      {"count <= width 1, got 2", [&] { top_k({v, v, &place, 1, 1, 2, kWide}); }},
      {"width <= 2^32", [&] { top_k({v, v, &place, 1, int64_t{1} << 33, 1, kWide}); }},
      {"address of indices", [&] { top_k({v, v, nullptr, 1, 1, 1, kWide}); }},
      {"numel >= 0, got -2", [&] { l2_norm({{{v, -2, kWide}}, v}); }},
      {"address of a tensor", [&] { clip({{{nullptr, 2, kWide}}, v, 1.0}); }},
      {"numel of all tensors <= ", [&] { l2_norm({{half, half, half}, v}); }},
      {"address of out", [&] { sums_of_squares({{one}, nullptr}); }},
      {"address of lr", [&] { adamw({no_lr, 0, 0, 0, 0}); }},
      {"address of lr", [&] { sgd({no_lr, 0, false, 0, false}); }},
      {"address of lr", [&] { lion({no_lr, 0, 0, 0}); }},
      {"address of lr", [&] { lamb({no_lr, v, v, v, 0, 0, 0, 0}); }},
      {"address of a state", [&] { lion({no_state, 0, 0, 0}); }},
      {"address of a state's scales", [&] { adamw_8bit({no_scales, 0, 0, 0, 0}); }},
      {"address of trust", [&] { lamb({no_state, nullptr, v, v, 0, 0, 0, 0}); }},
  };
  for (const auto& [message, call] : cases) check_throws<std::invalid_argument>(message, call);
  sums_of_squares({{}, nullptr});  // no tensor, no row
}

void test_places() {
  const int64_t experts[] = {2, 0, -1, 2, 3, 0, 2}, want[] = {2, 0, 5, 3, 6, 1, 4};
  int64_t place[7], choice[7], ends[3];
  places_by_expert({experts, place, choice, ends, 7, 3});
  for (int64_t i = 0; i < 7; ++i) {
    check_that(place[i] == want[i] && choice[place[i]] == i, "a place of a choice");
  }
  check_that(ends[0] == 2 && ends[1] == 2 && ends[2] == 5, "the ends of experts");
}

void test_wrong_rows_write_nothing() {
  Tensor x(kWide, Doubles(10, 1.0)), y(kWide, Doubles(10, 7.0));
  for (const int64_t bad : {int64_t{2}, int64_t{-1}}) {
    const int64_t index[2] = {0, bad};
    const std::string got =
        "from 0 to 1, got " + (bad < 0 ? std::string("-1 to 0") : std::string("0 to 2"));
    const RowSums sums{x.data(), index, nullptr, y.data(), 2, 1, 2, 5, kWide, kWide};
    check_throws<std::out_of_range>(got.c_str(), [&] { sum_rows(sums); });
    check_throws<std::out_of_range>(got.c_str(), [&] { sum_rows_by_index(sums); });
    check_throws<std::out_of_range>(got.c_str(), [&] {
      spread_rows({x.data(), nullptr, index, nullptr, y.data(), nullptr, 2, 1, 5, kWide, kWide});
    });
  }
  check_that(y.values() == Doubles(10, 7.0), "a wrong row: something was written");
}

void test_wrong_targets_write_nothing() {
  const CrossEntropyOptions options{2, 5, -100, 0.0, 0.0, Reduction::kMean, kWide};
  Tensor logits(kWide, Doubles(10, 0.0)), out(kWide, Doubles(10, 7.0));
  for (const int64_t bad : {int64_t{5}, int64_t{-1}}) {
    const int64_t target[2] = {0, bad};
    const std::string got = "[0, 5) or ignore_index -100, got " + std::to_string(bad) + " in row 1";
    check_throws<std::out_of_range>(got.c_str(), [&] {
      cross_entropy_forward({logits.data(), target, out.floats(), out.floats() + 1, options});
    });
    check_throws<std::out_of_range>(got.c_str(), [&] {
      cross_entropy_backward(
          {logits.floats(), logits.data(), target, logits.floats(), out.data(), options});
    });
  }
  check_that(out.values() == Doubles(10, 7.0), "a wrong target: something was written");
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  for (const DType dtype : kDTypes) {
    // 97 x 1000 elements are shared by several threads; 40 rows are three blocks of the row sums.
    std::vector<Shape> shapes = {{97, 1000}, {40, 17}, {0, 16}};
    for (const int64_t size : kSizes) {
      if (size > 0) shapes.push_back({3, size});
      test_activations(dtype, size);
      test_dropout(dtype, size, 0);
    }
    for (const Shape shape : shapes) {
      test_norms(shape, dtype, dtype, nullptr);
      test_cross_entropy(dtype, shape, Reduction::kMean);
      if (dtype == kWide) test_logit_partials(shape);
    }
    for (const Shape shape : {Shape{9, 1}, Shape{70, 63}, Shape{97, 1000}}) {
      test_softmax(dtype, dtype, shape);
      test_softmax(dtype, kWide, shape);
    }
    for (const Reduction reduction : {Reduction::kNone, Reduction::kSum}) {
      test_cross_entropy(dtype, {7, 63}, reduction);
    }
    test_norms({3, 63}, dtype, DType::kFloat32, nullptr);
    for (const DType& stream : kDTypes) {
      for (const Shape shape : {Shape{97, 1000}, Shape{40, 17}, Shape{3, 1}}) {
        test_norms(shape, dtype, DType::kFloat32, &stream);
      }
    }
    test_activations(dtype, kManyElements);
    for (const bool numbers : {false, true}) {
      for (const DType other : {dtype, kWide}) {
        for (const Shape shape : {Shape{3, 1}, Shape{500, 8}, Shape{40, 17}, Shape{97, 1000},
                                  Shape{3, 2049}, Shape{0, 16}}) {
          test_biases(dtype, other, shape, numbers);
        }
      }
    }
    for (const int64_t columns : {1, 3, 64, 65, 500, 1001}) {
      test_dropout(dtype, 100 * columns, columns);
    }
    // head_dim / 2 below, at and above the 16 lanes and twice as many; one has work for several
    // threads.
    for (const Heads& heads :
         {Heads{1, 1, 1, 1, 2}, Heads{2, 3, 4, 2, 16}, Heads{2, 5, 3, 1, 30}, Heads{1, 4, 2, 2, 32},
          Heads{1, 3, 2, 1, 40}, Heads{1, 2, 1, 1, 0}, Heads{0, 4, 2, 2, 8}, Heads{1, 3, 2, 2, 126},
          Heads{2, 70, 8, 4, 64}, Heads{1, 3, 2, 2, 96}}) {
      for (const bool interleaved : {false, true}) {
        for (const bool inverse : {false, true}) test_rope(dtype, heads, interleaved, inverse);
      }
    }
    for (const int64_t block : {1, 2, 4, 8, 16, 32, 64, 128, 256, 8192}) {
      for (const int64_t blocks : {0, 1, 5, 7}) test_hadamard(dtype, blocks * block, block);
    }
    test_hadamard(dtype, 100000, 32);
    for (const bool equal : {false, true}) {
      for (const Shape shape : {Shape{97, 3}, Shape{3, 257}, Shape{2, 5003}, Shape{1, 70001}}) {
        for (const int64_t count : {int64_t{1}, shape.hidden / 20, shape.hidden / 2}) {
          test_top_k(dtype, shape, count, equal);
        }
      }
    }
    for (const Shape shape : {Shape{1, 1}, Shape{5, 17}, Shape{3, 2049}, Shape{97, 1000}}) {
      for (const int64_t terms : {1, 3}) {
        test_row_sums(dtype, dtype, shape, terms);
        test_row_sums(dtype, kWide, shape, terms);
      }
    }
    for (const int64_t numel : {0, 1, 17, 4097, 40001}) {
      for (int format = 0; format < 8; ++format) {
        test_quantization(dtype, numel, 32, static_cast<CodeFormat>(format));
      }
      for (const int64_t block : {1, 7, 256, 5001}) {
        test_quantization(dtype, numel, block, CodeFormat::kInt8);
        test_quantization(dtype, numel, block, CodeFormat::kInt4);
      }
    }
    for (const double exponents : {0.0, 17.0, 20.0, 30.0, 45.0, 120.0}) {
      test_lists(dtype, exponents, exponents == 30.0);
    }
  }
  const DType f32 = DType::kFloat32, bf16 = DType::kBFloat16, f16 = DType::kFloat16;
  test_product(1, 1, 1);
  test_product(0, 4, 4);
  test_product(7, 5, 0);
  test_product(13, 37, 259);
  test_product(150, 19, 40);
  test_product(9, 2100, 70);  // more columns than are copied at once
  for (const auto [rows, columns, depth] : {std::array<int64_t, 3>{1, 1, 1},
                                            {0, 4, 4},
                                            {7, 5, 0},
                                            {33, 70, 1090},
                                            {600, 9, 17},
                                            {40, 8200, 33}}) {
    test_bfloat16_product(rows, columns, depth);
  }
  test_updates(f32, f32, nullptr);
  test_updates(bf16, f16, &f32);
  test_updates(f16, bf16, &bf16);
  test_updates(f32, bf16, &f16);
  test_wrong_arguments();
  test_wrong_targets_write_nothing();
  test_wrong_rows_write_nothing();
  test_places();
  return report("kernels");
}
