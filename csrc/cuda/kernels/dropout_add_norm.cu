// Launchers of rms_norm and layer_norm of a sum that is dropped in part.
#include "norm.h"
#include "norm_launch.cuh"

namespace anychip::cuda {

cudaError_t dropout_add_norm_forward(const NormForward& args, const Drop& drop, Place place) {
  // What has no elements has no address.
  const bool has_elements = args.rows > 0 && args.hidden > 0;
  if (!is_valid(drop) || (has_elements && args.residual == nullptr)) return cudaErrorInvalidValue;
  return launch_norm_forward(args, DropRule(drop), OwnColumns{}, place);
}

cudaError_t dropout_add_norm_backward(const NormBackward& args, const Drop& drop,
                                      const NormScratch& scratch, Place place) {
  if (!is_valid(drop)) return cudaErrorInvalidValue;
  return launch_norm_backward(args, DropRule(drop), OwnColumns{}, scratch, place);
}

}  // namespace anychip::cuda
