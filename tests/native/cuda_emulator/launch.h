// The checks of a launch, and its grid.
#pragma once

#include <string>

#include "runtime_api.h"
#include "settings.h"

namespace cuda_emulator {

// Why the device would refuse it: cudaSuccess, or a code with its reason in `why`.
cudaError_t check(const Launch& launch, size_t opted_in, std::string& why);
// Runs every block; the result is that of the first that fails.
cudaError_t run_grid(const Launch& launch, const Settings& settings, size_t opted_in);

}  // namespace cuda_emulator
