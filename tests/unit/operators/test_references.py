"""The references against plain torch in float64, and at the edges of what an operator takes."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anychip
from anychip import ops
from anychip.operators import all_specs
from tests.unit.dispatch.calls import DIFFERENTIABLE, DTYPES, bits, every_sample, tensors
from tests.unit.operators.exactness import check_against_float64


@pytest.fixture
def reference() -> Iterator[None]:
    """Nothing but the references."""
    with anychip.policy(pin={spec.name: "reference" for spec in all_specs()}):
        yield


# linear's reference is torch's own product in the dtype of the arguments, whose sums of 16-bit
# products may be rounded to 16 bits once more per block.
ULPS = {"linear": 1.0}
# attention's and softmax's backward take sum(y dy) of an output that was rounded to 16 bits (Dao
# 2022, B.2). What add_rms_norm and add_layer_norm norm is a sum that was rounded to 16 bits: half
# an ULP of each element, and as much through rstd, are one ULP of y. A gradient has three factors
# that depend on the sum.
INNER = {
    "attention": (0.0, 2.0), "attention_dropout": (0.0, 2.0), "attention_varlen": (0.0, 2.0),
    "softmax": (0.0, 2.0), "add_rms_norm": (1.0, 3.0), "add_layer_norm": (1.0, 3.0),
    "dropout_add_rms_norm": (1.0, 3.0), "dropout_add_layer_norm": (1.0, 3.0),
}  # fmt: skip


@pytest.mark.grid
@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "index"), every_sample(DIFFERENTIABLE))
def test_reference_every_sample_is_exact_to_its_dtype(
    name: str, index: int, dtype: torch.dtype
) -> None:
    ulps, inner = ULPS.get(name, 0.5) + 0.01, INNER.get(name, (0.0, 0.0))
    check_against_float64(name, index, dtype, ulps=ulps, inner=inner)


R = torch.randn
EMPTY: dict[str, tuple[Any, ...]] = {
    "rms_norm no rows": ((0, 8), (8,)),
    "rms_norm no columns": ((4, 0), (0,)),
    "rms_norm 1-dim": ((8,), (8,)),
    "layer_norm no rows": ((0, 8), (8,), (8,)),
    "layer_norm no columns": ((4, 0), (0,), (0,)),
    "layer_norm 1-dim": ((8,), (8,), (8,)),
    "group_norm no rows": ((0, 4, 3), (4,), (4,), {"num_groups": 2}),
    "group_norm no numbers": ((2, 4, 0), (4,), (4,), {"num_groups": 2}),
    "group_norm 2-dim": ((3, 4), (4,), (4,), {"num_groups": 2}),
    "relu empty": ((3, 0),),
    "softplus 0-dim": ((), {"threshold": 500.0}),
    "conv1d no positions": ((2, 3, 0), (3, 4), (3,)),
    "conv1d kernel longer than x": ((2, 3, 2), (3, 4), (3,)),
    "conv2d no images": ((0, 3, 4, 4), (2, 3, 2, 2), (2,)),
    "conv2d kernel of x's size": ((1, 3, 4, 5), (2, 3, 4, 5)),
    "conv2d seen by nothing": ((1, 1, 4, 4), (1, 1, 1, 1), (1,), {"stride": 3}),
    "add_rms_norm no rows": ((0, 8), (0, 8), (8,)),
    "add_rms_norm no columns": ((4, 0), (4, 0), (0,)),
    "add_rms_norm 1-dim": ((8,), (8,), (8,)),
    "add_layer_norm no rows": ((0, 8), (0, 8), (8,), (8,)),
    "add_layer_norm no columns": ((4, 0), (4, 0), (0,), (0,)),
    "add_layer_norm 1-dim": ((8,), (8,), (8,), (8,)),
    "bias_gelu no rows": ((0, 3), (3,)),
    "bias_gelu no columns": ((3, 0), (0,)),
    "geglu empty": ((0,), (0,)),
    "geglu 0-dim": ((), ()),
    "bias_dropout_add no rows": ((0, 3), (0, 3), [1, 2], (3,)),
    "bias_dropout_add no columns": ((3, 0), (3, 0), [1, 2], (0,)),
    "bias_dropout_add 0-dim": ((), (), [1, 2]),
    "dropout_add_rms_norm no rows": ((0, 8), (0, 8), (8,), [1, 2]),
    "dropout_add_layer_norm no columns": ((4, 0), (4, 0), (0,), [1, 2], (0,)),
    "softmax no rows": ((0, 4),),
    "softmax no keys": ((3, 0),),
    "softmax no queries": ((2, 0, 4), {"causal": True}),
    "softmax one key": ((1,),),
    "softmax one causal key": ((3, 1), {"causal": True}),
    "gelu empty": ((3, 0),),
    "gelu 0-dim": ((),),
    "swiglu empty": ((0,), (0,)),
    "dropout empty": ((0, 3), [1, 2]),
    "dropout 0-dim": ((), [1, 2]),
    "rope no positions": ((1, 0, 2, 8), (1, 0, 1, 8), (0, 4), (0, 4)),
    "attention no batch": ((0, 3, 2, 8), (0, 3, 2, 8), (0, 3, 2, 8), {"causal": True}),
    "attention no positions": ((1, 0, 2, 8), (1, 0, 2, 8), (1, 0, 2, 8), {"causal": True}),
    "attention no query heads": ((1, 3, 0, 8), (1, 3, 1, 8), (1, 3, 1, 8)),
    "attention no keys": ((1, 3, 2, 8), (1, 0, 1, 8), (1, 0, 1, 8)),
    "attention no queries": ((1, 0, 2, 8), (1, 3, 1, 8), (1, 3, 1, 8), {"causal": True}),
    "attention_dropout no keys": ((1, 3, 2, 8), (1, 0, 1, 8), (1, 0, 1, 8), [1, 2]),
    "attention_varlen no tokens": ((0, 2, 8), (0, 1, 8), (0, 1, 8), [0, 0], {"causal": True}),
    "attention_varlen no sequences": ((3, 2, 8), (3, 1, 8), (3, 1, 8), [0]),
    "grouped_linear no rows": ((0, 5), (2, 3, 5), [0, 0]),
    "grouped_linear no groups": ((4, 5), (0, 3, 5), []),
    "grouped_linear no inputs": ((4, 0), (1, 3, 0), [2]),
    "linear_cross_entropy no rows": ((0, 4), (5, 4), [], (5,), {"reduction": "sum"}),
    "linear_cross_entropy 1-dim": ((4,), (5, 4), 2),
    "linear_cross_entropy no inputs": ((3, 0), (5, 0), [0, 4, 2], (5,)),
    "rope nothing rotated": ((1, 2, 2, 8), (1, 2, 1, 8), (2, 0), (2, 0)),
    "linear no rows": ((0, 5), (2, 5), (2,)),
    "linear no inputs": ((3, 0), (2, 0), (2,)),
    "linear no outputs": ((3, 5), (0, 5), (0,)),
    "linear 1-dim": ((5,), (2, 5), (2,)),
    "embedding no indices": ([], (4, 3)),
    "embedding no width": ([1, 2], (4, 0)),
    "embedding 0-dim": (2, (4, 3)),
    "cross_entropy no rows": ((0, 5), [], {"reduction": "sum"}),
    "cross_entropy 1-dim": ((5,), 2),
    "cross_entropy one class": ((3, 1), [0, 0, 0], {"label_smoothing": 0.2}),
}
"""Operator and what is at the edge, to arguments: shapes, integers, and last attributes."""


@pytest.mark.parametrize("label", EMPTY)
def test_edge_of_the_shapes_reference_and_cpu_rows_agree(label: str) -> None:
    operator = getattr(ops, label.split()[0])
    given = [a for a in EMPTY[label] if not isinstance(a, dict)]
    args = [R(a) if isinstance(a, tuple) else torch.tensor(a, dtype=torch.int64) for a in given]
    attrs = EMPTY[label][-1] if len(given) < len(EMPTY[label]) else {}
    names = inspect.signature(operator).parameters
    differentiable = operator.spec.differentiable
    leaves = [a.requires_grad_() for n, a in zip(names, args, strict=False) if n in differentiable]
    found = []
    for pins in ({operator.spec.name: "reference"}, {}):
        with anychip.policy(pin=pins):
            outputs = tensors(operator(*args, **attrs))
            total = sum((y.sum() for y in outputs), torch.zeros(()))
            found.append([*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert bool(torch.isfinite(one).all())


def test_cross_entropy_mean_over_no_rows_is_nan_with_zero_gradient() -> None:
    logits = R(3, 5, requires_grad=True)
    loss = ops.cross_entropy(logits, torch.full((3,), -100))
    loss.backward()
    assert loss.isnan()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_cross_entropy_of_ignored_rows_does_not_depend_on_their_values() -> None:
    target = torch.tensor([1, -100, 3])
    clean = R(3, 5)
    dirty = clean.clone()
    dirty[1] = float("nan")
    found = []
    for logits in (clean, dirty):
        leaf = logits.requires_grad_()
        loss = ops.cross_entropy(leaf, target, label_smoothing=0.1, z_loss=0.1)
        found.append(bits([loss, torch.autograd.grad(loss, leaf)[0]]))
    assert found[0] == found[1]


@pytest.mark.usefixtures("reference")
def test_cross_entropy_wrong_target_names_value_and_row() -> None:
    with pytest.raises(IndexError, match="from 0 to 4 or ignore_index -100, got 5 in row 1"):
        ops.cross_entropy(R(3, 5), torch.tensor([0, 5, 1]))
    with pytest.raises(IndexError, match="got -1 in row 2"):
        ops.cross_entropy(R(3, 5), torch.tensor([0, 4, -1]))


@pytest.mark.usefixtures("reference")
def test_embedding_wrong_index_names_the_range() -> None:
    with pytest.raises(IndexError, match="from 0 to 3, got -1 to 4"):
        ops.embedding(torch.tensor([-1, 4]), R(4, 3))
