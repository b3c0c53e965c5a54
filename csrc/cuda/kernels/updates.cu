// Update rules over lists of tensors, one pass: what is read is read once, what is written is
// written once, the 16-bit copies included. Float32 throughout.
//
// Note [Same bits everywhere] in update_step.cuh.
//
// Note [Factors of a step]: step, learning rate and scale lie on the device. One thread makes
// factors of them, and counts the step: the launches behind it read no scalar that anyone writes.
#include "updates.h"

#include "squares.cuh"
#include "update_step.cuh"

namespace anychip::cuda {
namespace {

// Arrays of a table. The last is the copy in another type.
constexpr int kParam = 0, kGrad = 1, kState = 2, kLow = 4;
using Table = TensorTable<5, 64>;

// Vectors of four that a thread has loaded before it uses the first: 112 bytes for adamw in bf16.
constexpr int kInFlight = 2;

// 1 - beta^t. Near 1 a beta loses digits in float32, which its logarithm keeps.
__device__ __forceinline__ float correction(float log_beta, float count) {
  return -expm1f(count * log_beta);
}

__global__ void begin_kernel(StepScalars given, float log_beta1, float log_beta2,
                             float weight_decay, bool counts, StepFactors* factors) {
  const float count = *given.step + 1.0f;
  const float scale = given.scale ? *given.scale : 1.0f;
  const float clip = given.clip ? *given.clip : 1.0f;
  const float lr = given.lr ? *given.lr : 0.0f;
  const bool is_skipped = given.found_inf && *given.found_inf != 0.0f;
  const float correction1 = correction(log_beta1, count);
  StepFactors made;
  made.is_skipped = is_skipped ? 1.0f : 0.0f;
  made.gradient = clip / scale;
  made.lr = lr;
  made.decay = fmaf(-lr, weight_decay, 1.0f);
  made.inverse_correction = 1.0f / correction1;
  made.corrected_lr = lr / correction1;
  made.inverse_root = 1.0f / sqrtf(correction(log_beta2, count));
  made.unused = 0.0f;
  *factors = made;
  if (counts && !is_skipped) *given.step = count;
}

// Rules, as AdamW is one: kBlocks are thread blocks per multiprocessor that the compiler leaves
// registers for, as many as it does without spills.

// Sutskever et al. 2013; torch.optim.SGD without dampening.
template <int kBuffers>
struct Sgd {
  static constexpr int kStates = kBuffers, kBlocks = 3;
  float momentum, weight_decay;
  bool nesterov, decoupled;

  __device__ __forceinline__ void operator()(const StepFactors& f, float rate, float& p, float g,
                                             float (&s)[kStates + (kStates == 0)]) const {
    float step = g;
    if (decoupled) {
      p *= f.decay;
    } else {
      step = fmaf(p, weight_decay, step);
    }
    if constexpr (kStates == 1) {
      s[0] = fmaf(s[0], momentum, step);
      step = nesterov ? fmaf(s[0], momentum, step) : s[0];
    }
    p = fmaf(-rate, step, p);
  }
};

// Chen et al. 2023, algorithm 2. The direction is of an average that is not kept.
struct Lion {
  static constexpr int kStates = 1, kBlocks = 3;
  Betas b;

  __device__ __forceinline__ void operator()(const StepFactors& f, float rate, float& p, float g,
                                             float (&s)[kStates]) const {
    const float average = averaged(s[0], b.beta1, b.rest1, g);
    const float direction = (average > 0.0f ? 1.0f : 0.0f) - (average < 0.0f ? 1.0f : 0.0f);
    s[0] = averaged(s[0], b.beta2, b.rest2, g);
    p = fmaf(p, f.decay, -rate * direction);
  }
};

// You et al. 2019, algorithm 2, phi the identity.
struct Lamb {
  static constexpr int kStates = 2, kBlocks = 4;
  Betas b;
  float eps, weight_decay;

  // The step before trust ratio and learning rate.
  __device__ __forceinline__ float step(const StepFactors& f, float p, float g,
                                        float (&s)[kStates]) const {
    s[0] = averaged(s[0], b.beta1, b.rest1, g);
    s[1] = averaged(s[1], b.beta2, b.rest2, g * g);
    const float adam = (s[0] * f.inverse_correction) / fmaf(sqrtf(s[1]), f.inverse_root, eps);
    return fmaf(p, weight_decay, adam);
  }

