"""The native CPU kernels: raw addresses in, nothing out. Sources: csrc/cpu.

The equations are those of the operators' specs. A kernel takes the fields of its struct in
csrc/cpu/operators.h, in their order or by name; its ``__doc__`` lists them. Conventions of all:
  - An address is `tensor.data_ptr()`; 0 stands for an absent optional tensor, or for an output that
    is not needed.
  - Tensors are contiguous; sizes are element counts; `dtype` is FLOAT32, BFLOAT16 or FLOAT16.
  - Outputs must not overlap inputs, except where a tensor is updated in place.
  - The GIL is released. Small inputs (below 32768 elements) stay on the calling thread.
  - Importing needs torch to be imported already (ImportError): its OpenMP runtime is shared.
  - ValueError: a negative size, sizes of more than 2^47 elements, an unknown dtype, reduction,
    format or activation, a missing address, lists of unequal length, blocks outside of their
    output. IndexError, before anything is written: a row or a target that there is not.
  - Results are the same bits for every number of threads and every instruction set (but for the
    sign and payload of a NaN). The top of each file of csrc/cpu/kernels counts the roundings.
"""

from collections.abc import Callable

def __getattr__(name: str) -> Callable[..., None]:
    """A kernel; and the constants FLOAT32 ..., REDUCTION_NONE ..., INT8 ... and GELU ..."""

class Tensors:
    """A list of tensors: what is done to lists takes it, as an update rule takes an Update."""

    def __init__(self, tensors: list[int], numels: list[int], dtypes: list[int]) -> None: ...

class Update:
    """The lists and numbers of one step of an update rule.

    Every dtype is per tensor, so one list may mix them. The states are float32; a rule with one
    state or none is given empty lists. low_precision and low_dtypes: both empty, or as long as
    params; written with the new parameters as stored. lr, step, scale, clip, found_inf: addresses
    of 0-dim float32, of which scale, clip and found_inf may be 0. A rule writes nothing when
    found_inf is not 0, and counts the step otherwise.
    """

    def __init__(
        self,
        *,
        params: list[int],
        grads: list[int],
        first_states: list[int],
        second_states: list[int],
        low_precision: list[int],
        numels: list[int],
        param_dtypes: list[int],
        grad_dtypes: list[int],
        low_dtypes: list[int],
        lr: int,
        step: int,
        scale: int,
        clip: int,
        found_inf: int,
        first_scales: list[int] = ...,
        second_scales: list[int] = ...,
    ) -> None: ...

def philox(seed: int, offset: int, nwords: int) -> list[int]:
    """The first nwords 32-bit words of Philox4x32-10, key = seed, counter from offset on."""

def is_permutation(index: int, count: int) -> bool:
    """Whether the int64 numbers at an address are those from 0 to count - 1, each once."""

def set_isa(name: str) -> None:
    """Use "baseline", "avx2" or "avx512" from now on, for tests.

    Raises ValueError for any other name, and for one that this machine cannot run.
    """

def set_last_cache(nbytes: int) -> None:
    """Size of the last cache from now on, for tests; -1: the machine's.

    Calls that read and write more than three quarters of it store some results past the caches.
    """

def available_isas() -> list[str]:
    """Instruction sets that are compiled in and that this machine has, slowest first."""

def num_threads() -> int:
    """Threads that a kernel called from this thread may use: torch.get_num_threads()."""

def openmp_status() -> tuple[bool, str]:
    """Whether the kernels run on torch's OpenMP runtime, and a sentence that says so or why not."""

def build_info() -> dict[str, str]:
    """How it was built and what is in use.

    Keys: version (of the sources), abi (of these signatures), compiler, flags, isas_compiled
    (separated by spaces), isa (in use), openmp (path of the runtime in use, or "").
    """
