"""The ranks of the DTensor test: python sharded.py WORLD FOLDER LABELS.

Runs the cases of LABELS, a list in JSON, on sharded tensors and on whole ones; each rank writes a
JSON of {case: "" or what went wrong}. A row that takes addresses stands in front of every operator
and insists on real ones.
"""

import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

import anychip
from anychip import OperatorTable, ops
from tests.unit.dispatch.calls import DIFFERENTIABLE, SPECS, tensors
from tests.unit.dispatch.tables import installation

Case = tuple[list[tuple[Tensor, int | None]], dict[str, Any], bool]


def spies() -> OperatorTable:
    """A row in front of each operator that looks at its tensors and then refuses the call."""
    table = OperatorTable()

    def look(*args: Any, **attrs: Any) -> bool:
        for tensor in tensors(list(args)):
            assert type(tensor) in (Tensor, Parameter), type(tensor)
            assert tensor.data_ptr() or not tensor.numel()
        return False

    def never(*args: Any, **attrs: Any) -> None:
        raise AssertionError("a row that refuses was run")

    for name in SPECS:
        table.forward(name, accepts=look)(never)
        if name in DIFFERENTIABLE:
            table.backward(name, accepts=look)(never)
    return table


def cases() -> dict[str, Case]:
    """By operator: arguments and the dims they are split along, attributes, are bits equal?"""
    torch.manual_seed(0)
    x, w, b = torch.randn(8, 6, 16), torch.randn(16), torch.randn(16)
    up, down = torch.randn(12, 16), torch.randn(16, 6, 16)
    bias = torch.randn(12)
    logits, target = torch.randn(8, 11), torch.randint(11, (8,))
    target[3] = -100
    q, k, v = torch.randn(4, 6, 4, 8), torch.randn(4, 6, 2, 8), torch.randn(4, 6, 2, 8)
    wide_q, odd_k = torch.randn(2, 6, 12, 8), torch.randn(2, 6, 3, 8)
    cos, sin = torch.rand(6, 4), torch.rand(6, 4)
    index = torch.randint(12, (8, 3))
    total = {"reduction": "sum"}
    others = fused_cases() | packed_cases() | channel_cases() | random_cases()
    return others | {
        "rms_norm/rows": ([(x, 0), (w, None)], {}, True),
        "rms_norm/second dim": ([(x, 1), (w, None)], {}, True),
        "rms_norm/last dim is gathered": ([(x, 2), (w, 0)], {}, True),
        "rms_norm/uneven": ([(x[:7], 0), (w, None)], {}, True),
        "layer_norm/rows": ([(x, 0), (w, None), (b, None)], {}, True),
        "layer_norm/no bias": ([(x, 1), (w, None)], {}, True),
        "gelu/last dim": ([(x, 2)], {}, True),
        "swiglu/rows": ([(x, 0), (x * 2, 0)], {}, True),
        "swiglu/mixed": ([(x, 0), (x * 2, None)], {}, True),
        "linear/rows": ([(x, 0), (up, None), (bias, None)], {}, False),
        "linear/column": ([(x, None), (up, 0), (bias, 0)], {}, False),
        "linear/row": ([(x, 2), (up, 1)], {"out_dtype": torch.float32}, False),
        "linear/no bias": ([(down, 0), (up, None)], {}, False),
        "embedding/indices": ([(index, 0), (up, None)], {}, True),
        "cross_entropy/sum": ([(logits, 0), (target, 0)], total, False),
        "cross_entropy/mean": ([(logits, 0), (target, 0)], {}, False),
        "cross_entropy/none": ([(logits, 0), (target, 0)], {"reduction": "none"}, True),
        "rope/batch": ([(q, 0), (k, 0), (cos, None), (sin, None)], {}, True),
        "rope/heads": ([(q, 2), (k, 2), (cos, None), (sin, None)], {}, True),
        "rope/positions": ([(q, 1), (k, 1), (cos, 0), (sin, 0)], {}, True),
        "attention/batch": ([(q, 0), (k, 0), (v, 0)], {"causal": True}, False),
        "attention/heads": ([(q, 2), (k, 2), (v, 2)], {"causal": True}, False),
        # 12 and 3 heads on two ranks: shards of 6, and of 2 and 1, which do not belong together
        "attention/uneven heads": ([(wide_q, 2), (odd_k, 2), (odd_k + 1, 2)], {}, False),
    }


