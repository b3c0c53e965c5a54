"""What the engine refuses, by CUDA's code and with the line, and what it lets through."""

import pytest

from tests.unit.cuda_emulator.programs import line_of, run

pytestmark = pytest.mark.grid

LIMITS = "9 cudaErrorInvalidConfiguration: invalid configuration argument: "
FAILED = "719 cudaErrorLaunchFailure: unspecified launch failure: "
INVALID = "1 cudaErrorInvalidValue: invalid argument: "

REFUSED = {
    "no blocks": LIMITS + "grid (0,1,1), block (32,1,1)",
    "no threads": LIMITS + "grid (1,1,1), block (32,0,1)",
    "1025 threads": LIMITS + "grid (1,1,1), block (1025,1,1)",
    "1056 threads": LIMITS + "grid (1,1,1), block (32,33,1)",
    "65 threads in z": LIMITS + "grid (1,1,1), block (1,1,65)",
    "65536 blocks in y": LIMITS + "grid (1,65536,1), block (1,1,1)",
    "65536 blocks in z": LIMITS + "grid (1,1,65536), block (1,1,1)",
    "too many blocks in x": LIMITS + "grid (2147483648,1,1), block (1,1,1)",
    "dynamic shared over": INVALID + "grid (1,1,1), block (32,1,1): expected at most 49152",
    "dynamic shared over allowed": INVALID + "grid (1,1,1), block (32,1,1): expected at most 65536",
    "attribute over": INVALID + "cudaFuncSetAttribute: expected attribute 8 with 0 to 232448 bytes",
    "parameters over": INVALID + "grid (1,1,1), block (1,1,1): expected at most 4096 bytes",
    "cooperative": "801 cudaErrorNotSupported: operation not supported: cooperative launch of 2",
    "other device": "101 cudaErrorInvalidDevice: invalid device ordinal: cudaSetDevice: expected",
}
ACCEPTED = {
    "static shared 48 KiB": "0", "dynamic shared 48 KiB": "0", "dynamic shared allowed": "0",
    "both shared": "0", "1024 threads": "0", "parameters 4096": "0", "sleep": "7",
    "absent sources": "-1 6 -1", "each thread once": " ".join(["1"] * 2 * 3 * 4 * 5 * 3 * 7),
    "host threads in turn": " ".join(["4"] * 64),
    "copies and fills": "1 2 3 4 9 9 9 9 1 2 3 4" + " 9" * 24,
    "early end": " ".join(["0", str(0xAAAAAAAA - 2**32)] * 32),
    "after a failure": " ".join(["0", str(0xAAAAAAAA - 2**32)] * 32), "last error": "101 101",
    "occupancy": "2 32 2",
}  # fmt: skip
"""What the scenario finds. A value that no lane gave is -1, in every bit: a NaN for floats. An odd
lane's ballot names the odd lanes, since the even ones ended."""
ORDERS = ("forward", "reverse", "random", "warp")


@pytest.mark.parametrize("scenario", REFUSED)
def test_what_the_device_refuses_is_refused_by_its_code(scenario: str) -> None:
    assert run("plain", "guards", scenario).output.startswith(REFUSED[scenario])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scenario", ACCEPTED)
def test_what_the_device_allows_gives_what_it_should(scenario: str, order: str) -> None:
    found = run("plain", "guards", scenario, order=order)
    assert found.output == f"0 cudaSuccess: {ACCEPTED[scenario]}"


def test_several_threads_of_the_host_run_each_block_once() -> None:
    found = run("plain", "guards", "each thread once", threads="3")
    assert found.output == f"0 cudaSuccess: {ACCEPTED['each thread once']}"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("scenario", "sentence", "markers"), [
    ("divergent barrier", "divergent __syncthreads: ", ["first barrier", "second barrier"]),
    ("deadlock", "deadlock in block (0,0,0), 0 of 64 threads have ended: 32 thread(s)",
     ["lanes that wait for the warp", "lanes that wait for the block"]),
    ("divergent warp operation", "divergent warp operation: ", ["even lanes", "odd lanes"]),
    ("overlapping masks", "divergent warp operation: ", ["seventeen lanes", "seventeen others"]),
    ("caller not in mask", "", ["not lane 31"]), ("width", "", ["width of five"]),
    ("static shared over", "", ["shared variable"]),
    ("both shared over", "", ["one variable too many"]),
    ("global store", "", ["store of global memory"]),
    ("global load", "", ["load of global memory"]),
    ("endless sleep", "", ["endless sleep"]),
], ids=lambda value: value if isinstance(value, str) and value.islower() else "")  # fmt: skip
def test_mistake_in_a_kernel_fails_and_names_its_lines(
    scenario: str, sentence: str, markers: list[str], order: str
) -> None:
    output = run("plain", "guards", scenario, order=order).output
    assert output.startswith(FAILED + sentence)
    for marker in markers:
        assert line_of("guards.cu", marker) in output


