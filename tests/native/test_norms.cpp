// RMSNorm and LayerNorm, forward and backward, against float64.
#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

struct Shape {
  int64_t rows, hidden;
};

constexpr double kEps = 1e-5;

struct Inputs {
  Shape shape;
  DType dtype, weight_dtype;
  Tensor x, grad, weight, bias;

  Inputs(Shape s, DType d, DType w, double offset)
      : shape(s),
        dtype(d),
        weight_dtype(w),
        x(d, shifted(random_values(s.rows * s.hidden, 1, 2.0), offset)),
        grad(d, random_values(s.rows * s.hidden, 2)),
        weight(w, random_values(s.hidden, 3)),
        bias(w, random_values(s.hidden, 4)) {}

  static Doubles shifted(Doubles values, double offset) {
    for (double& value : values) value += offset;
    return values;
  }
  int64_t numel() const { return shape.rows * shape.hidden; }
  std::string name(const char* what) const {
    return label(what, dtype, shape.rows) + " x " + std::to_string(shape.hidden) + " weight " +
           name_of(weight_dtype);
  }
};

// Mean (0 for RMSNorm), rstd and the normalised row, with every sum in float64.
struct Row {
  double mean = 0.0, rstd = 0.0;
  Doubles normalized;

  Row(const Inputs& in, int64_t row, bool centred) {
    const int64_t hidden = in.shape.hidden;
    const auto n = static_cast<double>(hidden);
    for (int64_t i = 0; i < hidden && centred; ++i) mean += in.x.get(row * hidden + i) / n;
    double variance = 0.0;
    for (int64_t i = 0; i < hidden; ++i) {
      const double v = in.x.get(row * hidden + i) - mean;
      variance += v * v / n;
    }
    rstd = 1.0 / std::sqrt(variance + kEps);
    for (int64_t i = 0; i < hidden; ++i) {
      normalized.push_back((in.x.get(row * hidden + i) - mean) * rstd);
    }
  }
};

struct Results {
  Expected y, mean, rstd, dx, dweight, dbias;
};

// Both norms: dx = rstd (dy - [mean(dy)] - normalized mean(dy normalized)), dy = grad * weight.
Results expected_results(const Inputs& in, bool centred) {
  const int64_t hidden = in.shape.hidden, rows = in.shape.rows;
  Results r{Expected(in.numel()), Expected(rows),   Expected(rows),
            Expected(in.numel()), Expected(hidden), Expected(hidden)};
  for (int64_t row = 0; row < rows; ++row) {
    const Row reference(in, row, centred);
    const auto at_row = static_cast<size_t>(row);
    r.mean.want[at_row] = reference.mean;
    r.mean.terms[at_row] = std::fabs(reference.mean) + 1.0;
    r.rstd.want[at_row] = r.rstd.terms[at_row] = reference.rstd;
    double sum = 0.0, sum_terms = 0.0, along = 0.0, along_terms = 0.0;
    for (int64_t i = 0; i < hidden; ++i) {
      const double dy = in.grad.get(row * hidden + i) * in.weight.get(i);
      const double xhat = reference.normalized[static_cast<size_t>(i)];
      sum += centred ? dy : 0.0;
      sum_terms += centred ? std::fabs(dy) : 0.0;
      along += dy * xhat;
      along_terms += std::fabs(dy * xhat);
    }
    const double n = static_cast<double>(hidden);
    for (int64_t i = 0; i < hidden; ++i) {
      const auto at = static_cast<size_t>(row * hidden + i), column = static_cast<size_t>(i);
      const double grad = in.grad.get(row * hidden + i), weight = in.weight.get(i);
      const double xhat = reference.normalized[column];
      const double bias = centred ? in.bias.get(i) : 0.0;
      r.y.want[at] = xhat * weight + bias;
      // The row sums add an error that is the same for the whole row: |normalized| is 1 on average.
      r.y.terms[at] = (std::fabs(xhat) + 1.0) * std::fabs(weight) + std::fabs(bias) +
                      std::fabs(reference.mean * reference.rstd * weight) * 0x1p-12;
      r.dx.want[at] = reference.rstd * (grad * weight - sum / n - xhat * along / n);
      r.dx.terms[at] = reference.rstd *
                       (std::fabs(grad * weight) + sum_terms / n +
                        (std::fabs(xhat) + 1.0) * (along_terms / n + 1.0)) *
                       (1.0 + std::fabs(reference.mean) * reference.rstd);
      r.dweight.want[column] += grad * xhat;
      r.dweight.terms[column] +=
          std::fabs(grad) * (std::fabs(xhat) + std::fabs(reference.mean) * reference.rstd);
      r.dbias.want[column] += grad;
      r.dbias.terms[column] += std::fabs(grad);
    }
  }
  return r;
}

