// Work of the device: launches, copies and fills, run at once or later.
//
// Note [Delayed launches]
//
// A device runs behind the host. With ANYCHIP_EMULATOR_DELAYED=1 work is queued, in one queue for
// all streams, until a call that waits: cudaDeviceSynchronize, cudaStreamSynchronize, cudaMemcpy,
// cudaMemset, cudaFree. A kernel that gets a host's variable by address, or a buffer that has been
// freed or reused meanwhile, then shows: as a wrong result, or with the address sanitizer as a
// report. Errors of kernels appear at the call that waits, those of a launch's shape at the launch.
#pragma once

#include <functional>

#include "runtime_api.h"

namespace cuda_emulator {

// Runs `work`, or queues it. The result is that of `work` if it has run.
cudaError_t run_or_queue(std::function<cudaError_t()> work);
// Runs everything that is queued; what follows a failure is dropped, as after it on the device.
cudaError_t run_queued();

}  // namespace cuda_emulator
