"""What has nvcc made of the CUDA kernels? Read from the built module: no GPU, no driver.

A table of registers, stack, spills, shared memory, occupancy at the launch bound, accesses of 16
bytes and float64 instructions of every kernel. Exits with 1 when a kernel uses its stack or local
memory (a spill), has a float64 instruction and is none of IN_FLOAT64, fits less often on a
multiprocessor than it should, or is meant to move vectors and does not.

    python benchmarks/check_sass.py MODULE [--least-occupancy 0.25] [--json PATH] [--cuobjdump PATH]

cuobjdump and nvdisasm come with the CUDA toolkit, or from PyPI: nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm. Source: CUDA Binary Utilities; CUDA C++ Programming Guide, "Compute
Capabilities", table of technical specifications.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

REGISTERS, THREADS, BLOCKS = 65536, 2048, 32
"""Of a multiprocessor; the same from sm_80 to sm_90."""
SHARED_KIB = {"sm_80": 164, "sm_90": 228}
"""Of a multiprocessor; architectures that are not here are an error."""
REGISTERS_AT_ONCE, QUARTERS = 256, 4
"""What a warp's registers are rounded up to; the parts of a multiprocessor that share none."""

LOADS, STORES = "load", "store"
VECTORISED = {
    r"^columns_kernel<(?!1,).*\bSummands<": (LOADS,),  # only sums go out
    r"^(map|columns|flat|long_segments|segments)_kernel<(?!1,)": (LOADS, STORES),
    r"^norm_(forward|backward)_kernel<\w+, \w+, (?!1,)": (LOADS, STORES),
    r"^(update|adamw_8bit|clip|unscale)_kernel": (LOADS, STORES),
    r"^gather_kernel<uint4>": (LOADS, STORES),
    r"^backward_kernel<(?!\w+, 1,)": (LOADS, STORES),
    r"^(forward_kernel<(?!\w+, 1,)|chunk_norms_kernel|squares_kernel)": (LOADS,),
    r"^long_(forward|backward)_kernel": (LOADS, STORES),
    r"^channel_sums_kernel<\w+, (?!1>)": (LOADS,),
    r"^(quantize_vector_kernel|(largest|codes)_kernel<\w+, true>)": (LOADS,),  # 4 or 8 bits out
    r"^dequantize_kernel<true>": (STORES,),
    r"vector": (LOADS, STORES),
}
"""Which kernels are there for accesses of 16 bytes, and of which kind; the first that matches
counts. Where a template argument is the number of elements, 1 is the twin for unaligned arrays."""

IN_FLOAT64 = (r"^squares_kernel<", r"^ratios_kernel")
"""Kernels whose sums are of float64 on purpose: docs/design/cuda-kernels.md."""
IN_REGISTERS = {
    r"^hadamard_block_kernel<\w+, 16>": "a block of 32,768 numbers is 128 registers of each thread"
}
"""Kernels that hold so much that one block fills a multiprocessor: it is the bytes in flight that
hide the memory's latency, and these have as many as others with more warps."""

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]\s+)?([A-Z][A-Z0-9_.]+)")
FLOAT64 = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX|MMA)\b|(F2F|F2I|I2F|F2IP|FRND)\S*\.F64|MUFU\.\w+64H")
LOCAL = re.compile(r"(LDL|STL)\b")


