"""What torch's users do with a device, on a chip that is a C library.

Asked by ``test_chips.py`` in a process per chip, since torch has one private-use device type in
each. Run by hand: ANYCHIP_TEST_CHIP=./libacme.so pytest tests/integration/cabi/device_cases.py
"""

import copy
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from anychip.bench import chip as bench
from anychip.cabi import Library
from anychip.train.models import GPTConfig

CHIP = os.environ["ANYCHIP_TEST_CHIP"]


@pytest.fixture
def device(chip: Library) -> Iterator[torch.device]:
    chip.set_device(0)
    yield chip.device(0)
    chip.set_device(0)
    torch.set_autocast_enabled(chip.name, False)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.device.type != "cpu"
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


VIEWS = {
    "contiguous": lambda x: x, "transposed": lambda x: x.t(), "sliced": lambda x: x[1:, 2:5],
    "columns": lambda x: x[:, ::2], "expanded": lambda x: x[:1].expand(6, 8),
    "diagonal": lambda x: x.diagonal(), "empty": lambda x: x[:0], "scalar": lambda x: x[2, 3],
    "many_runs": lambda x: x.repeat(400, 1)[:, ::3],
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_copies_of_views_keep_all_bits(device: torch.device, view: str, dtype: torch.dtype) -> None:
    host = torch.arange(48).reshape(6, 8).sub(20).to(dtype)
    there = VIEWS[view](host.to(device))
    want = VIEWS[view](host)
    same(there, want)
    same(there.clone(), want)
    same(there.to(torch.float64), want.double())
    target = torch.zeros(48 * 400, 2, dtype=dtype)
    for place in (target, moved := target.to(device)):
        into = place[: want.numel(), 1].view(want.shape) if want.numel() else place[:0, 1]
        if want.numel():
            into.copy_(want)
    same(moved, target)


def test_complex_views_are_resolved_in_copies(device: torch.device) -> None:
    host = torch.tensor([1 + 2j, 3 - 4j])
    there = host.to(device)
    same(there.conj(), host.conj())
    same(torch.view_as_real(there), torch.view_as_real(host))
    same(there.conj().imag, host.conj().imag)
    there.conj().copy_(host)
    same(there, host.conj())


def test_in_place_and_out_forms_write_where_they_should(device: torch.device) -> None:
    host = torch.arange(12.0).reshape(3, 4)
    there = host.to(device)
    for x in (host, there):
        x[1:].add_(1).mul_(x[:1])
        x[:, ::2] += 3
        torch.sub(x, 1, out=x)
        x.t().div_(2)
    same(there, host)
    out = torch.empty(0, device=device)
    torch.add(there, there, out=out)
    same(out, host + host)


def test_storages_resize_and_share(device: torch.device) -> None:
    x = torch.arange(6.0, device=device)
    y = x.view(2, 3)
    x[0] = 9
    assert y[0, 0].item() == 9
    storage = x.untyped_storage()
    storage.resize_(8)
    assert storage.nbytes() == 8
    storage.resize_(64)
    assert x[:2].tolist() == [9, 1]
    z = torch.ones(2, device=device).resize_(3, 3)
    assert (z.shape, z.flatten()[:2].tolist()) == ((3, 3), [1, 1])
    w = torch.empty(0, device=device).set_(x.untyped_storage(), 1, (2,), (1,))
    assert w.data_ptr() == x.data_ptr() + 4
    assert torch.empty(3, device=device).set_().numel() == 0


def test_random_numbers_follow_the_devices_seed(chip: Library, device: torch.device) -> None:
    module, host_state = chip.device_module(), torch.get_rng_state()

    def draw() -> list[torch.Tensor]:
        coins = torch.bernoulli(torch.full((9,), 0.5, device=device))
        dropped = nn.functional.dropout(torch.ones(64, device=device))
        order = torch.randperm(9, device=device)
        return [torch.randn(8, device=device), coins, dropped, order]

    module.manual_seed(3)
    state, first = module.get_rng_state(), draw()
    second = draw()
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[2], second[2])
    module.set_rng_state(state)
    for got, want in zip(draw(), first, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(torch.get_rng_state(), host_state), "the host's own generator was used"
    own = [torch.rand(4, generator=chip.generator(5), device=device) for _ in range(2)]
    assert torch.equal(*own)
    copied = chip.generator(5)
    torch.rand(4, generator=copied, device=device)
    twins = [torch.rand(4, generator=g, device=device) for g in (copied.clone_state(), copied)]
    assert torch.equal(*twins)
    with torch.random.fork_rng([0], device_type=chip.name):
        module.manual_seed(4)
    module.set_rng_state(state)
    assert torch.equal(draw()[0], first[0])


def test_saving_and_loading_keeps_devices_and_bits(chip: Library, device: torch.device) -> None:
    x = {"a": torch.randn(4, device=device), "b": torch.randn(2)}
    file = io.BytesIO()
    torch.save(x, file)
    for where, kind in ((None, chip.name), ("cpu", "cpu"), (f"{chip.name}:0", chip.name)):
        file.seek(0)
        found = torch.load(file, map_location=where, weights_only=True)
        assert found["a"].device.type == kind
        assert torch.equal(found["a"].cpu(), x["a"].cpu())
    assert copy.deepcopy(x["a"]).device == device


def test_autocast_lowers_products_and_widens_sums(chip: Library, device: torch.device) -> None:
    x = torch.randn(4, 4, device=device, requires_grad=True)
    with torch.autocast(chip.name, torch.bfloat16):
        product = x @ x
        assert product.dtype == torch.bfloat16
        assert nn.functional.linear(product, x).dtype == torch.bfloat16
        assert product.exp().dtype == torch.float32
        assert product.softmax(-1).dtype == torch.float32
        assert torch.sum(product, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert torch.addcmul(x, product, product).dtype == torch.float32
        assert torch.conv1d(x[None], x[:, :, None]).dtype == torch.bfloat16
    product.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("how", ["foreach", "fused", "for_loop"])
def test_training_a_layer_equals_the_host(device: torch.device, how: str) -> None:
    """Its loss: keys' biases have gradients of rounding alone, and AdamW makes steps of those."""
    torch.manual_seed(0)
    host = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    there, x = copy.deepcopy(host).to(device), torch.randn(2, 5, 16)
    losses = []
    for net, data in ((host, x), (there, x.to(device))):
        flags = {"foreach": how == "foreach", "fused": how == "fused"}
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **flags)
        for _ in range(4):
            optimizer.zero_grad()
            loss = (net(data) * data).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3] < losses[0] - 0.1
    torch.testing.assert_close(losses[4:], losses[:4], rtol=1e-5, atol=1e-6)


