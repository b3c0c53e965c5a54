// AdamW, SGD, Lion and LAMB over lists of tensors, against float64.
#include "lists.h"

namespace anychip::cpu::test {
namespace {

constexpr float kLr = 1e-2f, kScale = 8.0f, kClip = 0.25f;
constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kDecay = 0.01;

// Which types, and what is given besides.
struct Options {
  DType param = DType::kFloat32, grad = DType::kFloat32, low = DType::kFloat32;
  bool has_scale_and_clip = false, has_low = false;

  std::string name(const char* rule) const {
    return std::string(rule) + " " + name_of(param) + " grad " + name_of(grad) +
           (has_low ? std::string(" low ") + name_of(low) : "") +
           (has_scale_and_clip ? " scaled" : "");
  }
  double factor() const { return has_scale_and_clip ? double{kClip} / kScale : 1.0; }
};

struct State {
  std::vector<Tensor> params, grads, averages, squared, low;
  float step = 4.0f;

  explicit State(const Options& options)
      : params(random_list(options.param, 1, 1.0)),
        grads(random_list(options.grad, 2, 4.0)),
        averages(random_list(DType::kFloat32, 3, 0.1)),
        squared(squares(random_list(DType::kFloat32, 4, 0.1))),
        low(random_list(options.low, 5, 1.0)) {}