class Usage(NamedTuple):
    """Registers per thread, and bytes of stack and of shared memory."""

    registers: int
    stack: int
    shared: int


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one kernel takes on one architecture. Accesses are counted as they stand in the code.

    ``max_threads`` is the launch bound; 1024 when the kernel has none.
    """

    architecture: str
    name: str
    registers: int
    stack: int
    local: int
    shared: int
    max_threads: int
    occupancy: float
    loads: int
    wide_loads: int
    stores: int
    wide_stores: int
    float64: int

    def problems(self, least_occupancy: float) -> list[str]:
        """What must not be, in words; empty for a kernel that is as it should be."""
        found = []
        if self.stack:
            found.append(f"{self.stack} bytes of stack")
        if self.local:
            found.append(f"{self.local} accesses of local memory")
        if self.float64 and not any(re.search(pattern, self.name) for pattern in IN_FLOAT64):
            found.append(f"{self.float64} float64 instructions")
        is_held = any(re.search(pattern, self.name) for pattern in IN_REGISTERS)
        if self.occupancy < least_occupancy and not is_held:
            found.append(f"occupancy {self.occupancy:.2f}, at least {least_occupancy} is expected")
        wide = {LOADS: self.wide_loads, STORES: self.wide_stores}
        rules = (kinds for pattern, kinds in VECTORISED.items() if re.search(pattern, self.name))
        found += [f"no {kind} of 16 bytes" for kind in next(rules, ()) if not wide[kind]]
        return found


def occupancy(architecture: str, usage: Usage, threads: int) -> float:
    """The part of a multiprocessor's warps that blocks of ``threads`` can have at once."""
    warps = -(-threads // 32)
    registers = -(-usage.registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    by_registers = REGISTERS // QUARTERS // registers * QUARTERS // warps
    by_shared = SHARED_KIB[architecture] * 1024 // max(usage.shared, 1)
    blocks = min(BLOCKS, THREADS // (warps * 32), by_registers, by_shared)
    return blocks * warps * 32 / THREADS


class Cuobjdump:
    """NVIDIA's reader of device code.

    Raises:
        FileNotFoundError: it is nowhere, or nvdisasm is not beside it; says what to install.
    """

    def __init__(self, path: str | None) -> None:
        found = path or shutil.which("cuobjdump") or in_wheels("cuobjdump")
        if found is None:
            raise FileNotFoundError(
                "no cuobjdump: install the CUDA toolkit, or pip install nvidia-cuda-cuobjdump"
                " nvidia-cuda-nvdisasm"
            )
        self.path = found
        self.environment = {
            **os.environ,
            "PATH": f"{Path(found).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [self.path, *words], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"cuobjdump {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout


def in_wheels(program: str) -> str | None:
    """The program as a wheel of NVIDIA's has it."""
    try:
        files = metadata.files(f"nvidia-cuda-{program}") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == program), None)


def architectures(dump: Cuobjdump, module: str) -> list[str]:
    """Those whose machine code is in the module; PTX alone does not count."""
    found = sorted(set(re.findall(r"\bsm_\d+[a-z]?\b", dump("-lelf", module))))
    unknown = [name for name in found if name not in SHARED_KIB]
    if unknown or not found:
        raise ValueError(f"expected code for some of {[*SHARED_KIB]}, got {found} in {module}")
    return found


def usages(text: str) -> dict[str, Usage]:
    """``cuobjdump -res-usage``, by mangled name."""
    found = {}
    for function, line in re.findall(r"Function (\S+?):\s*\n\s*(REG:.*)", text):
        numbers = {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)}
        found[function] = Usage(numbers["REG"], numbers["STACK"], numbers["SHARED"])
    return found


def launch_bounds(text: str) -> dict[str, int]:
    """``cuobjdump -elf``: EIATTR_MAX_THREADS of the kernels that have one."""
    found, function = {}, ""
    attribute = ""
    for line in text.splitlines():
        if line.startswith(".nv.info"):
            function = line.removeprefix(".nv.info").lstrip(".").strip()
        elif "Attribute:" in line:
            attribute = line.split()[-1]
        elif "Value:" in line and attribute == "EIATTR_MAX_THREADS":
            x, y, z = (int(word, 16) for word in line.split()[1:4])
            found[function] = x * y * z
    return found


def instructions(text: str) -> dict[str, Counter[str]]:
    """``cuobjdump -sass``: how often each instruction stands in each function."""
    found: dict[str, Counter[str]] = {}
    function = ""
    for line in text.splitlines():
        if "Function :" in line:
            function = line.split()[-1]
            found[function] = Counter()
        elif match := INSTRUCTION.search(line):
            found[function][match[1]] += 1
    return found


def demangled(names: Iterable[str]) -> dict[str, str]:
    """Without parameters and namespaces of ours, which every kernel has."""
    mangled = list(names)
    done = subprocess.run(
        ["c++filt"], input="\n".join(mangled), check=True, capture_output=True, text=True
    )
    return {
        name: re.sub(r"\(anonymous namespace\)::|anychip::cuda::|^void ", "", line)
        .replace("__nv_", "")
        .replace("__half", "half")
        .partition("(")[0]
        for name, line in zip(mangled, done.stdout.splitlines(), strict=True)
    }


def read(dump: Cuobjdump, module: str) -> Iterator[Kernel]:
    """Every kernel of the module on every architecture."""
    for architecture in architectures(dump, module):
        only = ("-arch", architecture, module)
        usage = usages(dump("-res-usage", *only))
        bounds, counts = launch_bounds(dump("-elf", *only)), instructions(dump("-sass", *only))
        names = demangled(sorted(usage.keys() & counts.keys()))
        for function, name in sorted(names.items(), key=lambda item: item[1]):
            count, threads = counts[function], bounds.get(function, 1024)

            def number(pattern: str | re.Pattern[str], count: Counter[str] = count) -> int:
                return sum(n for word, n in count.items() if re.match(pattern, word))

            yield Kernel(
                architecture=architecture,
                name=name,
                **usage[function]._asdict(),
                local=number(LOCAL),
                max_threads=threads,
                occupancy=occupancy(architecture, usage[function], threads),
                loads=number(r"LDG\b"),
                wide_loads=number(r"LDG\.\S*128"),
                stores=number(r"STG\b"),
                wide_stores=number(r"STG\.\S*128"),
                float64=number(FLOAT64),
            )


def table(kernels: list[Kernel], least_occupancy: float) -> Table:
    """One row per kernel; what is wrong stands at its end."""
    columns = Table(title="machine code of the kernels", show_edge=False)
    columns.add_column("kernel", overflow="fold")
    for heading in "arch,reg,stack,local,shared,threads,occ,LDG 128/all,STG 128/all,f64".split(","):
        columns.add_column(heading, justify="right")
    columns.add_column("wrong", style="red")
    for kernel in kernels:
        columns.add_row(
            kernel.name,
            kernel.architecture,
            *map(str, (kernel.registers, kernel.stack, kernel.local, kernel.shared)),
            str(kernel.max_threads),
            f"{kernel.occupancy:.2f}",
            f"{kernel.wide_loads}/{kernel.loads}",
            f"{kernel.wide_stores}/{kernel.stores}",
            str(kernel.float64),
            "; ".join(kernel.problems(least_occupancy)),
        )
    return columns


def main() -> int:
    """The command line; 1 when a kernel is not as it should be, 2 when nothing can be read."""
    parser = argparse.ArgumentParser(prog="check_sass", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("module", help="_cuda*.so, or any file with device code")
    parser.add_argument("--least-occupancy", type=float, default=0.25, metavar="PART")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the same figures as JSON")
    parser.add_argument("--cuobjdump", metavar="PATH", help="the program; found by itself")
    given = parser.parse_args()
    try:
        kernels = list(read(Cuobjdump(given.cuobjdump), given.module))
    except (FileNotFoundError, RuntimeError, ValueError) as error:
        print(f"check_sass: {error}", file=sys.stderr)
        return 2
    if given.json:
        rows = [
            {**asdict(kernel), "problems": kernel.problems(given.least_occupancy)}
            for kernel in kernels
        ]
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=None if sys.stdout.isatty() else 180).print(table(kernels, given.least_occupancy))
    wrong = {kernel: kernel.problems(given.least_occupancy) for kernel in kernels}
    wrong = {kernel: problems for kernel, problems in wrong.items() if problems}
    for kernel, problems in wrong.items():
        print(f"{kernel.architecture} {kernel.name}: {'; '.join(problems)}")
    print(f"{len(kernels)} kernels, {len(wrong)} not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
