// A call of an operator by its name, as aclop.cpp hands it to libopapi.so.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "emulator.h"

namespace cann {

// dtype is CANN's code, below 0 for an optional tensor that was not given.
struct NamedTensor {
  int dtype;
  std::vector<int64_t> shape;
  void* address;
  size_t size;
};

struct NamedCall {
  std::string name;
  std::vector<NamedTensor> inputs;
  std::vector<NamedTensor> outputs;
  std::map<std::string, std::string> attributes;
};

// Queues the operator; false when there is none of that name. libopapi.so exports it as
// cann_run_named_operator.
using RunNamedOperator = bool (*)(const NamedCall& call, Stream stream);

}  // namespace cann