def test_tied_parameters_stay_tied_where_a_module_moves(device: torch.device) -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    net[1].weight = net[0].weight
    weight = net[0].weight
    net.to(device)
    assert net[1].weight is net[0].weight is weight
    assert weight.device == device
    assert net.cpu()[0].weight is weight


def test_second_device_has_its_own_memory_and_copies(chip: Library) -> None:
    if chip.device_count() < 2:
        pytest.skip("the chip has one device")
    first, second = chip.device(0), chip.device(1)
    before = chip.memory.stats(1).allocated
    x = torch.arange(1000.0, device=second)
    assert x.device == second
    assert chip.memory.stats(1).allocated >= before + 4000
    y = (x + 1).to(first)
    assert y.device == first
    same(y, torch.arange(1.0, 1001.0))
    with chip.device_module().device(1):
        assert torch.ones(2, device=chip.name).device == second
    with pytest.raises(RuntimeError, match=f"{chip.name} has devices 0 to 1, got 5"):
        torch.ones(2, device=f"{chip.name}:5")


def test_host_read_of_device_memory_dies(chip: Library, device: torch.device) -> None:
    code = (
        "import anychip, ctypes, sys\n"
        "chip = anychip.use(sys.argv[1])\n"
        "import torch\n"
        "ctypes.string_at(torch.ones(1000, device=chip.device()).data_ptr())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, CHIP], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV


def test_out_of_memory_names_the_numbers_and_leaves_the_device_usable(
    chip: Library, device: torch.device
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=f"{1 << 40} bytes were asked for on device 0"):
        torch.empty(1 << 40, dtype=torch.uint8, device=device)
    assert torch.ones(3, device=device).sum().item() == 3


def test_memory_is_cached_and_given_back(chip: Library, device: torch.device) -> None:
    chip.memory.empty_cache()
    start = chip.memory.stats()
    x = torch.empty(3 << 20, dtype=torch.uint8, device=device)
    address = x.data_ptr()
    del x
    assert chip.memory.stats().reserved >= start.reserved + (3 << 20)
    assert torch.empty(3 << 20, dtype=torch.uint8, device=device).data_ptr() == address
    chip.memory.empty_cache()
    assert chip.memory.stats().reserved <= start.reserved


def test_pinned_memory_and_loaders(device: torch.device) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.arange(5000.0).pin_memory()
    assert x.is_pinned()
    assert not torch.ones(3).is_pinned()
    y = x.to(device, non_blocking=True)
    back = torch.empty(5000, pin_memory=True)
    back.copy_(y + 1, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, x + 1)
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)
    assert [batch.to(device, non_blocking=True).sum().item() for (batch,) in loader] == [6, 22]