  Update update(const Options& options, int num_states, const float* found_inf = nullptr) {
    Update result{{}, &kLr, &step, nullptr, nullptr, found_inf};
    if (options.has_scale_and_clip) result.scale = &kScale, result.clip = &kClip;
    for (size_t i = 0; i < params.size(); ++i) {
      result.tensors.push_back({refs(params)[i],
                                refs(grads)[i],
                                {num_states > 0 ? averages[i].floats() : nullptr,
                                 num_states > 1 ? squared[i].floats() : nullptr},
                                options.has_low ? refs(low)[i] : TensorRef{}});
    }
    return result;
  }
  Bytes bytes() {
    Bytes all;
    for (auto* list : {&params, &averages, &squared, &low}) {
      const Bytes one = bytes_of(*list);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
};

// One element in float64, and the size of the terms of each result.
struct Element {
  double p, g, m, v;
};
struct Moved {
  double p, m, v;
  double p_terms, m_terms, v_terms;
};
using Equation = std::function<Moved(const Element&)>;
using Rule = std::function<void(const Update&)>;

// Roundings of the parameter, the first and the second state.
struct Roundings {
  double p, m, v;
};

void check_moved(const std::string& name, const State& before, const State& after, double factor,
                 const Equation& equation, Roundings roundings, bool has_low) {
  for (size_t n = 0; n < before.params.size(); ++n) {
    const int64_t numel = before.params[n].numel();
    Expected p(numel), m(numel), v(numel), low(numel);
    for (int64_t i = 0; i < numel; ++i) {
      const auto at = static_cast<size_t>(i);
      const Moved want = equation({before.params[n].get(i), before.grads[n].get(i) * factor,
                                   before.averages[n].get(i), before.squared[n].get(i)});
      p.want[at] = want.p, p.terms[at] = want.p_terms;
      m.want[at] = want.m, m.terms[at] = want.m_terms;
      v.want[at] = want.v, v.terms[at] = want.v_terms;
      low.want[at] = after.params[n].get(i);
    }
    check_close(name + " param", after.params[n], p, roundings.p);
    check_close(name + " first state", after.averages[n], m, roundings.m);
    check_close(name + " second state", after.squared[n], v, roundings.v);
    // The copy is that of the parameter as stored: nothing but one rounding.
    if (has_low) check_close(name + " low_precision", after.low[n], low, 0.0);
  }
}

void test_rule(const char* rule_name, const Options& options, int num_states, const Rule& rule,
               const Equation& equation, Roundings roundings) {
  const std::string name = options.name(rule_name);
  const State before(options);
  const float no_inf = 0.0f;
  check_same_bits(name, [&] {
    State state = before;
    rule(state.update(options, num_states, &no_inf));
    check_that(state.step == 5.0f, name + ": step counts");
    check_moved(name, before, state, options.factor(), equation, roundings, options.has_low);
    return state.bytes();
  });
  for (const float inf : {1.0f, -2.0f, NAN}) {
    State skipped = before, untouched = before;
    rule(skipped.update(options, num_states, &inf));
    check_that(skipped.bytes() == untouched.bytes() && skipped.step == 4.0f,
               name + ": wrote although found_inf was set");
  }
}

void test_adamw(const Options& options) {
  const double t = 5.0;
  test_rule(
      "adamw", options, 2,
      [](const Update& update) { adamw(update, {kBeta1, kBeta2, kEps, kDecay}); },
      [&](const Element& e) {
        Moved to;
        to.m = kBeta1 * e.m + (1.0 - kBeta1) * e.g;
        to.m_terms = std::fabs(kBeta1 * e.m) + std::fabs((1.0 - kBeta1) * e.g);
        to.v = to.v_terms = kBeta2 * e.v + (1.0 - kBeta2) * e.g * e.g;
        const double root = std::sqrt(to.v / (1.0 - std::pow(kBeta2, t))) + kEps;
        const double scale = kLr / (1.0 - std::pow(kBeta1, t)) / root;
        to.p = e.p * (1.0 - kLr * kDecay) - scale * to.m;
        to.p_terms = std::fabs(e.p) + scale * to.m_terms;
        return to;
      },
      {9.0, 4.0, 5.0});
}

void test_sgd(const Options& options, const SgdOptions& how) {
  test_rule(
      "sgd", options, how.momentum != 0.0 ? 1 : 0, [&](const Update& update) { sgd(update, how); },
      [&](const Element& e) {
        const double coupled = how.decoupled ? 0.0 : how.weight_decay;
        const double decayed = how.decoupled ? 1.0 - kLr * how.weight_decay : 1.0;
        const double g = e.g + coupled * e.p;
        const double g_terms = std::fabs(e.g) + std::fabs(coupled * e.p);
        Moved to{};
        to.m = how.momentum * e.m + g;
        to.m_terms = std::fabs(how.momentum * e.m) + g_terms;
        const double step = how.nesterov ? g + how.momentum * to.m : to.m;
        const double terms = how.nesterov ? g_terms + how.momentum * to.m_terms : to.m_terms;
        const bool moves = how.momentum != 0.0;
        to.p = decayed * e.p - kLr * (moves ? step : g);
        to.p_terms = std::fabs(e.p) + kLr * (moves ? terms : g_terms);
        if (!moves) to.m = e.m;
        to.v = e.v;
        return to;
      },
      {9.0, 6.0, 0.0});
}

void test_lion(const Options& options) {
  test_rule(
      "lion", options, 1, [](const Update& update) { lion(update, {kBeta1, kBeta2, kDecay}); },
      [](const Element& e) {
        const double direction = kBeta1 * e.m + (1.0 - kBeta1) * e.g;
        Moved to{};
        to.m = kBeta2 * e.m + (1.0 - kBeta2) * e.g;
        to.m_terms = std::fabs(kBeta2 * e.m) + std::fabs((1.0 - kBeta2) * e.g);
        to.p = e.p * (1.0 - kLr * kDecay) - kLr * ((direction > 0.0) - (direction < 0.0));
        to.p_terms = std::fabs(e.p) + kLr;
        to.v = e.v;
        return to;
      },
      {5.0, 5.0, 0.0});
}

const float kCorrection1 = 0.4f, kCorrection2 = 0.005f;
const LambOptions kLamb{kBeta1, kBeta2, 1e-6, kDecay, &kCorrection1, &kCorrection2};

// The step before the trust ratio, and the size of its terms.
Moved lamb_step(const Element& e) {
  Moved to;
  to.m = kBeta1 * e.m + (1.0 - kBeta1) * e.g;
  to.m_terms = std::fabs(kBeta1 * e.m) + std::fabs((1.0 - kBeta1) * e.g);
  to.v = to.v_terms = kBeta2 * e.v + (1.0 - kBeta2) * e.g * e.g;
  const double scale = 1.0 / kCorrection1 / (std::sqrt(to.v / kCorrection2) + 1e-6);
  to.p = scale * to.m + kDecay * e.p;
  to.p_terms = scale * to.m_terms + kDecay * std::fabs(e.p);
  return to;
}

void test_lamb(const Options& options) {
  const std::vector<float> trust(std::size(kList), 3.0f);
  test_rule(
      "lamb", options, 2, [&](const Update& update) { lamb(update, kLamb, trust.data()); },
      [&](const Element& e) {
        Moved to = lamb_step(e);
        const double rate = kLr * 3.0;
        to.p_terms = std::fabs(e.p) + rate * to.p_terms;
        to.p = e.p - rate * to.p;
        return to;
      },
      {14.0, 5.0, 6.0});
}

// The squares of the parameters, exactly, and of the steps, within what these are rounded by.
void test_lamb_sums_of_squares(const Options& options) {
  const std::string name = options.name("lamb_sums_of_squares");
  State state(options);
  const Bytes before = state.bytes();
  const size_t count = state.params.size();
  Expected norms(static_cast<int64_t>(count));
  std::vector<int64_t> weights;
  for (size_t n = 0; n < count; ++n) {
    double squares = 0.0, terms = 0.0;
    for (int64_t i = 0; i < state.params[n].numel(); ++i) {
      const Moved step =
          lamb_step({state.params[n].get(i), state.grads[n].get(i) * options.factor(),
                     state.averages[n].get(i), state.squared[n].get(i)});
      squares += step.p * step.p;
      terms += step.p_terms * step.p_terms;
    }
    norms.want[n] = std::sqrt(squares);
    norms.terms[n] = std::sqrt(terms);
    const std::vector<int64_t> row = exact_sum_of_squares(state.params[n].values());
    weights.insert(weights.end(), row.begin(), row.end());
  }
  check_same_bits(name, [&] {
    std::vector<int64_t> rows(2 * weights.size() + 1, -1);
    lamb_sums_of_squares(state.update(options, 2), kLamb, rows.data());
    const auto middle = rows.begin() + static_cast<int64_t>(weights.size());
    check_that(std::vector<int64_t>(rows.begin(), middle) == weights, name + ": weights");
    Doubles steps;
    for (size_t n = 0; n < count; ++n) {
      double sum = 0.0;
      for (int k = kInfinities - 1; k >= 0; --k) {
        const int64_t digit = middle[static_cast<int64_t>(n) * kDigits + k];
        sum += std::ldexp(static_cast<double>(digit), 32 * k - 298);
      }
      steps.push_back(std::sqrt(sum));
    }
    check_close(name, Tensor(DType::kFloat32, steps), norms, 23.0);
    check_that(rows.back() == -1 && state.bytes() == before, name + ": wrote elsewhere");
    const auto* bytes = reinterpret_cast<const unsigned char*>(rows.data());
    return Bytes(bytes, bytes + rows.size() * sizeof rows[0]);
  });
}

void test_errors() {
  float value = 1.0f;
  const Update no_lr{{}, nullptr, &value, nullptr, nullptr, nullptr};
  check_throws<std::invalid_argument>("address of lr", [&] { adamw(no_lr, {}); });
  check_throws<std::invalid_argument>("address of lr", [&] { sgd(no_lr, {}); });
  check_throws<std::invalid_argument>("address of lr", [&] { lion(no_lr, {}); });
  check_throws<std::invalid_argument>("address of lr", [&] { lamb(no_lr, kLamb, &value); });
  Update no_state{{}, &value, &value, nullptr, nullptr, nullptr};
  const TensorRef one{&value, 1, DType::kFloat32};
  no_state.tensors.push_back({one, one, {nullptr, nullptr}, {}});
  check_throws<std::invalid_argument>("address of a state", [&] { lion(no_state, {}); });
  check_throws<std::invalid_argument>("address of trust", [&] { lamb(no_state, kLamb, nullptr); });
  sgd(no_state, {0.0, false, 0.0, false});  // which without momentum has none
  check_that(value != 1.0f, "sgd without a state moves");
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu;
  using namespace anychip::cpu::test;
  bind_linked_openmp();
  // Every type of parameter, of gradient and of copy; they are converted apart from each other.
  const DType f32 = DType::kFloat32, bf16 = DType::kBFloat16, f16 = DType::kFloat16;
  const Options all[] = {{f32, f32, f32, false, false},
                         {bf16, f16, f32, true, true},
                         {f16, bf16, bf16, false, true},
                         {f32, bf16, f16, true, true},
                         {f32, f32, f32, false, true}};
  for (const Options& options : all) {
    test_adamw(options);
    test_sgd(options, {0.0, false, 0.1, false});
    test_sgd(options, {0.9, true, 0.1, false});
    test_lion(options);
    test_lamb(options);
    test_lamb_sums_of_squares(options);
  }
  test_sgd({}, {0.5, false, 2.0, true});
  test_sgd({}, {0.5, true, 0.0, false});
  test_lamb_sums_of_squares({});
  test_errors();
  return report("updates");
}
