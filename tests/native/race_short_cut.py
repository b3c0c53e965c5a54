"""Eight threads in the short cut of csrc/dispatch under ThreadSanitizer; no torch.

The module is built with -fsanitize=thread, and Python started with that runtime preloaded, which
sees the interpreter's lock and every access of the module. Tensors are objects of this file, known
to the module by the same interface as torch's: DLPack, descriptors and functions. Rows, checks and
the selection of rows give the lock up and change under way.

    python race_short_cut.py MODULE_FILE
"""

import ctypes
import importlib.util
import itertools
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

NUM_THREADS, NUM_CALLS = 8, 400


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
        ("code_bits_lanes", ctypes.c_uint32), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


TensorOf = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


class Exchange(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2), ("unused", ctypes.c_void_p * 4), ("tensor_of", TensorOf),
        ("stream", ctypes.c_void_p),
    ]  # fmt: skip


class Tensor:
    """A scalar: its address and dtype are numbers."""

    def __init__(self, address: int, bits: int) -> None:
        self.address, self.bits = address, bits

    def is_neg(self) -> bool:
        time.sleep(0)  # torch's gives the lock up
        return False

    device = property(lambda self: "host")
    requires_grad = property(lambda self: self.bits == 16)


@TensorOf
def tensor_of(tensor: Tensor, out: Any) -> int:
    seen = out[0]
    seen.data, seen.device[0], seen.ndim = tensor.address, 1, 0
    seen.code_bits_lanes = 2 | tensor.bits << 8
    return 0


def load(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("_native", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(x: Tensor, y: Tensor | None, *, eps: float = 0.0) -> Any:
    time.sleep(0)
    return x, y, eps


def choice(conditional: bool) -> SimpleNamespace:
    counters = itertools.count(), itertools.count()
    return SimpleNamespace(parts=(row, *counters, 7, conditional, False))


CHOICES = [choice(False), choice(True)]


class Kernel:
    def find(self, args: Any) -> Any:
        time.sleep(0)
        return SimpleNamespace(choices=(CHOICES[args[0].bits == 8],), pick=self.pick)

    def pick(self, spec: Any, args: Any, attrs: Any) -> Any:
        next(CHOICES[1].parts[1])
        return CHOICES[1]


def connect(module: Any) -> tuple[dict[str, Any], list[Any]]:
    """Objects in place of torch's; the module's view of them must stay alive."""
    exchange = Exchange(version=(1, 3), tensor_of=tensor_of)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )  # fmt: skip
    name = ctypes.c_char_p(b"dlpack_exchange_api")
    selection: dict[str, Any] = {"current": object()}
    module.connect(
        Tensor=Tensor, Parameter=Tensor, exchange=new(ctypes.addressof(exchange), name, None),
        dlpack_device=lambda tensor: (1, 0), device=Tensor.device,
        requires_grad=Tensor.requires_grad, is_neg=Tensor.is_neg, guards=(lambda: 0, lambda: None),
        compiler={"_is_compiling_flag": False}, forward_ad={"_current_level": -1},
        selection=selection, deterministic=lambda: False, grad_enabled=lambda: False,
        examined=lambda choice, args, attrs: choice.parts[0](*args, **attrs), refuse_end=None,
        run_written=None, apply=None, forward=None,
    )  # fmt: skip
    return selection, [exchange, name]


def main(file: str) -> int:
    module = load(file)
    selection, alive = connect(module)

    class Operator(module.ShortCut):  # type: ignore[misc,name-defined]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("left to Python")

        def outputs(self, results: Any) -> Any:
            return results

    operator = Operator()
    facts = {"eps": 0.0}, {"eps": float}, (None,), 2, 1, 2, False
    operator.prepare(Kernel(), lambda *_, **__: time.sleep(0), None, None, *facts)
    module.take_calls(Operator)
    wrong: list[Any] = []

    def work(number: int) -> None:
        for step in range(NUM_CALLS):
            x = Tensor(64 * (number + 1) + 4 * (step % 3), (8, 16, 32)[step % 3])
            found = operator(x, None, eps=float(step)) if step % 2 else operator(x)
            if found != (x, None, float(step) if step % 2 else 0.0):
                wrong.append(found)
            if step % 50 == number:
                selection["current"] = object()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(NUM_THREADS)]
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = sum(int(repr(c.parts[1])[6:-1]) for c in CHOICES)
    print(f"{calls} calls counted of {NUM_THREADS * NUM_CALLS}; {len(wrong)} wrong results")
    return int(bool(wrong) or calls != NUM_THREADS * NUM_CALLS or not alive)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