  __device__ __forceinline__ void operator()(const StepFactors& f, float rate, float& p, float g,
                                             float (&s)[kStates]) const {
    p = fmaf(-rate, step(f, p, g, s), p);
  }
};

// One tensor as a rule sees it. States are float32; a copy may have any type, or not be there.
template <class Rule, bool kWideParam, bool kWideGrad>
struct Tensors {
  static constexpr int kRoom = Rule::kStates == 0 ? 1 : Rule::kStates;

  template <int N>
  struct Values {
    float p[N], g[N], s[kRoom][N];
  };

  Elements<kWideParam> param;
  Elements<kWideGrad> grad;
  float* states[kRoom];
  void* low;
  uint32_t low_type;

  // The same tensors, counted from element `first` on: behind it, 32 bits are enough for an index.
  __device__ __forceinline__ Tensors from(int64_t first) const {
    Tensors moved = *this;
    moved.param.data = param.at(first);
    moved.grad.data = grad.at(first);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) moved.states[k] = states[k] + first;
    const int bytes = low_type == static_cast<uint32_t>(DType::kFloat32) ? 4 : 2;
    moved.low = static_cast<char*>(low) + first * bytes;
    return moved;
  }

  template <int N>
  __device__ __forceinline__ void load(int i, Values<N>& values) const {
    param.load(i, values.p);
    grad.load(i, values.g);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) anychip::cuda::load(states[k] + i, values.s[k]);
  }

  template <int N>
  __device__ __forceinline__ void move(const Rule& rule, const StepFactors& f, float rate, int i,
                                       Values<N>& values) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float s[kRoom];
#pragma unroll
      for (int k = 0; k < kRoom; ++k) s[k] = values.s[k][n];
      rule(f, rate, values.p[n], values.g[n] * f.gradient, s);
#pragma unroll
      for (int k = 0; k < kRoom; ++k) values.s[k][n] = s[k];
    }
    param.store(i, values.p);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) anychip::cuda::store(states[k] + i, values.s[k]);
    if (low_type == kNoType) return;
#pragma unroll
    for (int n = 0; n < N; ++n) values.p[n] = param.stored(values.p[n]);
    visit_elements(low, low_type, [&](const auto& copy) { copy.store(i, values.p); });
  }
};

// visit(Tensors) of a tensor of a table.
template <class Rule, class Visit>
__device__ __forceinline__ void visit_tensors(const Table& table, int tensor, const Visit& visit) {
  const uint32_t traits = table.traits[tensor];
  visit_elements(table.data[kParam][tensor], type_of(traits, 0), [&](const auto& param) {
    visit_elements(table.data[kGrad][tensor], type_of(traits, 1), [&](const auto& grad) {
      Tensors<Rule, std::decay_t<decltype(param)>::kIsWide, std::decay_t<decltype(grad)>::kIsWide>
          tensors{param, grad, {}, table.data[kLow][tensor], type_of(traits, 2)};
#pragma unroll
      for (int k = 0; k < Rule::kStates; ++k) {
        tensors.states[k] = static_cast<float*>(table.data[kState + k][tensor]);
      }
      visit(tensors);
    });
  });
}

// `tensors` count from part.begin.
template <class Rule, class Tensors>
__device__ __forceinline__ void update_part(const Tensors& tensors, const Part& part, bool vectors,
                                            const Rule& rule, const StepFactors& f, float rate) {
  const int count = static_cast<int>(part.end - part.begin);
  const int whole = vectors ? count / 4 * 4 : 0;
#pragma unroll 1
  for (int start = 4 * threadIdx.x; start < whole; start += 4 * kListThreads * kInFlight) {
    typename Tensors::template Values<4> values[kInFlight];
#pragma unroll
    for (int step = 0; step < kInFlight; ++step) {
      const int i = start + 4 * kListThreads * step;
      if (i < whole) tensors.load(i, values[step]);
    }
#pragma unroll
    for (int step = 0; step < kInFlight; ++step) {
      const int i = start + 4 * kListThreads * step;
      if (i < whole) tensors.move(rule, f, rate, i, values[step]);
    }
  }
  // The head before part.begin, and what is behind the last vector.
  typename Tensors::template Values<1> one;
  const int singles = part.head + count - whole;
#pragma unroll 1
  for (int single = threadIdx.x; single < singles; single += kListThreads) {
    const int i = single < part.head ? single - part.head : whole + single - part.head;
    tensors.load(i, one);
    tensors.move(rule, f, rate, i, one);
  }
}