// Roundings per term: row sums n / 64 + 9 (half of that for rstd), sums over rows as in norms.cpp.
double row_sum(const Inputs& in) { return static_cast<double>(in.shape.hidden) / 64.0 + 16.0; }
double column_sum(const Inputs& in) { return static_cast<double>(in.shape.rows) / 64.0 + 80.0; }

void test_rms_norm(const Inputs& inputs) {
  Inputs in = inputs;
  const std::string name = in.name("rms_norm");
  const Results want = expected_results(in, false);
  const int64_t rows = in.shape.rows, hidden = in.shape.hidden;
  check_same_bits(name, [&] {
    Tensor y(in.dtype, in.numel()), rstd(DType::kFloat32, rows), dx(in.dtype, in.numel());
    Tensor dweight(in.weight_dtype, hidden);
    rms_norm_forward({in.x.data(), in.weight.data(), y.data(), rstd.floats(), rows, hidden, kEps,
                      in.dtype, in.weight_dtype});
    rms_norm_backward({in.grad.data(), in.x.data(), in.weight.data(), rstd.floats(), dx.data(),
                       dweight.data(), rows, hidden, in.dtype, in.weight_dtype});
    Tensor dx_alone(in.dtype, in.numel()), dweight_alone(in.weight_dtype, hidden);
    rms_norm_backward({in.grad.data(), in.x.data(), in.weight.data(), rstd.floats(),
                       dx_alone.data(), nullptr, rows, hidden, in.dtype, in.weight_dtype});
    rms_norm_backward({in.grad.data(), in.x.data(), in.weight.data(), rstd.floats(), nullptr,
                       dweight_alone.data(), rows, hidden, in.dtype, in.weight_dtype});
    check_close(name + " y", y, want.y, row_sum(in));
    check_close(name + " rstd", rstd, want.rstd, row_sum(in));
    check_close(name + " dx", dx, want.dx, 2.0 * row_sum(in));
    check_close(name + " dweight", dweight, want.dweight, column_sum(in) + row_sum(in));
    Bytes bytes, alone;
    dx.append_to(bytes);
    dweight.append_to(bytes);
    dx_alone.append_to(alone);
    dweight_alone.append_to(alone);
    check_that(bytes == alone, name + ": one gradient alone has other bits");
    y.append_to(bytes);
    rstd.append_to(bytes);
    return bytes;
  });
}

void test_layer_norm(const Inputs& inputs, bool has_bias) {
  Inputs in = inputs;
  const std::string name = in.name(has_bias ? "layer_norm" : "layer_norm without bias");
  if (!has_bias) in.bias = Tensor(in.weight_dtype, Doubles(in.bias.values().size(), 0.0));
  const Results want = expected_results(in, true);
  const int64_t rows = in.shape.rows, hidden = in.shape.hidden;
  check_same_bits(name, [&] {
    Tensor y(in.dtype, in.numel()), mean(DType::kFloat32, rows), rstd(DType::kFloat32, rows);
    Tensor dx(in.dtype, in.numel()), dweight(in.weight_dtype, hidden);
    Tensor dbias(in.weight_dtype, hidden);
    layer_norm_forward({in.x.data(), in.weight.data(), has_bias ? in.bias.data() : nullptr,
                        y.data(), mean.floats(), rstd.floats(), rows, hidden, kEps, in.dtype,
                        in.weight_dtype});
    layer_norm_backward({in.grad.data(), in.x.data(), in.weight.data(), mean.floats(),
                         rstd.floats(), dx.data(), dweight.data(),
                         has_bias ? dbias.data() : nullptr, rows, hidden, in.dtype,
                         in.weight_dtype});
    check_close(name + " y", y, want.y, row_sum(in));
    check_close(name + " mean", mean, want.mean, row_sum(in));
    check_close(name + " rstd", rstd, want.rstd, row_sum(in));
    check_close(name + " dx", dx, want.dx, 2.0 * row_sum(in));
    check_close(name + " dweight", dweight, want.dweight, column_sum(in) + row_sum(in));
    if (has_bias) check_close(name + " dbias", dbias, want.dbias, column_sum(in));
    Bytes bytes;
    for (Tensor* tensor : {&y, &mean, &rstd, &dx, &dweight}) tensor->append_to(bytes);
    if (has_bias) dbias.append_to(bytes);
    return bytes;
  });
}