def fused_cases() -> dict[str, Case]:
    """The same for the fused operators and softmax."""
    torch.manual_seed(1)
    x, w, b = torch.randn(8, 6, 16), torch.randn(16), torch.randn(16)
    visible, visible_by_row = torch.rand(6, 16) < 0.7, torch.rand(8, 1, 16) < 0.7
    seen = (torch.ones(16, dtype=torch.bool), None)
    return {
        "add_rms_norm/rows": ([(x, 0), (x * 2, 0), (w, None)], {}, True),
        "add_rms_norm/mixed": ([(x, 1), (x * 2, None), (w, None)], {}, True),
        "add_layer_norm/rows": ([(x, 0), (x * 2, 0), (w, None), (b, None)], {}, True),
        "add_layer_norm/no bias": ([(x, 1), (x * 2, 1), (w, None)], {}, True),
        "bias_gelu/rows": ([(x, 0), (b, None)], {}, True),
        "bias_gelu/last dim": ([(x, 2), (b, 0)], {"approximate": "tanh"}, True),
        "geglu/last dim": ([(x, 2), (x * 2, 2)], {}, True),
        "softmax/rows": ([(x, 0)], {"scale": 0.5, "causal": True}, True),
        "softmax/queries": ([(x, 1)], {}, True),
        "softmax/causal queries are gathered": ([(x, 1)], {"causal": True}, True),
        "softmax/keys are gathered": ([(x, 2)], {}, True),
        "softmax/mask of all rows": ([(x, 0), (visible, None)], {}, True),
        "softmax/mask of each row": ([(x, 0), (visible_by_row, 0)], {}, True),
        # The bias of all rows has a gradient that is summed over the ranks, in another order.
        "softmax/bias of all rows": ([(x, 0), seen, (w, None)], {"scale": 0.5}, False),
        "softmax/bias of each row": ([(x, 0), seen, (x[:, :1], 0)], {}, True),
        "softmax/bias of queries": ([(x, 1), seen, (x[0], 0)], {}, False),
        "softmax/bias that is cut": ([(x, 0), seen, (x[0], 1)], {}, False),
    }


def random_cases() -> dict[str, Case]:
    """Random operators, whose shards are told where they lie."""
    torch.manual_seed(4)
    x, w, b = torch.randn(8, 6, 16), torch.randn(16), torch.randn(16)
    rng, rows = (torch.tensor([5, 2**32 - 3]), None), torch.randperm(48).reshape(8, 6)
    place: dict[str, Any] = {"p": 0.4, "width": 24, "column": 3}
    streams = [(x, 0), (x * 2, 0)]
    q, k = torch.randn(4, 6, 4, 8), torch.randn(4, 6, 2, 8)
    batch, heads = torch.tensor([7, 0, 2, 5]), torch.tensor([1, 6, 4, 3])
    ends = [(torch.arange(6), None)] * 2
    sizes: dict[str, Any] = {"p": 0.4, "heads": 8, "queries": 6, "keys": 6}
    return {
        "dropout/rows": ([(x, 0), rng, (rows, 0)], place, True),
        "dropout/second dim": ([(x, 1), rng, (rows, 1)], place, True),
        "dropout/uneven": ([(x[:7], 0), rng, (rows[:7], 0)], place, True),
        "dropout/last dim is gathered": ([(x, 2), rng, (rows, None)], place, True),
        "bias_dropout_add/rows": ([*streams, rng, (b, None), (rows, 0)], place, True),
        "dropout_add_rms_norm/rows": ([*streams, (w, None), rng, (rows, 0)], {"p": 0.4}, True),
        "dropout_add_layer_norm/rows": (
            [*streams, (w, None), rng, (b, None), (rows, 0)], {"p": 0.4}, True),
        "attention_dropout/batch": (
            [(q, 0), (k, 0), (k + 1, 0), rng, (batch, 0), (heads, None), *ends], sizes, False),
        "attention_dropout/heads": (
            [(q, 2), (k, 2), (k + 1, 2), rng, (batch, None), (heads, 0), *ends], sizes, False),
    }  # fmt: skip


