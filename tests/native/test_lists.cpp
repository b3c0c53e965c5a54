// AdamW, l2_norm, clip, unscale_and_check over lists of tensors, against float64.
#include "operators.h"
#include "tensor.h"

namespace anychip::cpu::test {
namespace {

// Sizes that straddle vectors and chunks (16384), together enough for several threads.
constexpr int64_t kList[] = {0, 1, 7, 8, 15, 16, 17, 63, 1000, 4097, 16384, 40001};

std::vector<Tensor> random_list(DType dtype, unsigned seed, double scale) {
  std::vector<Tensor> list;
  for (const int64_t numel : kList) list.emplace_back(dtype, random_values(numel, seed++, scale));
  return list;
}

std::vector<Tensor> squares(std::vector<Tensor> list) {
  for (Tensor& tensor : list) {
    for (int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, tensor.get(i) * tensor.get(i));
  }
  return list;
}

std::vector<TensorRef> refs(std::vector<Tensor>& list) {
  std::vector<TensorRef> result;
  for (Tensor& tensor : list) result.push_back({tensor.data(), tensor.numel(), tensor.dtype()});
  return result;
}

Bytes bytes_of(std::vector<Tensor>& list) {
  Bytes bytes;
  for (Tensor& tensor : list) tensor.append_to(bytes);
  return bytes;
}

struct State {
  std::vector<Tensor> params, grads, exp_avgs, exp_avg_sqs, low;

  State(DType param, DType grad, DType low_dtype)
      : params(random_list(param, 1, 1.0)),
        grads(random_list(grad, 2, 4.0)),
        exp_avgs(random_list(DType::kFloat32, 3, 0.1)),
        exp_avg_sqs(squares(random_list(DType::kFloat32, 4, 0.1))),
        low(random_list(low_dtype, 5, 1.0)) {}

