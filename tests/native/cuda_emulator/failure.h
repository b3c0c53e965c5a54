// The error of a launch: its code in CUDA's numbers, and a sentence with what was found where.
#pragma once

#include <string>

#include "runtime_api.h"

namespace cuda_emulator {

// Keeps the first failure until it is taken; cudaGetErrorString shows its sentence.
void report_failure(cudaError_t code, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
bool has_failed();
// The code of the failure, or cudaSuccess; the next one can be reported then.
cudaError_t take_failure();

}  // namespace cuda_emulator
