// The table of this instruction set, and the conversions that the callers need.
#include "table.h"

#include "loops.h"

#define ANYCHIP_STRING(name) ANYCHIP_STRING_OF(name)
#define ANYCHIP_STRING_OF(name) #name

namespace anychip::cpu::ANYCHIP_ISA {

void to_float(DType dtype, const void* from, float* to, int64_t numel) {
  visit_dtype(dtype, [&](auto t) {
    const auto* source = static_cast<const decltype(t)*>(from);
    for_each_vector(0, numel,
                    [&](int64_t i, auto lanes) { store(to + i, load(source + i, lanes), lanes); });
  });
}

void from_float(DType dtype, const float* from, void* to, int64_t numel) {
  visit_dtype(dtype, [&](auto t) {
    auto* target = static_cast<decltype(t)*>(to);
    for_each_vector(
        0, numel, [&](int64_t i, auto lanes) { store(target + i, load(from + i, lanes), lanes); });
  });
}

void add_to(float* sum, const float* term, int64_t numel) {
  for_each_vector(0, numel, [&](int64_t i, auto lanes) {
    store(sum + i, load(sum + i, lanes) + load(term + i, lanes), lanes);
  });
}

const KernelTable kTable = {
    ANYCHIP_STRING(ANYCHIP_ISA),
#define ANYCHIP_KERNEL(result, name, parameters) name,
#include "../kernel_list.h"
#undef ANYCHIP_KERNEL
};

}  // namespace anychip::cpu::ANYCHIP_ISA
