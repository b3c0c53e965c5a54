"""What an operator's result should be: a float64 oracle for each, in numpy, by family.

An oracle is written from the operator's equation, never from its reference. It is computed in
:class:`~anychip.conformance.arithmetic.Rounded` numbers: the lines that state the value are the
derivation of the error bound. Next to each stand the calls that bring out its typical mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping

from anychip.conformance.oracles import activation, attention, dropout, linear, loss, norm, update
from anychip.conformance.oracles.oracle import Oracle
from anychip.conformance.oracles.reference import reference_oracle
from anychip.contract import OperatorSpec

ORACLES: Mapping[str, Oracle] = {
    "rms_norm": norm.RMS_NORM,
    "layer_norm": norm.LAYER_NORM,
    "dropout": dropout.DROPOUT,
    "gelu": activation.GELU,
    "swiglu": activation.SWIGLU,
    "rope": attention.ROPE,
    "attention": attention.ATTENTION,
    "linear": linear.LINEAR,
    "embedding": linear.EMBEDDING,
    "cross_entropy": loss.CROSS_ENTROPY,
    "l2_norm": update.L2_NORM,
    "clip": update.CLIP,
    "unscale_and_check": update.UNSCALE_AND_CHECK,
    "adamw": update.ADAMW,
}


def oracle_of(spec: OperatorSpec) -> Oracle:
    """The oracle of an operator of ours; for anybody else's its reference, run in float64."""
    if spec.namespace == "anychip" and spec.name in ORACLES:
        return ORACLES[spec.name]
    return reference_oracle(spec)


__all__ = ["ORACLES", "Oracle", "oracle_of"]