def channel_cases() -> dict[str, Case]:
    """Operators of (N, C, ...), and activations of one tensor."""
    torch.manual_seed(3)
    x, up, bias = torch.randn(8, 6, 16), torch.randn(6, 4), torch.randn(12)
    w, b = torch.randn(6), torch.randn(6)
    q, kernel = torch.randn(4, 6, 4, 8), torch.randn(12, 6, 3, 2)
    return {
        "silu/last dim": ([(x, 2)], {}, True), "softplus/rows": ([(x, 0)], {"beta": 2.0}, True),
        "group_norm/batch": ([(x, 0), (w, None), (b, None)], {"num_groups": 3}, True),
        "group_norm/channels are gathered": ([(x, 1), (w, 0)], {"num_groups": 3}, True),
        "conv1d/channels": ([(x, 1), (up, 0), (b, 0)], {}, False),
        "conv1d/batch": ([(x, 0), (up, None)], {}, False),
        "conv2d/batch": ([(q, 0), (kernel, None), (bias, None)], {"padding": 1}, False),
        "conv2d/outputs": ([(q, None), (kernel, 0), (bias, 0)], {"stride": 2}, False),
        "conv2d/groups are gathered": ([(q, None), (kernel[:, :3], 0)], {"groups": 2}, False),
    }  # fmt: skip


def packed_cases() -> dict[str, Case]:
    """As :func:`cases`, for rows in groups and for the loss with its output layer."""
    return packed_products() | routed_cases()


def routed_cases() -> dict[str, Case]:
    """Rows to experts and back."""
    torch.manual_seed(2)
    x = torch.randn(8, 16)
    routes = torch.randint(-1, 4, (8, 2))
    row_map, weights = torch.randperm(8).view(4, 2), torch.rand(4, 2)
    experts = {"num_experts": 4}
    return {
        "permute/hidden": ([(x, 1), (routes, None)], experts, True),
        "permute/tokens are gathered": ([(x, 0), (routes, 0)], experts, True),
        "unpermute/hidden": ([(x, 1), (row_map, None), (weights, None)], {}, True),
    }


def packed_products() -> dict[str, Case]:
    """Products whose rows are in groups, and the loss with its output layer."""
    torch.manual_seed(1)
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    x, up, bias = torch.randn(8, 16), torch.randn(12, 16), torch.randn(12)
    experts, target = torch.randn(2, 12, 16), torch.randint(12, (8,))
    total = {"reduction": "sum"}
    packing = [(torch.tensor(ends), None) for ends in ([0, 2, 6], [0, 3, 5])]
    offsets = (torch.tensor([2, 5]), None)
    return {
        "attention_varlen/heads": ([(q, 1), (k, 1), (v, 1), *packing], {"causal": True}, False),
        "grouped_linear/column": ([(x, None), (experts, 1), offsets], {}, False),
        "grouped_linear/row": ([(x, 1), (experts, 2), offsets], {}, False),
        "linear_cross_entropy/sum": ([(x, 0), (up, None), (target, 0), (bias, None)], total, False),
        "linear_cross_entropy/mean": ([(x, 0), (up, None), (target, 0)], {}, False),
    }


def leaf(value: Tensor) -> Tensor:
    """A leaf of its own."""
    return value.detach().clone().requires_grad_(value.is_floating_point())


