// Launchers of rms_norm and layer_norm, of a sum or not.
#include "norm.h"
#include "norm_launch.cuh"

namespace anychip::cuda {

cudaError_t norm_forward(const NormForward& args, Place place) {
  return launch_norm_forward(args, KeepAll{}, OwnColumns{}, place);
}

cudaError_t norm_backward(const NormBackward& args, const NormScratch& scratch, Place place) {
  return launch_norm_backward(args, KeepAll{}, OwnColumns{}, scratch, place);
}

}  // namespace anychip::cuda
