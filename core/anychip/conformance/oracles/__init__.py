"""What an operator's result should be: a float64 oracle for each, in numpy, by family.

An oracle is written from the operator's equation, never from its reference. It is computed in
:class:`~anychip.conformance.arithmetic.Rounded` numbers: the lines that state the value are the
derivation of the error bound. What operators are called with stands in :mod:`.drawn`, and, for
calls that are always made, in :mod:`.fixed`.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType

from anychip.conformance.oracles.fixed import FIXED, PLAIN
from anychip.conformance.oracles.oracle import Oracle
from anychip.conformance.oracles.reference import reference_oracle
from anychip.contract import OperatorSpec


def _named(family: ModuleType) -> Iterator[tuple[str, Oracle]]:
    return ((n.lower(), value) for n, value in vars(family).items() if isinstance(value, Oracle))


ORACLES: Mapping[str, Oracle] = {
    name: replace(
        oracle,
        calls=tuple(point.call(name) for point in FIXED[name]),
        plain=tuple(point.call(name) for point in PLAIN[name]),
    )
    for file in pkgutil.iter_modules(__path__)
    for name, oracle in _named(importlib.import_module(f"{__name__}.{file.name}"))
}
"""By the operator's name, which an oracle has in capitals."""


def oracle_of(spec: OperatorSpec) -> Oracle:
    """The oracle of an operator of ours; for anybody else's its reference, run in float64."""
    if spec.namespace == "anychip" and spec.name in ORACLES:
        return ORACLES[spec.name]
    return reference_oracle(spec)


__all__ = ["ORACLES", "Oracle", "oracle_of"]