template <class Rule>
__global__ void __launch_bounds__(kListThreads, Rule::kBlocks)
    update_kernel(const __grid_constant__ Table table, Rule rule, const StepFactors* factors,
                  const float* trust) {
  const StepFactors f = *factors;
  if (f.is_skipped != 0.0f) return;
  int tensor;
  const Part part = part_of_block(table, tensor);
  const float rate = trust ? f.lr * trust[table.tensors_before + tensor] : f.lr;
  const bool vectors = table.traits[tensor] & kVectors;
  visit_tensors<Rule>(table, tensor, [&](const auto& tensors) {
    update_part(tensors.from(part.begin), part, vectors, rule, f, rate);
  });
}

// Parameters, and LAMB's steps, to be squared.
struct LambSources {
  static constexpr int kSums = 2, kAhead = 1;
  Lamb rule;
  const StepFactors* factors;

  template <class Tensors>
  struct Of {
    const Tensors& tensors;  // that count from the chunk's first element
    const Lamb& rule;
    const StepFactors& factors;

    template <int N>
    __device__ __forceinline__ void load(int i, float (&values)[2][N]) const {
      typename Tensors::template Values<N> given;
      tensors.load(i, given);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float s[2] = {given.s[0][n], given.s[1][n]};
        values[0][n] = given.p[n];
        values[1][n] = rule.step(factors, given.p[n], given.g[n] * factors.gradient, s);
      }
    }
  };

  template <class Visit>
  __device__ __forceinline__ void visit(const Table& table, int tensor, int64_t first,
                                        const Visit& visit) const {
    const StepFactors f = *factors;
    visit_tensors<Lamb>(table, tensor, [&](const auto& whole) {
      const auto tensors = whole.from(first);
      visit(Of<std::decay_t<decltype(tensors)>>{tensors, rule, f});
    });
  }
};

bool is_missing(const std::vector<int64_t>& list, size_t count, bool wanted) {
  return wanted && list.size() != count;
}

bool is_consistent(const Update& update, int states) {
  const size_t count = update.params.size();
  const bool copies = !update.low_precision.empty();
  return !is_missing(update.grads, count, true) && !is_missing(update.grad_dtypes, count, true) &&
         !is_missing(update.states[0], count, states > 0) &&
         !is_missing(update.states[1], count, states > 1) &&
         !is_missing(update.low_precision, count, copies) &&
         !is_missing(update.low_dtypes, count, copies);
}

// Arrays of one tensor in the order of a table, and where vectors of four may begin in all of them.
class Arrays {
 public:
  Arrays(Table& table, int slot) : table_(table), slot_(slot) {}

  void add(int array, int64_t address, int64_t dtype) {
    const int64_t bytes = element_bytes(dtype);
    const int64_t head = head_of(address, bytes, 4);
    valid_ = valid_ && address != 0 && address % bytes == 0;
    agree_ = agree_ && (head_ < 0 || head == head_);
    head_ = head;
    table_.data[array][slot_] = reinterpret_cast<void*>(address);
  }

  bool valid() const { return valid_; }
  // -1 when the arrays disagree.
  int64_t head() const { return agree_ ? head_ : -1; }

 private:
  Table& table_;
  int slot_;
  int64_t head_ = -1;
  bool agree_ = true;
  bool valid_ = true;
};

// Writes what tensor `index` has into a slot. Returns its head, or -1 when there is none.
int64_t describe(const Update& update, int states, size_t index, Table& table, int slot,
                 bool& valid) {
  const int64_t param_type = update.params.dtype[index];
  const int64_t grad_type = update.grad_dtypes[index];
  Arrays arrays(table, slot);
  arrays.add(kParam, update.params.data[index], param_type);
  arrays.add(kGrad, update.grads[index], grad_type);
  for (int k = 0; k < states; ++k) {
    arrays.add(kState + k, update.states[k][index], static_cast<int64_t>(DType::kFloat32));
  }
  int64_t low_type = kNoType;
  if (!update.low_precision.empty()) {
    low_type = update.low_dtypes[index];
    arrays.add(kLow, update.low_precision[index], low_type);
  }
  table.numel[slot] = update.params.numel[index];
  table.traits[slot] = static_cast<uint32_t>(param_type | grad_type << 4 | low_type << 8);
  valid = update.params.numel[index] == 0 || (update.params.numel[index] > 0 && arrays.valid());
  return arrays.head();
}

