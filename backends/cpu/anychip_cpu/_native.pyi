"""The native CPU kernels: raw addresses in, nothing out. Sources: csrc/cpu.

The equations are those of the operators' specs. Conventions of every kernel:
  - An address is `tensor.data_ptr()`; 0 stands for an absent optional tensor, or for an output that
    is not needed.
  - Tensors are contiguous; sizes are element counts; `dtype` is FLOAT32, BFLOAT16 or FLOAT16.
  - Outputs must not overlap inputs, except where a tensor is updated in place.
  - The GIL is released. Small inputs (below 32768 elements) stay on the calling thread.
  - Importing needs torch to be imported already (ImportError): its OpenMP runtime is shared.
  - ValueError: a negative size, sizes of more than 2^47 elements, an unknown dtype or reduction, a
    missing address, lists of unequal length, blocks outside of their output.
  - Results are the same bits for every number of threads and every instruction set (but for the
    sign and payload of a NaN). The top of each file of csrc/cpu/kernels counts the roundings.
"""

FLOAT32: int
BFLOAT16: int
FLOAT16: int
REDUCTION_NONE: int
REDUCTION_MEAN: int
REDUCTION_SUM: int

def rms_norm_forward(
    x: int,
    weight: int,
    y: int,
    rstd: int,
    rows: int,
    hidden: int,
    eps: float,
    dtype: int,
    weight_dtype: int,
    residual: int = 0,
    total: int = 0,
    residual_dtype: int = 0,
) -> None:
    """y = x * rstd * weight per row; rstd: (rows,) float32, 0 when not wanted.

    With a residual, total is written with x + residual, both of residual_dtype, and is normed.
    """

def rms_norm_backward(
    grad: int,
    x: int,
    weight: int,
    rstd: int,
    dx: int,
    dweight: int,
    rows: int,
    hidden: int,
    dtype: int,
    weight_dtype: int,
    dtotal: int = 0,
    dresidual: int = 0,
    residual_dtype: int = 0,
) -> None:
    """dx like grad (0: not needed), dweight like weight (0: not needed).

    With dtotal, x is the total of the forward, and x, dtotal and dresidual (0: not needed) are of
    residual_dtype. dtotal is added to the gradient, which is rounded to both types.
    """

def layer_norm_forward(
    x: int,
    weight: int,
    bias: int,
    y: int,
    mean: int,
    rstd: int,
    rows: int,
    hidden: int,
    eps: float,
    dtype: int,
    weight_dtype: int,
    residual: int = 0,
    total: int = 0,
    residual_dtype: int = 0,
) -> None:
    """bias: 0 or (hidden,) of weight_dtype; mean, rstd: (rows,) float32, 0 when not wanted.

    residual and total as in rms_norm_forward.
    """

def layer_norm_backward(
    grad: int,
    x: int,
    weight: int,
    mean: int,
    rstd: int,
    dx: int,
    dweight: int,
    dbias: int,
    rows: int,
    hidden: int,
    dtype: int,
    weight_dtype: int,
    dtotal: int = 0,
    dresidual: int = 0,
    residual_dtype: int = 0,
) -> None:
    """dx, dweight, dbias: each 0 when not needed; dtotal and dresidual as in rms_norm_backward."""

def dropout(
    x: int,
    rng: int,
    y: int,
    numel: int,
    p: float,
    dtype: int,
    row_index: int = 0,
    columns: int = 0,
    width: int = 0,
    column: int = 0,
) -> None:
    """Forward and, with x = grad and y = dx, backward. rng: address of int64[2] (seed, offset).

    row_index: 0, or of int64[numel / columns]: element j of row i has word row_index[i] * width +
    column + j.
    """

def gelu_forward(x: int, y: int, numel: int, tanh: bool, dtype: int) -> None: ...
def gelu_backward(grad: int, x: int, dx: int, numel: int, tanh: bool, dtype: int) -> None: ...
def swiglu_forward(gate: int, up: int, y: int, numel: int, dtype: int) -> None: ...
def swiglu_backward(
    grad: int, gate: int, up: int, dgate: int, dup: int, numel: int, dtype: int
) -> None:
    """dgate, dup: each 0 when not needed."""

def rope(
    q: int,
    k: int,
    cos: int,
    sin: int,
    q_out: int,
    k_out: int,
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool,
    inverse: bool,
    dtype: int,
) -> None:
    """q: (batch, seq, heads, head_dim), k: (batch, seq, kv_heads, head_dim).

    cos, sin: (seq, head_dim / 2) float32. inverse=True rotates by the negative angle (the backward:
    q, k = gradients). q and q_out, or k and k_out, may both be 0: that tensor is left out.
    """

def cross_entropy_forward(
    logits: int,
    target: int,
    loss: int,
    lse: int,
    rows: int,
    vocab: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    dtype: int,
) -> None:
    """target: (rows,) int64. loss: float32, one element, or (rows,) for REDUCTION_NONE.

    lse: (rows,) float32, 0 when not wanted. Raises IndexError, before anything is written, for a
    target outside [0, vocab) that is not ignore_index.
    """

def cross_entropy_backward(
    grad: int,
    logits: int,
    target: int,
    lse: int,
    dlogits: int,
    rows: int,
    vocab: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    dtype: int,
) -> None:
    """grad: float32, one element, or (rows,) for REDUCTION_NONE. IndexError as in the forward."""

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
    ) -> None: ...

def adamw(update: Update, beta1: float, beta2: float, eps: float, weight_decay: float) -> None: ...
def sgd(
    update: Update, momentum: float, nesterov: bool, weight_decay: float, decoupled: bool
) -> None: ...
def lion(update: Update, beta1: float, beta2: float, weight_decay: float) -> None: ...
def lamb(
    update: Update,
    trust: int,
    correction1: int,
    correction2: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """trust: one float32 per tensor. correction1, correction2: of 1 - beta^t, 0-dim float32."""

def lamb_sums_of_squares(
    update: Update,
    out: int,
    correction1: int,
    correction2: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Nothing of update is written, lr and found_inf are not read.

    out: (2, tensors, 21) int64.
    """

def sums_of_squares(tensors: list[int], numels: list[int], dtypes: list[int], out: int) -> None:
    """out: (tensors, 21) int64."""

def l2_norm(tensors: list[int], numels: list[int], dtypes: list[int], out: int) -> None:
    """out: address of one float32."""

def clip(
    tensors: list[int], numels: list[int], dtypes: list[int], norm: int, max_norm: float
) -> None:
    """In place; norm: address of one float32."""

def unscale_and_check(
    grads: list[int], numels: list[int], dtypes: list[int], scale: int, found_inf: int
) -> None:
    """In place. scale, found_inf: addresses of one float32; found_inf is set to 1, never to 0."""

def philox(seed: int, offset: int, nwords: int) -> list[int]:
    """The first nwords 32-bit words of Philox4x32-10, key = seed, counter from offset on."""

def set_isa(name: str) -> None:
    """Use "baseline", "avx2" or "avx512" from now on, for tests.

    Raises ValueError for any other name, and for one that this machine cannot run.
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
