"""The first call of a process, which is when backends are found, is already right."""

import subprocess
import sys

import pytest

from tests import warm_python

START = """
import torch, anychip
from anychip import ops
x, w = torch.ones(2, 8), torch.ones(3, 8)
"""
FIRST = {
    "autocast": """
with torch.autocast("cpu"):
    print(ops.linear(x, w).dtype)
""",
    "autocast through the library": """
with torch.autocast("cpu"):
    print(torch.ops.anychip.linear(x, w).dtype)
""",
    "compiled": """
f = torch.compile(ops.linear, backend="eager", fullgraph=True)
print((f(x.bfloat16(), w.bfloat16())).dtype)
""",
    "compiled with autocast": """
@torch.compile(backend="aot_eager", fullgraph=True)
def f(x, w):
    with torch.autocast("cpu"):
        return ops.linear(x, w)
print(f(x, w).dtype)
""",
    "unpickled": """
import pickle
print(pickle.loads(pickle.dumps(ops.linear))(x.bfloat16(), w.bfloat16()).dtype)
""",
    "policy": """
with anychip.policy(fallback="strict", pin={"linear": "cpu"}):
    print(ops.linear(x.bfloat16(), w.bfloat16()).dtype)
""",
    "thread": """
import threading
t = threading.Thread(target=lambda: print(ops.linear(x.bfloat16(), w.bfloat16()).dtype))
t.start()
t.join()
""",
}


@pytest.mark.grid
@pytest.mark.parametrize("label", FIRST)
def test_first_call_of_a_process_has_the_dtype_of_the_second(label: str) -> None:
    done = warm_python.run("-c", START + FIRST[label])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.bfloat16"]


def test_import_of_anychip_does_not_import_torch() -> None:
    code = "import sys, anychip; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False"]


def test_first_calls_of_training_do_not_import_torchs_symbolic_shapes() -> None:
    """They take a second of every process, and are needed for compiling alone."""
    code = """
import sys, torch, anychip
from anychip import ops
x, w, b = (torch.ones(*s, requires_grad=True) for s in ((4, 8), (6, 8), (6,)))
y = ops.layer_norm(ops.gelu(ops.linear(x, w, b)), b, b)
q = y.view(1, 1, 4, 6)
y = ops.softmax(ops.attention(q, q, q, causal=True)).view(4, 6)
y = ops.rms_norm(y + ops.embedding(torch.ones(4, dtype=torch.int64), y), b)
ops.cross_entropy(y, torch.ones(4, dtype=torch.int64)).sum().backward()
assert anychip.fuse
print(b.grad.shape, "sympy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[0] == "torch.Size([6]) False", done.stderr