template <class Rule>
cudaError_t update_all(const Update& update, const float* factors, const float* trust,
                       const Rule& rule, const Place& place) {
  if (factors == nullptr || !is_consistent(update, Rule::kStates)) return cudaErrorInvalidValue;
  return for_each_table<Table>(
      update.params.size(),
      [&](size_t index, Table& table, int slot) -> int64_t {
        bool valid;
        const int64_t head = describe(update, Rule::kStates, index, table, slot, valid);
        if (!valid) return -1;
        const uint32_t vectors = static_cast<uint32_t>(head) << kHeadShift | kVectors;
        table.traits[slot] |= head < 0 ? 0u : vectors;
        return chunks_of(table.numel[slot], head < 0 ? 0 : head);
      },
      [&](const Table& table, int64_t chunks) {
        return launch(update_kernel<Rule>, dim3(static_cast<unsigned>(chunks)), dim3(kListThreads),
                      0, place.stream, table, rule, reinterpret_cast<const StepFactors*>(factors),
                      trust);
      });
}

}  // namespace

cudaError_t begin_step(const StepScalars& scalars, float log_beta1, float log_beta2,
                       float weight_decay, bool counts, float* factors, Place place) {
  if (scalars.step == nullptr || !is_vectorizable(factors)) return cudaErrorInvalidValue;
  return launch(begin_kernel, dim3(1), dim3(1), 0, place.stream, scalars, log_beta1, log_beta2,
                weight_decay, counts, reinterpret_cast<StepFactors*>(factors));
}

cudaError_t adamw(const Update& update, const float* factors, double beta1, double beta2,
                  double eps, Place place) {
  const AdamW rule{betas_of(beta1, beta2), rounded_once(eps)};
  return update_all(update, factors, nullptr, rule, place);
}

cudaError_t sgd(const Update& update, const float* factors, double momentum, bool nesterov,
                double weight_decay, bool decoupled, Place place) {
  const float kept = rounded_once(momentum), decay = rounded_once(weight_decay);
  if (momentum == 0.0) {
    return update_all(update, factors, nullptr, Sgd<0>{kept, decay, nesterov, decoupled}, place);
  }
  return update_all(update, factors, nullptr, Sgd<1>{kept, decay, nesterov, decoupled}, place);
}

cudaError_t lion(const Update& update, const float* factors, double beta1, double beta2,
                 Place place) {
  return update_all(update, factors, nullptr, Lion{betas_of(beta1, beta2)}, place);
}

cudaError_t lamb(const Update& update, const float* factors, const float* trust, double beta1,
                 double beta2, double eps, double weight_decay, Place place) {
  if (trust == nullptr && update.params.size() > 0) return cudaErrorInvalidValue;
  const Lamb rule{betas_of(beta1, beta2), rounded_once(eps), rounded_once(weight_decay)};
  return update_all(update, factors, trust, rule, place);
}

cudaError_t lamb_sums_of_squares(const Update& update, const float* factors, double beta1,
                                 double beta2, double eps, double weight_decay, int64_t* rows,
                                 Place place) {
  const int64_t count = static_cast<int64_t>(update.params.size());
  if (factors == nullptr || !is_consistent(update, Lamb::kStates) ||
      !update.low_precision.empty() || (rows == nullptr && count > 0)) {
    return cudaErrorInvalidValue;
  }
  const LambSources sources{{betas_of(beta1, beta2), rounded_once(eps), rounded_once(weight_decay)},
                            reinterpret_cast<const StepFactors*>(factors)};
  return for_each_table<Table>(
      update.params.size(),
      [&](size_t index, Table& table, int slot) -> int64_t {
        bool valid;
        const int64_t head = describe(update, Lamb::kStates, index, table, slot, valid);
        if (!valid) return -1;
        table.traits[slot] |= head == 0 ? kVectors : 0u;  // chunks begin at multiples of four
        return chunks_of_squares(table.numel[slot]);
      },
      [&](const Table& table, int64_t chunks) {
        return launch(squares_kernel<Table, LambSources>, dim3(static_cast<unsigned>(chunks)),
                      dim3(kListThreads), 0, place.stream, table, sources,
                      reinterpret_cast<Digit*>(rows), count * kDigits);
      });
}

}  // namespace anychip::cuda
