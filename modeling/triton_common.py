"""What the kernel files share: how tiles of query rows stand in the sequence, descriptors, launch sizes, limits.

A program works on `TILE_Q` neighbouring queries times the `GROUP` heads of one KV head: row `r` of its `BLOCK_M` rows
is head `r % GROUP` of query `r // GROUP`. Keys and values come through tensor descriptors, which fill what lies past
their end with zeros. Logits and log-sum-exps stay in base 2 between kernels: each change of base would round the
exponent that the backward pass starts from.
"""

from collections.abc import Callable

import torch


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError(
        "The Triton kernels need triton 3.6 or newer (`pip install 'triton>=3.6'`, Linux); without it use "
        "backend='reference' or 'auto'."
    ) from error

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Second dimension of a grid, at most.
MOST_GRID_ROWS = 65535

# Two copies of the model code may be loaded at once (the package and a checkpoint's); their operations must not meet.
OP_NAMESPACE = __name__.rpartition(".")[0].replace(".", "_") or "hysparse"

# Below every logit and above -inf: a running maximum that starts here never meets `-inf - -inf`.
LOWEST = tl.constexpr(-1.0e30)

KERNEL_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def query_rows(tile, q_len, TILE_Q: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Query step, head in the group, and validity of each row of a tile."""
    rows = tl.arange(0, BLOCK_M)
    steps = tile * TILE_Q + rows // GROUP
    return steps, rows % GROUP, (rows // GROUP < TILE_Q) & (steps < q_len)


@triton.jit
def query_places(
    start_ptr,
    first_ptr,
    stride_fb,
    stride_fm,
    batch,
    steps,
    valid,
    gap,
    HAS_START: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """Column that each query owns (-1 for an invalid row) and the first one that it sees; `gap` is kv_len - q_len."""
    if HAS_START:
        start = tl.load(start_ptr + batch).to(tl.int32)
    else:
        start = gap
    owned = tl.where(valid, start + steps, -1)
    first = tl.zeros_like(owned)
    if HAS_FIRST:
        offsets = batch.to(tl.int64) * stride_fb + steps.to(tl.int64) * stride_fm
        first = tl.load(first_ptr + offsets, mask=valid, other=0).to(tl.int32)
    return owned, first


@triton.jit
def load_rows(base_ptr, steps, heads, valid, stride_h, stride_m, stride_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load `(rows, BLOCK_D)` for pairs of query step and head; zero where a row or a dimension does not exist.

    `valid` None promises that every row exists, and saves its part of the mask.
    """
    dims = tl.arange(0, BLOCK_D)
    offsets = heads.to(tl.int64) * stride_h + steps.to(tl.int64) * stride_m
    mask = None
    if valid is not None:
        mask = valid[:, None]
        if DIM != BLOCK_D:
            mask = mask & (dims < DIM)[None, :]
    elif DIM != BLOCK_D:
        mask = (dims < DIM)[None, :]
    other = None
    if mask is not None:
        other = 0.0
    return tl.load(base_ptr + offsets[:, None] + dims[None, :] * stride_d, mask=mask, other=other)


@triton.jit
def store_rows(
    base_ptr, states, steps, heads, valid, stride_h, stride_m, stride_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store `(rows, BLOCK_D)` for pairs of query step and head."""
    dims = tl.arange(0, BLOCK_D)
    offsets = heads.to(tl.int64) * stride_h + steps.to(tl.int64) * stride_m
    mask = valid[:, None]
    if DIM != BLOCK_D:
        mask = mask & (dims < DIM)[None, :]
    pointers = base_ptr + offsets[:, None] + dims[None, :] * stride_d
    tl.store(pointers, states.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_keys(descriptor, batch, kv_head, column, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load `(BLOCK_N, BLOCK_D)` keys or values from `column` on."""
    return descriptor.load([batch, kv_head, column, 0]).reshape(BLOCK_N, BLOCK_D)


@triton.jit
def add_product(acc, a, b, one, PRECISION: tl.constexpr):
    """`acc + a @ b`. In float32 each tile is summed by itself first: one long chain of roundings would drift.

    `one` is 1.0, known at run time only; else the compiler would pull the accumulator into the product.
    """
    if PRECISION == "ieee":
        return acc + tl.dot(a, b, input_precision=PRECISION) * one
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def online_softmax(s, m_i, l_i, row_max, scale, on):
    """Take one tile of unscaled logits into the running maximum and mass of the rows where `on` holds (None: all).

    Returns its probabilities, the factor that earlier ones shrink by, and the new maximum and mass.
    """
    m_new = tl.maximum(m_i, row_max)
    shift = m_new
    if on is not None:
        m_new = tl.where(on, m_new, m_i)
        # Subtracting +inf turns a whole row off at no cost per element.
        shift = tl.where(on, m_new, float("inf"))
    p = tl.exp2(s * scale - shift[:, None])
    alpha = tl.exp2(m_i - m_new)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def finish_softmax(m_i, l_i, acc, sink_ptr, heads, valid, HAS_SINK: tl.constexpr):
    """Output rows and their log-sum-exp in base 2, without the sink; a row without keys gives 0 and -inf."""
    empty = l_i == 0
    lse = m_i + tl.log2(tl.where(empty, 1.0, l_i))
    share = 1 / tl.where(empty, 1.0, l_i)
    if HAS_SINK:
        sink = tl.load(sink_ptr + heads, mask=valid, other=0.0).to(tl.float32) * KERNEL_LOG2E
        share = share / (1 + tl.exp2(sink - lse))
    return acc * share[:, None], tl.where(empty, -float("inf"), lse)


@triton.jit
def _row_terms_kernel(
    out_ptr,
    grad_ptr,
    lse_ptr,
    grad_lse_ptr,
    sink_ptr,
    terms_ptr,
    refine_ptr,
    stride_ob,
    stride_oh,
    stride_om,
    stride_od,
    stride_gb,
    stride_gh,
    stride_gm,
    stride_gd,
    HEADS,
    q_len,
    V_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    REFINES: tl.constexpr,
):
    """Per query and head: total log-sum-exp in base 2, and the term of the softmax gradient."""
    batch = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    steps = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = tl.full((BLOCK_M,), 0, tl.int32) + head
    valid = steps < q_len
    out_base = out_ptr + batch.to(tl.int64) * stride_ob
    grad_base = grad_ptr + batch.to(tl.int64) * stride_gb
    out = load_rows(out_base, steps, heads, valid, stride_oh, stride_om, stride_od, V_DIM, BLOCK_DV).to(tl.float32)
    grad = load_rows(grad_base, steps, heads, valid, stride_gh, stride_gm, stride_gd, V_DIM, BLOCK_DV).to(tl.float32)
    delta = tl.sum(out * grad, 1)
    place = tl.program_id(1).to(tl.int64) * q_len + steps
    lse = tl.load(lse_ptr + place, mask=valid, other=-float("inf"))
    empty = lse == -float("inf")
    safe = tl.where(empty, 0.0, lse)
    total = safe
    if HAS_SINK:
        sink = tl.load(sink_ptr + head).to(tl.float32) * KERNEL_LOG2E
        total = tl.maximum(safe, sink) + tl.log2(1 + tl.exp2(-tl.abs(safe - sink)))
    of_lse = tl.zeros((BLOCK_M,), tl.float32)
    if HAS_GRAD_LSE:
        # The lse leaves the sink out, so its gradient meets probabilities larger by exp(total - lse).
        grad_lse = tl.load(grad_lse_ptr + place, mask=valid, other=0.0) * KERNEL_LOG2E
        of_lse = tl.where(empty, 0.0, grad_lse * tl.exp2(total - safe))
    if REFINES:
        tl.store(refine_ptr + place, of_lse, mask=valid)
    tl.store(terms_ptr + place * 2, tl.where(empty, float("inf"), total), mask=valid)
    tl.store(terms_ptr + place * 2 + 1, delta - of_lse, mask=valid)


def row_terms(
    output: torch.Tensor,
    grad_output: torch.Tensor,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What every backward pass needs per row; `lse` and its gradient are in base 2.

    Returns:
        `(terms, refine)`: terms `(batch, heads, q_len, 2)`, side by side, so that one load brings both: the
        log-sum-exp with sink in base 2, +inf for a row without keys; and the term subtracted from each probability's
        gradient. In float32 also what the lse's gradient gave of the latter, `(batch, heads, q_len)`, for
        `finish_dq` to refine both.
    """
    batch, heads, q_len, dim = output.shape
    terms = torch.empty((batch, heads, q_len, 2), dtype=torch.float32, device=output.device)
    refine = torch.empty_like(lse) if output.dtype == torch.float32 else None
    block_dv = padded_dim(dim)
    with torch.cuda.device_of(output):
        _row_terms_kernel[(cdiv(q_len, 64), batch * heads)](
            output,
            grad_output,
            lse,
            grad_lse.contiguous() if grad_lse is not None else None,
            sink,
            terms,
            refine,
            *output.stride(),
            *grad_output.stride(),
            heads,
            q_len,
            V_DIM=dim,
            BLOCK_DV=block_dv,
            BLOCK_M=64,
            HAS_SINK=sink is not None,
            HAS_GRAD_LSE=grad_lse is not None,
            REFINES=refine is not None,
            num_warps=4,
            enable_fp_fusion=may_fuse(output),
        )
    return terms, refine


@triton.jit
def load_terms(terms_ptr, row, valid):
    """Both terms of each row; a row that is not `valid` has +inf for its log-sum-exp and so no probability."""
    total, delta = tl.split(tl.load(terms_ptr + row[:, None] * 2 + tl.arange(0, 2)[None, :], valid[:, None], 0.0))
    return tl.where(valid, total, float("inf")), delta


@triton.jit
def store_sink_term(sink_ptr, term_ptr, row, heads, valid, total, exact):
    """Store what a row adds to the gradient of its head's sink; `exact` is the row's output times its gradient."""
    sink = tl.load(sink_ptr + heads, mask=valid, other=0.0).to(tl.float32) * KERNEL_LOG2E
    tl.store(term_ptr + row, -tl.exp2(sink - total) * exact, mask=valid)


def sink_gradient(terms: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Gradient of `sink` from the rows' terms; empty without one."""
    return terms.new_empty(0) if sink is None else terms.sum((0, 2)).to(sink.dtype)


def cdiv(length: int, size: int) -> int:
    """How many parts of `size` hold `length`. Triton's own function takes microseconds, at every launch."""
    return -(-length // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, which is positive; see `cdiv`."""
    return 1 << (n - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Width of the tile that holds `dim` columns: a power of two, and at least what a matrix product takes."""
    return max(16, next_power_of_2(dim))


def key_descriptor(states: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Describe keys or values `(batch, kv_heads, kv_len, dim)` for loads of `block_n` rows.

    States that the copy engine cannot address (a last dimension that is not dense; a width, strides or a beginning
    that 16 bytes do not divide) are copied once.
    """
    unit = 16 // states.element_size()
    if states.shape[-1] % unit:
        states = torch.nn.functional.pad(states, (0, -states.shape[-1] % unit))
    dense = (
        states.shape[1] * states.shape[2] * states.shape[3],
        states.shape[2] * states.shape[3],
        states.shape[3],
        1,
    )
    strides = [s if n > 1 else d for n, s, d in zip(states.shape, states.stride(), dense, strict=True)]
    fits = strides[-1] == 1 and all(s > 0 and s % unit == 0 for s in strides[:-1]) and states.data_ptr() % 16 == 0
    if not fits:
        # A dense tensor that begins between two multiples of 16 bytes must be copied too.
        states, strides = states.clone(memory_format=torch.contiguous_format), list(dense)
    return TensorDescriptor(states, list(states.shape), strides, [1, 1, block_n, padded_dim(states.shape[-1])])


def tile_rows(q_len: int, group: int, most: int, most_queries: int | None = None) -> tuple[int, int]:
    """`(BLOCK_M, TILE_Q)`: rows per program, at most `most` unless one query's group is larger, and its queries."""
    block_m = min(most, max(16, next_power_of_2(q_len * group)))
    block_m = max(block_m, next_power_of_2(group))
    queries = block_m // group
    if most_queries is not None and queries > most_queries:
        queries = most_queries
        block_m = max(16, next_power_of_2(queries * group))
    return block_m, queries


# Who may replace an entry of a launch table before it is read; see `triton_autotune`.
_TUNERS: list[Callable[[dict, tuple[int, int], torch.Tensor, torch.Tensor], None]] = []


def use_tuner(tuner: Callable[[dict, tuple[int, int], torch.Tensor, torch.Tensor], None]) -> None:
    """Call `tuner(table, key, query, value)` before an entry of a launch table is read."""
    _TUNERS[:] = [tuner]


def launch_sizes(table: dict, query: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """Entry of a launch table keyed by bytes per element and the widest padded head dimension that it serves."""
    dim = max(padded_dim(query.shape[-1]), padded_dim(value.shape[-1]))
    key = next(key for key in table if key[0] == query.element_size() and dim <= key[1])
    for tuner in _TUNERS:
        tuner(table, key, query, value)
    return table[key]


def precision_of(states: torch.Tensor) -> str:
    """Arithmetic of matrix products: float32 inputs keep float32, not the matrix units' shorter format."""
    return "ieee" if states.dtype == torch.float32 else "tf32"


def may_fuse(states: torch.Tensor) -> bool:
    """Whether products and sums may share a rounding; in float32 that rounds a logit and its maximum differently."""
    return states.dtype != torch.float32


def new_output(query: torch.Tensor, dim: int) -> torch.Tensor:
    """Uninitialised `(batch, heads, q_len, dim)` in the memory order that the output projection reads."""
    batch, heads, q_len, _ = query.shape
    return torch.empty((batch, q_len, heads, dim), dtype=query.dtype, device=query.device).transpose(1, 2)


def named_strides(name: str, states: torch.Tensor) -> dict:
    """Kernel arguments `stride_<name>b` and so on."""
    return {f"stride_{name}{axis}": stride for axis, stride in zip("bhmd", states.stride(), strict=True)}


def row_arguments(query_start: torch.Tensor | None, first_key: torch.Tensor | None, batch: int, q_len: int) -> dict:
    """Kernel arguments that describe `Rows`."""
    first = first_key.expand(batch, q_len) if first_key is not None else None
    return {
        "start_ptr": query_start,
        "first_ptr": first,
        "stride_fb": first.stride(0) if first is not None else 0,
        "stride_fm": first.stride(1) if first is not None else 0,
        "HAS_START": query_start is not None,
        "HAS_FIRST": first is not None,
    }


def refuse(rule: str | None) -> None:
    """Raise NotImplementedError where a call breaks a rule of the kernels; `rule` says it, and what came."""
    if rule is not None:
        raise NotImplementedError(f"the Triton kernels take {rule}; use backend='reference'.")


def check_supported(query, key, value, *, scaling, rows, return_weights=False) -> None:
    """Raise NotImplementedError for a call that no kernel here takes; it runs at every call of a decode step."""
    dims = query.shape[-1], value.shape[-1]
    kinds = query.dtype, key.dtype, value.dtype
    rule = None
    if not query.is_cuda and not (query.is_cpu and is_interpreted()):
        rule = f"tensors on a CUDA device, got {query.device}"
    elif kinds[0] not in DTYPES or kinds.count(kinds[0]) < 3:
        rule = f"one of {DTYPES} for query, key and value, got {kinds}"
    elif max(dims) > 256:
        rule = f"head dimensions up to 256, got {dims}"
    elif query.shape[1] > 64 * key.shape[1]:
        rule = f"at most 64 heads per KV head, got {query.shape[1] // key.shape[1]}"
    elif query.shape[0] * query.shape[1] > MOST_GRID_ROWS:
        rule = f"at most {MOST_GRID_ROWS} heads in all rows, got {query.shape[0] * query.shape[1]}"
    elif not scaling > 0:
        rule = f"a positive `scaling`, got {scaling}"
    elif rows.visibility is not None or rows.query_columns is not None:
        rule = "`rows` without `visibility` and `query_columns`"
    elif return_weights:
        rule = "`return_weights=False`"
    refuse(rule)


def check_block_size(block_size: int) -> None:
    """Raise NotImplementedError for a block size that no kernel here takes."""
    if not 16 <= block_size <= 1024 or block_size & (block_size - 1):
        raise NotImplementedError(
            f"the Triton kernels take a `block_size` that is a power of two from 16 to 1024, got {block_size}; use "
            "backend='reference'."
        )


def is_interpreted() -> bool:
    """Whether kernels run in triton's interpreter, which takes tensors on the CPU."""
    return not isinstance(_row_terms_kernel, triton.runtime.JITFunction)