def test_threads_have_their_own_device_and_are_safe(chip: Library) -> None:
    all_run = threading.Barrier(8)

    def work(number: int) -> None:
        all_run.wait()
        place = chip.device(number % chip.device_count())
        w = torch.randn(16, 16, device=place, requires_grad=True)
        for _ in range(20):
            ((torch.ones(4, 16, device=place) @ w) * 2).sum().backward()
        assert w.grad is not None
        assert w.grad[0, 0].item() == 160, number

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_every_operator_on_the_host_is_counted(chip: Library, device: torch.device) -> None:
    chip.host_calls(reset=True)
    x = torch.ones(4, device=device)
    torch.linalg.solve(torch.eye(4, device=device), x)
    torch.erfinv(x)
    torch.conv1d(x[None, None], x[None, None, :2])
    counted = chip.host_calls(reset=True)
    assert counted["aten::erfinv.out"] == 1
    assert counted["aten::convolution_overrideable"] == 1
    assert any("linalg" in name for name in counted)
    assert not chip.host_calls()


def test_compiled_and_transformed_functions_give_the_same(
    chip: Library, device: torch.device
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).to(device)
    x = torch.randn(3, 8, device=device)
    compiled = torch.compile(net, backend=chip.compile_backend)
    torch.testing.assert_close(compiled(x), net(x))
    compiled(x).sum().backward()
    v = torch.arange(3.0, device=device)
    same(torch.func.grad(lambda t: (t * t).sum())(v), torch.tensor([0.0, 2.0, 4.0]))
    same(torch.vmap(torch.dot)(v.expand(2, 3), v.expand(2, 3)), torch.tensor([5.0, 5.0]))
    w = torch.randn(3, dtype=torch.double, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: (t.sin() * t).sum(), w)


def test_profiler_and_accelerator_know_the_device(chip: Library, device: torch.device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device(chip.name)
    assert torch.accelerator.device_count() == chip.device_count()
    with torch.profiler.profile(acc_events=True) as seen:  # else 2.11 warns of cycles
        torch.ones(3, device=device).erfinv()
    assert "aten::erfinv" in {event.key for event in seen.key_averages()}


def test_profile_has_operators_and_copies_with_their_bytes(
    chip: Library, device: torch.device
) -> None:
    x = torch.full((50, 20), 0.5, device=device)
    x.erfinv()
    with chip.profiling() as found:
        x.erfinv()
        x.erfinv().cpu()
        x.sum().item()
    spent = {(one.who, one.name): one for one in found}
    host, copy = spent["host", "aten::erfinv.out"], spent["copy", "to the host"]
    assert host.calls == 2
    assert host.nbytes == 2 * 3 * x.nbytes  # the argument, and `out` there and back
    assert 0 < host.copied_s < host.seconds
    assert (copy.calls, copy.nbytes, copy.copied_s) == (1, x.nbytes, copy.seconds)
    assert spent["copy", "of a number to the host"].nbytes == 4
    with chip.profiling() as found:
        pass
    x.erfinv()
    assert found == []


def test_bench_of_a_chip_splits_a_step_and_names_what_to_write(chip: Library) -> None:
    small = GPTConfig(layers=1, width=16, heads=2, context=8)
    report = bench.run(chip, rounds=1, progress=lambda _: None, model=small)
    times = {row.name: row.microseconds for row in report.rows}
    parts = [taken for name, taken in times.items() if name.startswith("- ")]
    assert len(parts) == 5
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(times["timed piece by piece"])
    kernels = [row for row in report.rows if "calls" in row.facts]
    gains = [row.facts["gain us"] for row in kernels]
    assert gains == sorted(gains, reverse=True)
    assert sum(row.microseconds for row in kernels) <= 1.01 * sum(parts)
    listed = [row.name for row in kernels if row.facts["can be listed"] == "yes"]
    assert [note.split(": ")[1].split()[0] for note in report.notes[:3]] == listed[:3]
