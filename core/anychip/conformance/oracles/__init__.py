"""What an operator's result should be: a float64 oracle for each, in numpy, by family.

An oracle is written from the operator's equation, never from its reference. It is computed in
:class:`~anychip.conformance.arithmetic.Rounded` numbers: the lines that state the value are the
derivation of the error bound. Next to each stand the calls that bring out its typical mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from anychip.conformance.oracles import (
    activation,
    adamw_8bit,
    attention,
    compression,
    convolution,
    dropout,
    dropout_add_norm,
    grouped,
    linear,
    linear_cross_entropy,
    loss,
    norm,
    partials,
    permutation,
    quantization,
    rope,
    softmax,
    update,
    varlen,
)
from anychip.conformance.oracles.edges import with_edges
from anychip.conformance.oracles.oracle import Oracle
from anychip.conformance.oracles.reference import reference_oracle
from anychip.contract import OperatorSpec

_OWN: Mapping[str, Oracle] = {
    "rms_norm": norm.RMS_NORM,
    "layer_norm": norm.LAYER_NORM,
    "group_norm": norm.GROUP_NORM,
    "add_rms_norm": norm.ADD_RMS_NORM,
    "add_layer_norm": norm.ADD_LAYER_NORM,
    "dropout": dropout.DROPOUT,
    "bias_dropout_add": dropout.BIAS_DROPOUT_ADD,
    "dropout_add_rms_norm": dropout_add_norm.DROPOUT_ADD_RMS_NORM,
    "dropout_add_layer_norm": dropout_add_norm.DROPOUT_ADD_LAYER_NORM,
    "gelu": activation.GELU,
    "silu": activation.SILU,
    "relu": activation.RELU,
    "relu2": activation.RELU2,
    "sigmoid": activation.SIGMOID,
    "tanh": activation.TANH,
    "softplus": activation.SOFTPLUS,
    "bias_gelu": activation.BIAS_GELU,
    "swiglu": activation.SWIGLU,
    "geglu": activation.GEGLU,
    "softmax": softmax.SOFTMAX,
    "rope": rope.ROPE,
    "attention": attention.ATTENTION,
    "attention_dropout": attention.ATTENTION_DROPOUT,
    "attention_varlen": varlen.ATTENTION_VARLEN,
    "linear": linear.LINEAR,
    "grouped_linear": grouped.GROUPED_LINEAR,
    "conv1d": convolution.CONV1D,
    "conv2d": convolution.CONV2D,
    "permute": permutation.PERMUTE,
    "unpermute": permutation.UNPERMUTE,
    "embedding": linear.EMBEDDING,
    "cross_entropy": loss.CROSS_ENTROPY,
    "linear_cross_entropy": linear_cross_entropy.LINEAR_CROSS_ENTROPY,
    "linear_cross_entropy_partials": linear_cross_entropy.LINEAR_CROSS_ENTROPY_PARTIALS,
    "l2_norm": update.L2_NORM,
    "l2_norm_partials": partials.L2_NORM_PARTIALS,
    "clip": update.CLIP,
    "unscale_and_check": update.UNSCALE_AND_CHECK,
    "adamw": update.ADAMW,
    "adamw_8bit": adamw_8bit.ADAMW_8BIT,
    "sgd": update.SGD,
    "lion": update.LION,
    "lamb_partials": partials.LAMB_PARTIALS,
    "lamb": partials.LAMB,
    "quantize": quantization.QUANTIZE,
    "dequantize": quantization.DEQUANTIZE,
    "hadamard": compression.HADAMARD,
    "top_k": compression.TOP_K,
}
ORACLES: Mapping[str, Oracle] = {
    name: replace(oracle, calls=with_edges(name, oracle.calls)) for name, oracle in _OWN.items()
}


def oracle_of(spec: OperatorSpec) -> Oracle:
    """The oracle of an operator of ours; for anybody else's its reference, run in float64."""
    if spec.namespace == "anychip" and spec.name in ORACLES:
        return ORACLES[spec.name]
    return reference_oracle(spec)


__all__ = ["ORACLES", "Oracle", "oracle_of"]