void check_exact(const std::string& name, const Tensor& got, const Expected& expected) {
  check_that(got.values() == expected.want && got.guards_intact(), name);
}

// A norm of x + residual rounds each result once: it is the float32 norm of the stored sum.
void test_sum(Shape shape, DType dtype, DType residual_dtype, bool centred) {
  const std::string name = label(centred ? "add_layer_norm" : "add_rms_norm", dtype, shape.hidden) +
                           " residual " + name_of(residual_dtype);
  Inputs in(shape, dtype, DType::kFloat32, 0.0);
  const int64_t rows = shape.rows, hidden = shape.hidden, numel = in.numel();
  const DType wide = DType::kFloat32;
  Tensor residual(residual_dtype, random_values(numel, 7)), dtotal(residual_dtype, in.x.values());
  Tensor total(residual_dtype, numel), grad(wide, in.grad.values());
  for (int64_t i = 0; i < numel; ++i) {
    total.set(i, static_cast<float>(in.x.get(i) + residual.get(i)));
  }
  Tensor wide_total(wide, total.values()), wide_y(wide, numel), wide_dx(wide, numel);
  Tensor mean(wide, rows), rstd(wide, rows), dweight(wide, hidden), dbias(wide, hidden);
  if (centred) {
    layer_norm_forward({wide_total.data(), in.weight.data(), in.bias.data(), wide_y.data(),
                        mean.floats(), rstd.floats(), rows, hidden, kEps, wide, wide});
    layer_norm_backward({grad.data(), wide_total.data(), in.weight.data(), mean.floats(),
                         rstd.floats(), wide_dx.data(), dweight.data(), dbias.data(), rows, hidden,
                         wide, wide});
  } else {
    rms_norm_forward({wide_total.data(), in.weight.data(), wide_y.data(), rstd.floats(), rows,
                      hidden, kEps, wide, wide});
    rms_norm_backward({grad.data(), wide_total.data(), in.weight.data(), rstd.floats(),
                       wide_dx.data(), dweight.data(), rows, hidden, wide, wide});
  }
  Expected y(numel), dx(numel), dresidual(numel);
  for (int64_t i = 0; i < numel; ++i) {
    const auto at = static_cast<size_t>(i);
    y.want[at] = round_to(dtype, wide_y.get(i));
    const auto both = static_cast<float>(wide_dx.get(i) + dtotal.get(i));
    dx.want[at] = round_to(dtype, both);
    dresidual.want[at] = round_to(residual_dtype, both);
  }
  check_same_bits(name, [&] {
    Tensor got_y(dtype, numel), got_total(residual_dtype, numel), got_dx(dtype, numel);
    Tensor got_dresidual(residual_dtype, numel), alone(residual_dtype, numel);
    Tensor got_mean(wide, rows), got_rstd(wide, rows);
    Tensor got_dweight(wide, hidden), got_dbias(wide, hidden);
    const ResidualSum sum{residual.data(), got_total.data(), residual_dtype};
    const ResidualGradient both{dtotal.data(), got_dresidual.data(), residual_dtype};
    const ResidualGradient one{dtotal.data(), alone.data(), residual_dtype};
    if (centred) {
      layer_norm_forward({in.x.data(), in.weight.data(), in.bias.data(), got_y.data(),
                          got_mean.floats(), got_rstd.floats(), rows, hidden, kEps, dtype, wide,
                          sum});
      LayerNormBackward args{in.grad.data(),
                             got_total.data(),
                             in.weight.data(),
                             got_mean.floats(),
                             got_rstd.floats(),
                             got_dx.data(),
                             got_dweight.data(),
                             got_dbias.data(),
                             rows,
                             hidden,
                             dtype,
                             wide,
                             both};
      layer_norm_backward(args);
      args.dx = args.dweight = args.dbias = nullptr, args.sum = one;
      layer_norm_backward(args);
    } else {
      rms_norm_forward({in.x.data(), in.weight.data(), got_y.data(), got_rstd.floats(), rows,
                        hidden, kEps, dtype, wide, sum});
      RmsNormBackward args{in.grad.data(),
                           got_total.data(),
                           in.weight.data(),
                           got_rstd.floats(),
                           got_dx.data(),
                           got_dweight.data(),
                           rows,
                           hidden,
                           dtype,
                           wide,
                           both};
      rms_norm_backward(args);
      args.dx = args.dweight = nullptr, args.sum = one;
      rms_norm_backward(args);
    }
    Bytes bytes, want;
    got_total.append_to(bytes), total.append_to(want);
    got_rstd.append_to(bytes), rstd.append_to(want);
    got_dweight.append_to(bytes), dweight.append_to(want);
    alone.append_to(bytes), got_dresidual.append_to(want);
    if (centred) got_mean.append_to(bytes), mean.append_to(want);
    if (centred) got_dbias.append_to(bytes), dbias.append_to(want);
    check_that(bytes == want, name + ": other bits than the norm of the stored sum");
    check_exact(name + " y", got_y, y);
    check_exact(name + " dx", got_dx, dx);
    check_exact(name + " dresidual", got_dresidual, dresidual);
    for (Tensor* tensor : {&got_y, &got_dx, &got_dresidual}) tensor->append_to(bytes);
    return bytes;
  });
}

