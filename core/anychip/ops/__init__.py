"""The operators, as functions: ``from anychip import ops; y = ops.rms_norm(x, weight)``.

One typed function per operator. Shapes, dtypes and equations are in the docstrings and, in full, in
``anychip.operators``. Each function also has ``explain(...)``, which says for a call which
implementation would serve it, and ``spec``.

float tensors are float32, bfloat16 or float16; sums are float32. Outputs are fresh, contiguous, and
have the dtype of the first argument unless said otherwise. Shapes that do not fit raise ValueError.
"""

from anychip import registry
from anychip.dispatch import selection
from anychip.dispatch.operator import operator as operator  # for the root module: connected
from anychip.ops.activation import (
    bias_dropout_add,
    bias_gelu,
    dropout,
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
from anychip.ops.attention import attention, attention_dropout, attention_varlen, rope, softmax
from anychip.ops.compression import coded as coded  # no operator of its own
from anychip.ops.compression import dequantize, hadamard, quantize, top_k
from anychip.ops.norm import (
    add_layer_norm,
    add_rms_norm,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    group_norm,
    layer_norm,
    rms_norm,
)
from anychip.ops.permutation import permute, unpermute
from anychip.ops.product import (
    conv1d,
    conv2d,
    cross_entropy,
    embedding,
    grouped_linear,
    linear,
    linear_cross_entropy,
    linear_cross_entropy_partials,
)
from anychip.ops.providers import providers
from anychip.ops.update import (
    adamw,
    adamw_8bit,
    clip,
    l2_norm,
    lamb,
    lamb_sums_of_squares,
    lion,
    sgd,
    sums_of_squares,
    unscale_and_check,
)

selection.connect(registry.owner, providers)

__all__ = [
    "adamw", "adamw_8bit", "add_layer_norm", "add_rms_norm", "attention", "attention_dropout",
    "attention_varlen", "bias_dropout_add", "bias_gelu", "clip", "conv1d", "conv2d",
    "cross_entropy", "dequantize", "dropout", "dropout_add_layer_norm", "dropout_add_rms_norm",
    "embedding", "geglu", "gelu", "group_norm", "grouped_linear", "hadamard", "l2_norm", "lamb",
    "lamb_sums_of_squares", "layer_norm", "linear", "linear_cross_entropy",
    "linear_cross_entropy_partials", "lion", "permute", "quantize", "relu", "relu2", "rms_norm",
    "rope", "sgd", "sigmoid", "silu", "softmax", "softplus", "sums_of_squares", "swiglu", "tanh",
    "top_k", "unpermute", "unscale_and_check",
]  # fmt: skip
