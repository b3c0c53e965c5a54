// The operators that torch_npu calls by name (aclop) on the 910B.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>

#include "aclop.h"
#include "operators/operator.h"

using namespace cann;

namespace {

// An operand of a call by name.
OptionalTensor operand(const NamedTensor& tensor) {
  if (tensor.dtype < 0 || tensor.address == nullptr) return std::nullopt;
  return at::from_blob(reachable(tensor.address), tensor.shape,
                       at::TensorOptions().dtype(scalar_type(tensor.dtype)));
}

bool is_set(const NamedCall& call, const char* attribute) {
  const auto found = call.attributes.find(attribute);
  return found != call.attributes.end() && found->second == "1";
}

void copy_bytes(const NamedCall& call) {
  const NamedTensor& from = call.inputs.at(0);
  const NamedTensor& to = call.outputs.at(0);
  memmove(reachable(to.address), reachable(from.address), std::min(from.size, to.size));
}

// Inputs: parameter, mean, square, then the scalars beta1^t, beta2^t, rate, decay, beta1, beta2,
// epsilon, then the gradient. Outputs: parameter, mean, square.
void adam_w(const NamedCall& call) {
  TORCH_CHECK(!is_set(call, "amsgrad"), "the emulator has no amsgrad here");
  const auto number = [&](size_t i) { return operand(call.inputs.at(i))->item<double>(); };
  const double beta1_power = number(3), beta2_power = number(4), rate = number(5);
  const double decay = number(6), beta1 = number(7), beta2 = number(8), epsilon = number(9);
  const Tensor given = *operand(call.inputs.at(10));
  const Tensor grad = is_set(call, "maximize") ? at::neg(given) : given;
  Tensor parameter = operand(call.inputs[0])->clone();
  const Tensor mean = at::mul(*operand(call.inputs[1]), beta1).add_(grad, 1 - beta1);
  const Tensor square = at::mul(*operand(call.inputs[2]), beta2).addcmul_(grad, grad, 1 - beta2);
  const Tensor divisor = (square.sqrt() / std::sqrt(1 - beta2_power)).add_(epsilon);
  parameter.mul_(1 - rate * decay).addcdiv_(mean, divisor, -rate / (1 - beta1_power));
  write(*operand(call.outputs.at(0)), parameter);
  write(*operand(call.outputs.at(1)), mean);
  write(*operand(call.outputs.at(2)), square);
}

// softmax(scale * x) over the last dimension, without the elements whose mask is true.
Tensor masked_softmax(const NamedCall& call) {
  const Tensor x = operand(call.inputs.at(0))->to(at::kFloat);
  const auto scale = call.attributes.find("scale");
  Tensor scores = scale != call.attributes.end() ? x * std::stod(scale->second) : x;
  Tensor mask = is_set(call, "fixed_triu_mask")
                    ? at::ones({x.size(-2), x.size(-1)}, at::kBool).triu(1)
                    : operand(call.inputs.at(1))->to(at::kBool);
  return at::softmax(scores.masked_fill(mask, -std::numeric_limits<float>::infinity()), -1);
}

void scaled_masked_softmax(const NamedCall& call) {
  write(*operand(call.outputs.at(0)), masked_softmax(call));
}

// Inputs: the gradient of y, y, the mask. What is masked has y of 0, and so no gradient.
void scaled_masked_softmax_grad(const NamedCall& call) {
  const Tensor grad = operand(call.inputs.at(0))->to(at::kFloat);
  const Tensor y = operand(call.inputs.at(1))->to(at::kFloat);
  const auto scale = call.attributes.find("scale");
  const double factor = scale != call.attributes.end() ? std::stod(scale->second) : 1;
  write(*operand(call.outputs.at(0)), y * (grad - (grad * y).sum(-1, true)) * factor);
}

// A call whose operands on the host (scalars) are copied: they are gone when the work runs.
struct KeptCall {
  explicit KeptCall(const NamedCall& given) : call(given) {
    for (NamedTensor& input : call.inputs) {
      if (input.address == nullptr || is_on_device(input.address)) continue;
      const char* start = static_cast<const char*>(input.address);
      copies.emplace_back(start, start + input.size);
      input.address = copies.back().data();
    }
  }
  KeptCall(const KeptCall&) = delete;
  NamedCall call;
  std::deque<std::vector<char>> copies;
};

const std::map<std::string, void (*)(const NamedCall&)> kNamedOperators = {
    {"Identity", copy_bytes},
    {"ApplyAdamW", adam_w},
    {"ScaledMaskedSoftmax", scaled_masked_softmax},
    {"ScaledMaskedSoftmaxGrad", scaled_masked_softmax_grad},
};

}  // namespace

CANN_API bool cann_run_named_operator(const NamedCall& call, Stream stream) {
  const auto found = kNamedOperators.find(call.name);
  if (found == kNamedOperators.end()) return false;
  note_call(found->first.c_str());
  const auto kept = std::make_shared<KeptCall>(call);
  const auto body = found->second;
  return launch(stream, found->first.c_str(),
                [kept, body] { run_body([&] { body(kept->call); }); }) == kSuccess;
}
