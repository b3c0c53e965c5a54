// Which instruction set's kernels run: detected when first asked, changed only by set_isa.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace anychip::cpu {

// Tables that are compiled in and that this machine can run, slowest first.
std::vector<const KernelTable*> available_tables();

// Throws std::invalid_argument, with the names that are available, for any other name.
void set_isa(const std::string& name);

}  // namespace anychip::cpu