@pytest.mark.parametrize("order", ORDERS)
def test_active_mask_is_a_set_of_lanes_that_run_together(order: str) -> None:
    output = run("plain", "guards", "active mask", order=order).output
    mask = int(output.removeprefix("0 cudaSuccess: ")) & 0xFFFFFFFF
    branch = 0x22222222
    assert mask.bit_count() == (1 if order == "random" else 8)
    assert mask & ~branch == 0


@pytest.mark.parametrize(
    ("delayed", "kernel", "shape"), [("0", "1", "1"), ("1", "2", "1")], ids=["at once", "delayed"]
)
def test_error_appears_at_the_call_that_the_device_reports_it_at(
    delayed: str, kernel: str, shape: str
) -> None:
    """1: the launch; 2: the synchronization."""
    for scenario, where in (("when a kernel fails", kernel), ("when a shape is wrong", shape)):
        assert run("plain", "guards", scenario, delayed=delayed).output == f"0 cudaSuccess: {where}"


def numbers(scenario: str, **settings: str) -> list[int]:
    output = run("plain", "guards", scenario, **settings).output
    return [int(word) for word in output.removeprefix("0 cudaSuccess: ").split()]


def warps(threads: list[int]) -> list[int]:
    """The warps of threads that are numbered from 1, without repetitions in a row."""
    each = [(thread - 1) // 32 for thread in threads]
    return [warp for i, warp in enumerate(each) if i == 0 or warp != each[i - 1]]


ALL = list(range(1, 129))


@pytest.mark.parametrize(("order", "expected"), [("forward", ALL), ("reverse", ALL[::-1])])
def test_threads_in_a_fixed_order_run_warp_after_warp(order: str, expected: list[int]) -> None:
    found = numbers("order of threads", order=order)
    assert found[:128] == expected
    assert sorted(found[128:]) == ALL
    assert len(warps(found[128:])) == 4


def test_threads_in_order_random_run_in_any_order_that_the_seed_gives() -> None:
    first, second, again = (
        numbers("order of threads", order="random", seed=seed) for seed in "121"
    )
    assert first == again
    assert first != second
    assert sorted(first[:128]) == sorted(first[128:]) == ALL
    assert len(warps(first[:128])) > 8, "warps take turns"


def test_threads_in_order_warp_run_by_the_priorities_of_their_warps() -> None:
    seen = set()
    for seed in "1234":
        found = numbers("order of threads", order="warp", seed=seed)
        assert warps(found[:128]) == warps(found[128:])
        assert sorted(warps(found[:128])) == [0, 1, 2, 3]
        seen.add(tuple(warps(found[:128])))
    assert len(seen) > 1


@pytest.mark.parametrize("order", ORDERS)
def test_every_block_runs_once_in_its_order(order: str) -> None:
    found = numbers("order of blocks", order=order)
    blocks = list(range(1, 101))
    assert sorted(found[:100]) == blocks
    shuffled = found[:100] not in (blocks, blocks[::-1])
    assert shuffled == (order in ("random", "warp"))
    if not shuffled:
        assert found[:100] == (blocks if order == "forward" else blocks[::-1])


@pytest.mark.parametrize("delayed", ["0", "1"])
def test_queue_keeps_the_order_of_copies_fills_and_launches(delayed: str) -> None:
    found = run("plain", "guards", "copies and fills", delayed=delayed)
    assert found.output == f"0 cudaSuccess: {ACCEPTED['copies and fills']}"


def test_attributes_are_those_of_the_limits_and_the_settings() -> None:
    found = run("plain", "guards", "attributes", multiprocessors="7")
    assert found.output == "0 cudaSuccess: 7 32 1024 49152 232448"


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("order", "backward", "expected forward, reverse, random or warp, got 'backward'"),
    ("threads", "0", "expected a number from 1 to 256, got '0'"),
    ("seed", "one", "expected a number from 0 to 18446744073709551615, got 'one'"),
    ("delayed", "yes", "expected a number from 0 to 1, got 'yes'"),
])  # fmt: skip
def test_setting_that_is_none_is_an_error(name: str, value: str, expected: str) -> None:
    output = run("plain", "guards", "1024 threads", **{name: value}).output
    assert (
        output
        == f"999 cudaErrorUnknown: unknown error: ANYCHIP_EMULATOR_{name.upper()}: {expected}"
    )
