"""The operators: one file per family, with spec, reference, cost and samples next to each other.

How rows are picked is in ``anychip.dispatch``; what users call is in ``anychip.ops``.
"""

from anychip.contract import OperatorSpec
from anychip.operators.activation import (
    bias_gelu,
    geglu,
    gelu,
    relu,
    relu2,
    sigmoid,
    silu,
    softplus,
    swiglu,
    tanh,
)
from anychip.operators.adamw_8bit import adamw_8bit
from anychip.operators.add_norm import add_layer_norm, add_rms_norm
from anychip.operators.attention import attention, attention_dropout
from anychip.operators.compression import hadamard, top_k
from anychip.operators.convolution import conv1d, conv2d
from anychip.operators.dropout import bias_dropout_add, dropout
from anychip.operators.dropout_add_norm import dropout_add_layer_norm, dropout_add_rms_norm
from anychip.operators.gradients import clip, l2_norm, unscale_and_check
from anychip.operators.grouped import grouped_linear
from anychip.operators.lamb import lamb, lamb_sums_of_squares
from anychip.operators.linear import embedding, linear
from anychip.operators.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_partials,
)
from anychip.operators.loss import cross_entropy
from anychip.operators.norm import group_norm, layer_norm, rms_norm
from anychip.operators.permutation import permute, unpermute
from anychip.operators.quantization import dequantize, quantize
from anychip.operators.rope import rope
from anychip.operators.softmax import softmax
from anychip.operators.squares import sums_of_squares
from anychip.operators.update import adamw, lion, sgd
from anychip.operators.varlen import attention_varlen


def all_specs() -> tuple[OperatorSpec, ...]:
    """Every operator of this package, by families."""
    return tuple(value for value in globals().values() if isinstance(value, OperatorSpec))


__all__ = [
    "adamw", "adamw_8bit", "add_layer_norm", "add_rms_norm", "all_specs", "attention",
    "attention_dropout", "attention_varlen", "bias_dropout_add", "bias_gelu", "clip", "conv1d",
    "conv2d", "cross_entropy", "dequantize", "dropout", "dropout_add_layer_norm",
    "dropout_add_rms_norm", "embedding", "geglu", "gelu", "group_norm", "grouped_linear",
    "hadamard", "l2_norm", "lamb", "lamb_sums_of_squares", "layer_norm", "linear",
    "linear_cross_entropy", "linear_cross_entropy_partials", "lion", "permute", "quantize", "relu",
    "relu2", "rms_norm", "rope", "sgd", "sigmoid", "silu", "softmax", "softplus", "sums_of_squares",
    "swiglu", "tanh", "top_k", "unpermute", "unscale_and_check",
]  # fmt: skip