void test_special_rows() {
  Tensor x(DType::kFloat32, Doubles{NAN, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0});
  Tensor weight(DType::kFloat32, Doubles{1.0, 1.0, 1.0, 1.0}), y(DType::kFloat32, 8);
  rms_norm_forward(
      {x.data(), weight.data(), y.data(), nullptr, 2, 4, 0.0, DType::kFloat32, DType::kFloat32});
  for (int64_t i = 0; i < 8; ++i) check_that(std::isnan(y.get(i)), "rms_norm of NaN, and of 0 / 0");
  check_throws<std::invalid_argument>("hidden >= 0, got -4", [&] {
    rms_norm_forward(
        {x.data(), weight.data(), y.data(), nullptr, 2, -4, 0.0, DType::kFloat32, DType::kFloat32});
  });
  check_throws<std::invalid_argument>("address of weight", [&] {
    layer_norm_forward({x.data(), nullptr, nullptr, y.data(), nullptr, nullptr, 2, 4, 0.0,
                        DType::kFloat32, DType::kFloat32});
  });
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  // 97 x 1000 elements are shared by several threads; 40 rows are three blocks of the row sums.
  for (const DType dtype : kDTypes) {
    std::vector<Shape> shapes = {{97, 1000}, {40, 17}, {0, 16}};
    for (const int64_t hidden : kSizes) {
      if (hidden > 0) shapes.push_back({3, hidden});
    }
    for (const Shape shape : shapes) {
      const Inputs inputs(shape, dtype, dtype, 0.0);
      test_rms_norm(inputs);
      test_layer_norm(inputs, true);
    }
    const Inputs mixed({3, 63}, dtype, DType::kFloat32, 0.0);
    test_rms_norm(mixed);
    test_layer_norm(mixed, false);
  }
  for (const DType dtype : kDTypes) {
    for (const DType residual : kDTypes) {
      for (const Shape shape : {Shape{97, 1000}, Shape{40, 17}, Shape{3, 1}}) {
        for (const bool centred : {false, true}) test_sum(shape, dtype, residual, centred);
      }
    }
  }
  check_throws<std::invalid_argument>("address of total", [&] {
    float value = 1.0f;
    rms_norm_forward({&value,
                      &value,
                      &value,
                      nullptr,
                      1,
                      1,
                      kEps,
                      DType::kFloat32,
                      DType::kFloat32,
                      {&value, nullptr, DType::kFloat32}});
  });
  // A large common offset must not spoil the variance.
  test_layer_norm(Inputs({5, 1000}, DType::kFloat32, DType::kFloat32, 3000.0), true);
  test_special_rows();
  return report("norms");
}
