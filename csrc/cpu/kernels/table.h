// Declares this instruction set's kernels; table.cpp puts them into its KernelTable.
#pragma once

#include "../kernel_table.h"

namespace anychip::cpu::ANYCHIP_ISA {

#define ANYCHIP_KERNEL(result, name, parameters) result name parameters;
#include "../kernel_list.h"
#undef ANYCHIP_KERNEL

extern const KernelTable kTable;

}  // namespace anychip::cpu::ANYCHIP_ISA
