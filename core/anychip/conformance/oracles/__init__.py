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
    permutation,
    quantization,
    rope,
    softmax,
    squares,
    update,
    varlen,
)
from anychip.conformance.oracles.edges import with_edges
from anychip.conformance.oracles.oracle import Oracle
from anychip.conformance.oracles.reference import reference_oracle
from anychip.contract import OperatorSpec

_FAMILIES = (
    activation, adamw_8bit, attention, compression, convolution, dropout, dropout_add_norm, grouped,
    linear, linear_cross_entropy, loss, norm, permutation, quantization, rope, softmax, squares,
    update, varlen,
)  # fmt: skip
ORACLES: Mapping[str, Oracle] = {
    name.lower(): replace(value, calls=with_edges(name.lower(), value.calls))
    for family in _FAMILIES
    for name, value in vars(family).items()
    if isinstance(value, Oracle)
}
"""By the operator's name, which an oracle has in capitals."""


def oracle_of(spec: OperatorSpec) -> Oracle:
    """The oracle of an operator of ours; for anybody else's its reference, run in float64."""
    if spec.namespace == "anychip" and spec.name in ORACLES:
        return ORACLES[spec.name]
    return reference_oracle(spec)


__all__ = ["ORACLES", "Oracle", "oracle_of"]
