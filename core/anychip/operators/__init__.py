"""The operators: one file per family, with spec, reference, cost and samples next to each other.

How rows are picked is in ``anychip.dispatch``; what users call is in ``anychip.ops``.
"""

from anychip.contract import OperatorSpec
from anychip.operators.activation import gelu, swiglu
from anychip.operators.attention import attention, rope
from anychip.operators.dropout import dropout
from anychip.operators.linear import embedding, linear
from anychip.operators.loss import cross_entropy
from anychip.operators.norm import layer_norm, rms_norm
from anychip.operators.update import adamw, clip, l2_norm, unscale_and_check


def all_specs() -> tuple[OperatorSpec, ...]:
    """Every operator of this package, in the order of the documentation."""
    return (
        rms_norm,
        layer_norm,
        dropout,
        gelu,
        swiglu,
        rope,
        attention,
        linear,
        embedding,
        cross_entropy,
        l2_norm,
        clip,
        unscale_and_check,
        adamw,
    )


__all__ = [
    "adamw",
    "all_specs",
    "attention",
    "clip",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "l2_norm",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "swiglu",
    "unscale_and_check",
]
