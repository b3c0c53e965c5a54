#include "isa.h"

#include <atomic>
#include <stdexcept>

#define ANYCHIP_DECLARE_ISA(name)  \
  namespace name {                 \
  extern const KernelTable kTable; \
  }

namespace anychip::cpu {

ANYCHIP_DECLARE_ISA(baseline)
#ifdef ANYCHIP_HAS_X86_ISAS
ANYCHIP_DECLARE_ISA(avx2)
ANYCHIP_DECLARE_ISA(avx512)
#endif
#ifdef ANYCHIP_HAS_EMULATED_AVX512
ANYCHIP_DECLARE_ISA(avx512_emulated)
#endif

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables = {&baseline::kTable};
#ifdef ANYCHIP_HAS_X86_ISAS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
#ifdef ANYCHIP_HAS_EMULATED_AVX512
    tables.push_back(&avx512_emulated::kTable);  // before the others: it runs when it is set only
#endif
    tables.push_back(&avx2::kTable);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      tables.push_back(&avx512::kTable);
    }
  }
#endif
  return tables;
}

namespace {

std::atomic<const KernelTable*>& table_in_use() {
  static std::atomic<const KernelTable*> table{available_tables().back()};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *table_in_use().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) {
  std::string names;
  for (const KernelTable* table : available_tables()) {
    if (name == table->name) {
      table_in_use().store(table, std::memory_order_relaxed);
      return;
    }
    names += names.empty() ? "" : ", ";
    names += table->name;
  }
  throw std::invalid_argument("set_isa: expected one of the instruction sets of this machine (" +
                              names + "), got '" + name + "'");
}

}  // namespace anychip::cpu