  std::vector<AdamWTensor> tensors(bool has_low) {
    std::vector<AdamWTensor> result;
    for (size_t i = 0; i < params.size(); ++i) {
      const TensorRef none{};
      result.push_back({refs(params)[i], refs(grads)[i], exp_avgs[i].floats(),
                        exp_avg_sqs[i].floats(), has_low ? refs(low)[i] : none});
    }
    return result;
  }
  Bytes bytes() {
    Bytes all;
    for (auto* list : {&params, &exp_avgs, &exp_avg_sqs, &low}) {
      const Bytes one = bytes_of(*list);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
};

struct Options {
  bool has_scale_and_clip, has_low;
};

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.01;

void check_update(const std::string& name, const State& before, const State& after, double lr,
                  double factor, double t, bool has_low) {
  for (size_t n = 0; n < before.params.size(); ++n) {
    const int64_t numel = before.params[n].numel();
    Expected p(numel), m(numel), v(numel), low(numel);
    for (int64_t i = 0; i < numel; ++i) {
      const auto at = static_cast<size_t>(i);
      const double g = before.grads[n].get(i) * factor, old = before.params[n].get(i);
      const double m0 = before.exp_avgs[n].get(i), v0 = before.exp_avg_sqs[n].get(i);
      m.want[at] = kBeta1 * m0 + (1.0 - kBeta1) * g;
      m.terms[at] = std::fabs(kBeta1 * m0) + std::fabs((1.0 - kBeta1) * g);
      v.want[at] = v.terms[at] = kBeta2 * v0 + (1.0 - kBeta2) * g * g;
      const double root = std::sqrt(v.want[at] / (1.0 - std::pow(kBeta2, t))) + kEps;
      const double scale = lr / (1.0 - std::pow(kBeta1, t)) / root;
      p.want[at] = old * (1.0 - lr * kDecay) - scale * m.want[at];
      p.terms[at] = std::fabs(old) + scale * m.terms[at];
      low.want[at] = p.want[at];
      low.terms[at] = p.terms[at];
    }
    check_close(name + " exp_avg", after.exp_avgs[n], m, 4.0);
    check_close(name + " exp_avg_sq", after.exp_avg_sqs[n], v, 5.0);
    check_close(name + " param", after.params[n], p, 9.0);
    if (has_low) check_close(name + " low_precision", after.low[n], low, 9.0);
  }
}

void test_adamw(DType param, DType grad, DType low, Options options) {
  const std::string name = std::string("adamw ") + name_of(param) + " grad " + name_of(grad) +
                           (options.has_low ? std::string(" low ") + name_of(low) : "") +
                           (options.has_scale_and_clip ? " scaled" : "");
  const float lr = 1e-2f, scale = 8.0f, clip = 0.25f, no_inf = 0.0f;
  const State before(param, grad, low);
  check_same_bits(name, [&] {
    State state = before;
    float step = 4.0f;
    AdamW args{state.tensors(options.has_low),
               &lr,
               &step,
               nullptr,
               nullptr,
               &no_inf,
               kBeta1,
               kBeta2,
               kEps,
               kDecay};
    if (options.has_scale_and_clip) args.scale = &scale, args.clip = &clip;
    adamw(args);
    check_that(step == 5.0f, name + ": step counts");
    const double factor = options.has_scale_and_clip ? double{clip} / scale : 1.0;
    check_update(name, before, state, lr, factor, 5.0, options.has_low);
    return state.bytes();
  });
}

void test_adamw_found_inf_writes_nothing() {
  State state(DType::kFloat32, DType::kFloat32, DType::kBFloat16);
  const Bytes before = state.bytes();
  const float lr = 1e-2f, inf = 1.0f;
  float step = 4.0f;
  adamw({state.tensors(true), &lr, &step, nullptr, nullptr, &inf, kBeta1, kBeta2, kEps, kDecay});
  check_that(state.bytes() == before && step == 4.0f, "adamw wrote although found_inf was set");
}

void test_l2_norm(DType dtype, double scale) {
  const std::string name = std::string("l2_norm ") + name_of(dtype);
  std::vector<Tensor> list = random_list(dtype, 1, scale);
  Expected want(1);
  for (const Tensor& tensor : list) {
    for (const double value : tensor.values()) want.want[0] += value * value;
  }
  want.want[0] = std::sqrt(want.want[0]);
  check_same_bits(name, [&] {
    Tensor out(DType::kFloat32, 1);
    l2_norm(refs(list), out.floats());
    check_close(name, out, want, 1e-3);  // a float64 sum: nothing but the last rounding
    Bytes bytes;
    out.append_to(bytes);
    return bytes;
  });
}

void test_clip(DType dtype, float norm, double max_norm) {
  const std::string name = std::string("clip ") + name_of(dtype) + " " + std::to_string(norm);
  const std::vector<Tensor> before = random_list(dtype, 1, 1.0);
  const float ratio = static_cast<float>(max_norm) / (norm + 1e-6f);
  const double coefficient = ratio < 1.0f || std::isnan(ratio) ? ratio : 1.0;
  check_same_bits(name, [&] {
    std::vector<Tensor> list = before;
    clip(refs(list), &norm, max_norm);
    for (size_t n = 0; n < list.size(); ++n) {
      Expected want(list[n].numel());
      for (int64_t i = 0; i < list[n].numel(); ++i) {
        want.want[static_cast<size_t>(i)] = before[n].get(i) * coefficient;
      }
      check_close(name, list[n], want, 0.0);
    }
    return bytes_of(list);
  });
}

// `poison` is put into the last element of the longest tensor.
void test_unscale(DType dtype, float scale, double poison, bool found) {
  const std::string name = std::string("unscale_and_check ") + name_of(dtype) + " / " +
                           std::to_string(scale) + " with " + std::to_string(poison);
  std::vector<Tensor> before = random_list(dtype, 1, 1.0);
  before.back().set(before.back().numel() - 1, poison);
  check_same_bits(name, [&] {
    std::vector<Tensor> list = before;
    float found_inf = 0.0f;
    unscale_and_check(refs(list), &scale, &found_inf);
    check_that(found_inf == (found ? 1.0f : 0.0f), name + ": found_inf");
    for (size_t n = 0; n < list.size(); ++n) {
      Expected want(list[n].numel());
      for (int64_t i = 0; i < list[n].numel(); ++i) {
        const auto quotient = static_cast<float>(before[n].get(i) / double{scale});
        want.want[static_cast<size_t>(i)] = round_to(dtype, quotient);
      }
      check_close(name, list[n], want, 0.0);
    }
    found_inf = 1.0f;
    std::vector<TensorRef> nothing;
    unscale_and_check(nothing, &scale, &found_inf);
    check_that(found_inf == 1.0f, name + ": found_inf was reset");
    return bytes_of(list);
  });
}

void test_errors() {
  float value = 1.0f;
  check_throws<std::invalid_argument>("numel >= 0, got -2",
                                      [&] { l2_norm({{&value, -2, DType::kFloat32}}, &value); });
  check_throws<std::invalid_argument>("address of a tensor",
                                      [&] { clip({{nullptr, 2, DType::kFloat32}}, &value, 1.0); });
  check_throws<std::invalid_argument>("address of lr", [&] {
    adamw({{}, nullptr, &value, nullptr, nullptr, nullptr, kBeta1, kBeta2, kEps, kDecay});
  });
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  for (const DType param : kDTypes) {
    for (const DType grad : kDTypes) test_adamw(param, grad, DType::kFloat32, {false, false});
  }
  for (const DType low : kDTypes) {
    test_adamw(DType::kFloat32, DType::kBFloat16, low, {true, true});
  }
  test_adamw_found_inf_writes_nothing();
  for (const DType dtype : kDTypes) {
    test_l2_norm(dtype, 1.0);
    for (const float norm : {0.5f, 7.0f, INFINITY, NAN}) test_clip(dtype, norm, 1.0);
    test_unscale(dtype, 8.0f, 1.0, false);
    test_unscale(dtype, 3.0f, 1.0, false);  // whose reciprocal is not exact
    for (const double poison : {double{INFINITY}, -double{INFINITY}, double{NAN}}) {
      test_unscale(dtype, 8.0f, poison, true);
    }
  }
  test_l2_norm(DType::kFloat32, 1e30);             // squares overflow float32
  test_l2_norm(DType::kFloat32, 1e-30);            // and underflow it
  test_unscale(DType::kFloat16, 0.5f, 6e4, true);  // overflows by the division
  test_errors();
  return report("lists");
}
