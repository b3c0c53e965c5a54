"""The native CPU kernels: raw addresses in, nothing out. Sources: csrc/cpu.

The equations are those of the operators' specs. Conventions of every kernel:
  - An address is `tensor.data_ptr()`; 0 stands for an absent optional tensor, or for an output that
    is not needed.
  - Tensors are contiguous; sizes are element counts; `dtype` is FLOAT32, BFLOAT16 or FLOAT16.
  - Outputs must not overlap inputs, except where a tensor is updated in place.
  - The GIL is released. Small inputs (below 32768 elements) stay on the calling thread.
  - Importing needs torch to be imported already (ImportError): its OpenMP runtime is shared.
  - ValueError: a negative size, sizes of more than 2^47 elements, an unknown dtype, reduction or
    format, a missing address, lists of unequal length, blocks outside of their output.
  - Results are the same bits for every number of threads and every instruction set (but for the
    sign and payload of a NaN). The top of each file of csrc/cpu/kernels counts the roundings.
"""

FLOAT32: int
BFLOAT16: int
FLOAT16: int
REDUCTION_NONE: int
REDUCTION_MEAN: int
REDUCTION_SUM: int
INT8: int
INT4: int
NF4: int
E4M3: int
E5M2: int
MX_E4M3: int
MX_E5M2: int
MX_E2M1: int

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
    rng: int = 0,
    p: float = 0.0,
    row_index: int = 0,
    width: int = 0,
) -> None:
    """dx like grad (0: not needed), dweight like weight (0: not needed).

    With dtotal, x is the total of the forward, and x, dtotal and dresidual (0: not needed) are of
    residual_dtype. dtotal is added to the gradient, which is rounded to both types. With rng, dx is
    dropped from as x was by dropout.
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
    rng: int = 0,
    p: float = 0.0,
    row_index: int = 0,
    width: int = 0,
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

def bias_dropout_add(
    x: int,
    residual: int,
    bias: int,
    y: int,
    rows: int,
    hidden: int,
    dtype: int,
    residual_dtype: int,
    bias_dtype: int,
    rng: int,
    p: float,
    row_index: int = 0,
    width: int = 0,
    column: int = 0,
) -> None:
    """y = residual + dropout(x + bias), like residual; bias: (hidden,), 0 for none."""

def bias_dropout_backward(
    grad: int,
    dx: int,
    dbias: int,
    rows: int,
    hidden: int,
    dtype: int,
    rng: int,
    p: float,
    row_index: int = 0,
    width: int = 0,
    column: int = 0,
) -> None:
    """dx like grad, dbias: (hidden,) float32; each 0 when not needed."""

def gelu_forward(x: int, y: int, numel: int, tanh: bool, dtype: int) -> None: ...
def gelu_backward(grad: int, x: int, dx: int, numel: int, tanh: bool, dtype: int) -> None: ...
def bias_gelu_forward(
    x: int, bias: int, y: int, rows: int, hidden: int, tanh: bool, dtype: int, bias_dtype: int
) -> None:
    """y = gelu(x + bias); bias: (hidden,)."""

def bias_gelu_backward(
    grad: int,
    x: int,
    bias: int,
    dx: int,
    dbias: int,
    rows: int,
    hidden: int,
    tanh: bool,
    dtype: int,
    bias_dtype: int,
) -> None:
    """dx like x, dbias like bias: each 0 when not needed."""

def geglu_forward(gate: int, up: int, y: int, numel: int, tanh: bool, dtype: int) -> None: ...
def geglu_backward(
    grad: int, gate: int, up: int, dgate: int, dup: int, numel: int, tanh: bool, dtype: int
) -> None:
    """dgate, dup: each 0 when not needed."""

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

def sum_rows(
    x: int,
    index: int,
    weights: int,
    y: int,
    rows: int,
    terms: int,
    x_rows: int,
    width: int,
    dtype: int,
    weight_dtype: int,
) -> None:
    """y[r] = sum over j of weights[r, j] x[index[r, j]].

    index: (rows, terms) int64, IndexError for one that is no row of x; weights: 0 for all 1.
    """

def sum_rows_by_index(
    x: int, index: int, y: int, rows: int, x_rows: int, width: int, dtype: int
) -> None:
    """y[r] is the sum of those x[i] that have index[i] = r; IndexError for others."""

def places_by_expert(
    experts: int, place: int, choice: int, ends: int, count: int, num_experts: int
) -> None:
    """Of each choice its place when they are sorted by expert, and of each place its choice.

    All int64; ends: (num_experts,), the number of choices of experts from 0 to each.
    """

def spread_rows(
    y: int,
    x: int,
    index: int,
    weights: int,
    dx: int,
    dweights: int,
    rows: int,
    terms: int,
    width: int,
    dtype: int,
    weight_dtype: int,
) -> None:
    """The gradients of sum_rows, y that of its y; dx and dweights may be 0: not wanted.

    index: as of sum_rows, each row of x once.
    """

def quantize(
    x: int,
    rng: int,
    codes: int,
    scales: int,
    numel: int,
    block: int,
    format: int,
    dtype: int,
) -> None:
    """format: INT8 ... MX_E2M1; scales: (blocks,) uint8 of an MX format, else float32.

    rng: int64 (seed, offset), of INT8 and INT4; 0 takes the nearest code.
    """

def dequantize(codes: int, scales: int, y: int, numel: int, block: int, format: int) -> None:
    """y: (numel,) float32; the rest as quantize writes it."""

def hadamard(x: int, y: int, numel: int, block: int, dtype: int) -> None:
    """Of whole blocks of a power of two."""

def top_k(x: int, y: int, indices: int, rows: int, width: int, count: int, dtype: int) -> None:
    """y: (rows, count); indices: the same of int64, into rows of width <= 2^32 elements."""

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

def adamw(update: Update, beta1: float, beta2: float, eps: float, weight_decay: float) -> None: ...
def adamw_8bit(update: Update, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """States are uint8 codes; first_scales, second_scales: float32, one per 256 elements."""

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