def full(value: Any) -> Any:
    """The whole tensor behind a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def run(call: Callable[[Any], Any], args: list[Tensor], float_args: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients of a weighted sum, whole."""
    outputs = tensors(call(args))
    total: Any = 0
    for y in outputs:
        total = total + (y * y).sum()
    grads = torch.autograd.grad(total, float_args)
    return [full(t).detach() for t in (*outputs, *grads)]


def check(name: str, case: Case, mesh: DeviceMesh, home: Any) -> str:
    """Empty, or what differs between sharded and whole."""
    given, attrs, exact = case
    operator = getattr(home, name)
    differentiable = SPECS[name].differentiable
    names = [a.name for a in torch._C.parse_schema(f"x::y{SPECS[name].signature}").arguments]
    places = [i for i in range(len(given)) if names[i] in differentiable]
    whole = [leaf(t) if i in places else t for i, (t, _) in enumerate(given)]
    split = []
    for i, (t, dim) in enumerate(given):
        placed = distribute_tensor(t.detach(), mesh, [Replicate() if dim is None else Shard(dim)])
        split.append(placed.requires_grad_() if i in places else placed)
    want = run(lambda args: operator(*args, **attrs), whole, [whole[i] for i in places])
    got = run(lambda args: operator(*args, **attrs), split, [split[i] for i in places])
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        # A sum over ranks, or another number of rows per product, is another order of float32
        # additions: some tens of roundings of the largest term.
        loose = not exact or index >= len(got) - len(places)
        near = torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
        if one.shape != other.shape or not (near if loose else torch.equal(one, other)):
            return f"result {index}: {one.flatten()[:4]} instead of {other.flatten()[:4]}"
    return ""


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """Operators without a sharding rule: empty when refused by name, and nothing was written."""
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    norm = distribute_tensor(torch.tensor(4.0), mesh, [Replicate()])
    rng = distribute_tensor(torch.tensor([1, 2]), mesh, [Replicate()])
    weight = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    heads = distribute_tensor(torch.ones(2, 3, 2, 4), mesh, [Shard(0)])
    calls: dict[str, Callable[[], Any]] = {
        "dropout": lambda: ops.dropout(x, rng),
        "bias_dropout_add": lambda: ops.bias_dropout_add(x, x, rng),
        "dropout_add_rms_norm": lambda: ops.dropout_add_rms_norm(x, x, weight, rng),
        "dropout_add_layer_norm": lambda: ops.dropout_add_layer_norm(x, x, weight, rng),
        "attention_dropout": lambda: ops.attention_dropout(heads, heads, heads, rng),
        "clip": lambda: ops.clip([x], norm), "l2_norm": lambda: ops.l2_norm([x]),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[f"refused/{name}"] = "not refused"
        except Exception as error:
            text = str(error)
            clear = f"anychip.{name}" in text and ("dropout" not in name or "needs" in text)
            found[f"refused/{name}"] = "" if clear else f"unclear: {text}"
        if not torch.equal(x.to_local(), torch.ones(4, 4)):
            found[f"refused/{name}"] = "something was written"
    return found


def main(rank: int, world: int, folder: Path, labels: Collection[str]) -> None:
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, str] = {}
    with installation() as install:
        install(spies())
        for label, case in cases().items():
            for door, home in (("short cut", ops), ("library", torch.ops.anychip)):
                if f"{label}/{door}" not in labels:
                    continue
                try:
                    found[f"{label}/{door}"] = check(label.partition("/")[0], case, mesh, home)
                except Exception as error:
                    found[f"{label}/{door}"] = f"{type(error).__name__}: {error}"
        found |= {label: said for label, said in refused(mesh).items() if label in labels}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert anychip.use("cpu")
    world = int(sys.argv[1])
    rank = next((number for number in range(1, world) if os.fork() == 0), 0)
    main(rank, world, Path(sys.argv[2]), json.loads(sys.argv[3]))
    while rank == 0 and world > 1:
        assert os.wait()[1] == 0
        world -= 1
