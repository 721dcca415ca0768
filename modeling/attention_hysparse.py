"""Public operations of attention: check the arguments once, then call a back end (see `dispatch_hysparse`).

All take tensors of layout `(batch, heads, length, head_dim)`.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from .attention_checks_hysparse import (
    check_at_least,
    check_choice,
    check_gates,
    check_indices,
    check_second_branch,
    check_states,
    checked_rows,
    checked_sink,
    scaling_or_default,
)
from .dispatch_hysparse import BACKENDS, Operations, resolve_backend
from .reference_hysparse import block_sparse_attention as block_sparse_reference
from .reference_hysparse import full_attention_with_oracle as full_attention_reference
from .reference_hysparse import full_attention_with_token_oracle as token_oracle_reference
from .reference_hysparse import sliding_window_attention as sliding_window_reference
from .reference_hysparse import sparse_layer_attention as sparse_layer_reference
from .reference_hysparse import token_sparse_attention as token_sparse_reference
from .rows_hysparse import Rows


def _load_kernels() -> dict[str, Callable[..., tuple]]:
    from .triton_block_sparse import block_sparse_attention, selection_layouts
    from .triton_full_attention import full_attention_with_oracle
    from .triton_sliding_window import sliding_window_attention
    from .triton_sparse_layer import sparse_layer_attention

    if os.environ.get("HYSPARSE_AUTOTUNE", "") not in ("", "0"):
        from .triton_autotune import install

        install()
    return {
        "full_attention_with_oracle": full_attention_with_oracle,
        "block_sparse_attention": _with_merged_window(block_sparse_attention, sliding_window_attention),
        "sliding_window_attention": sliding_window_attention,
        "sparse_layer_attention": sparse_layer_attention,
        "selection_layouts": selection_layouts,
    }


def _with_merged_window(
    block_sparse: Callable[..., tuple], sliding_window: Callable[..., tuple]
) -> Callable[..., tuple]:
    """`block_sparse_attention` by kernels; with `window`, the blocks count up to it and it is a branch of its own."""

    def attend(query, key, value, indices, *, window, sink, rows, layouts=None, **options):
        if not window:
            return block_sparse(query, key, value, indices, sink=sink, rows=rows, layouts=layouts, **options)
        window = min(window, key.shape[2])
        start = rows.query_start
        if start is None:
            start = torch.full((query.shape[0],), key.shape[2] - query.shape[2], device=query.device)
        # A query that owns an earlier column sees what lies before its window, and no key twice.
        far = block_sparse(query, key, value, indices, rows=replace(rows, query_start=start - window), **options)
        near = sliding_window(query, key, value, window=window, rows=rows, scaling=options["scaling"])
        lses = far[1], near[1]
        output, _ = merge_branches((far[0], near[0]), lses, sink)
        largest = torch.maximum(*lses).detach().nan_to_num(neginf=0.0)
        mass = torch.exp(lses[0] - largest) + torch.exp(lses[1] - largest)
        lse = torch.where(mass == 0, -torch.inf, largest + torch.log(torch.where(mass == 0, 1.0, mass)))
        return output, lse, None

    return attend


OPERATIONS = Operations(
    {
        "full_attention_with_oracle": full_attention_reference,
        "full_attention_with_token_oracle": token_oracle_reference,
        "block_sparse_attention": block_sparse_reference,
        "token_sparse_attention": token_sparse_reference,
        "sliding_window_attention": sliding_window_reference,
        "sparse_layer_attention": sparse_layer_reference,
    },
    _load_kernels,
)


def _run(backend: str, operation: str, *tensors: torch.Tensor, **options) -> tuple:
    """Call the operation on its back end; the reference draws maps in `auto`, and gives an empty batch's shapes."""
    if (options.get("return_weights") and backend == "auto") or not tensors[0].shape[0]:
        backend = "reference"
    return OPERATIONS.run(backend, operation, *tensors, **options)


def full_attention_with_oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_size: int,
    n_selected: int,
    scaling: float | None = None,
    rows: Rows | None = None,
    block_reduction: str = "max",
    head_reduction: str = "max",
    forced_first_blocks: int = 0,
    forced_local_blocks: int = 0,
    return_weights: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor | None, ...]:
    """Causal softmax attention whose own probabilities choose the top key blocks per query and KV head.

    Args:
        query (`torch.Tensor`): `(batch, heads, q_len, head_dim)`, floating point.
        key (`torch.Tensor`): `(batch, kv_heads, kv_len, head_dim)`.
        value (`torch.Tensor`): `(batch, kv_heads, kv_len, v_head_dim)`.
        block_size (`int`): tokens per block.
        n_selected (`int`): blocks chosen per query and KV head; 0 chooses none and returns no indices.
        scaling (`float`, *optional*): factor of the scores; default `head_dim ** -0.5`.
        rows (`Rows`, *optional*): offsets, documents and padding; default: the queries are the last of the keys.
        block_reduction (`str`): `"max"` or `"sum"` of the probabilities in a block.
        head_reduction (`str`): `"max"` or `"mean"` over the heads of a KV group, each normalised by itself.
        forced_first_blocks, forced_local_blocks (`int`): blocks always chosen, inside `n_selected`.
        return_weights (`bool`): append the attention map `(batch, heads, q_len, kv_len)`; reference only.
        backend (`str`): `"auto"`, `"reference"` or `"triton"`.
    Returns:
        `(output, lse, indices)`: output `(batch, heads, q_len, v_head_dim)`; lse `(batch, heads, q_len)`, float32
        (float64 for float64 inputs), natural log; indices int32 `(batch, kv_heads, q_len, n_selected)`, ascending,
        then -1, or None.
    Raises:
        ValueError: a shape or value breaks the rules above.
        NotImplementedError: valid, but the back end asked for cannot do it.
    Source: HySparse (arXiv:2602.03560), section 3.2, equation 3; differs in: ties go to the lower index.
    """
    check_states(query, key, value)
    check_choice("block_reduction", block_reduction, ("max", "sum"))
    check_choice("head_reduction", head_reduction, ("max", "mean"))
    check_at_least("block_size", block_size, 1)
    check_at_least("n_selected", n_selected, 0)
    check_at_least("forced_first_blocks", forced_first_blocks, 0)
    check_at_least("forced_local_blocks", forced_local_blocks, 0)
    if n_selected and forced_first_blocks + forced_local_blocks > n_selected:
        raise ValueError(
            f"`forced_first_blocks` + `forced_local_blocks` must be at most `n_selected` ({n_selected}), got "
            f"{forced_first_blocks} + {forced_local_blocks}; force fewer or select more."
        )
    results = _run(
        backend,
        "full_attention_with_oracle",
        query,
        key,
        value,
        block_size=block_size,
        n_selected=n_selected,
        scaling=scaling_or_default(scaling, query),
        rows=checked_rows(rows, query, key),
        block_reduction=block_reduction,
        head_reduction=head_reduction,
        forced_first_blocks=forced_first_blocks,
        forced_local_blocks=forced_local_blocks,
        return_weights=return_weights,
    )
    return results if return_weights else results[:3]


def full_attention_with_token_oracle(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    n_selected: int,
    window: int,
    scaling: float | None = None,
    rows: Rows | None = None,
    head_reduction: str = "max",
    return_weights: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor | None, ...]:
    """Causal softmax attention whose own probabilities choose the top tokens per query and KV head.

    Args:
        query, key, value, scaling, rows, head_reduction, return_weights, backend: as in `full_attention_with_oracle`.
        n_selected (`int`): tokens chosen per query and KV head; 0 chooses none and returns no indices.
        window (`int`): the last `window` tokens, the query's own included, are left out of the choice: the sparse
            layers read them anyway. 0 leaves out none.
    Returns:
        `(output, lse, indices)` as in `full_attention_with_oracle`; indices in tokens since the document's first.
    Raises:
        ValueError, NotImplementedError: as in `full_attention_with_oracle`.
    Source: HySparse2 (arXiv:2609.26368), token-level selection; ties go to the lower index.
    """
    check_states(query, key, value)
    check_choice("head_reduction", head_reduction, ("max", "mean"))
    check_at_least("n_selected", n_selected, 0)
    check_at_least("window", window, 0)
    results = _run(
        backend,
        "full_attention_with_token_oracle",
        query,
        key,
        value,
        n_selected=n_selected,
        window=window,
        scaling=scaling_or_default(scaling, query),
        rows=checked_rows(rows, query, key),
        head_reduction=head_reduction,
        return_weights=return_weights,
    )
    return results if return_weights else results[:3]


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    block_size: int,
    sink: torch.Tensor | None = None,
    window: int = 0,
    scaling: float | None = None,
    rows: Rows | None = None,
    layouts: tuple | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attend from each query to the selected key blocks of its KV group, causally inside the last block.

    Args:
        query, key, value, scaling, rows, backend: as in `full_attention_with_oracle`.
        indices (`torch.Tensor`): int32 `(batch, kv_heads, q_len, n)`, in blocks; -1 means none, repeats count once.
        block_size (`int`): tokens per block.
        sink (`torch.Tensor`, *optional*): `(heads,)`, one logit beside the scaled scores in the denominator.
        window (`int`): the last `window` tokens join the same softmax (control experiment 10); 0 for none.
        layouts (*optional*): of these `indices`, from `selection_layouts`; without them each call makes its own.
        return_lse, return_weights (`bool`): append the log-sum-exp without sink (differentiable), and the attention
            map (reference only).
    Returns:
        `torch.Tensor`: `(batch, heads, q_len, v_head_dim)`; 0 where nothing is selected. A tuple when more is asked.
    Raises:
        ValueError, NotImplementedError: as in `full_attention_with_oracle`.
    Source: HySparse (arXiv:2602.03560), section 3.3.
    """
    check_states(query, key, value)
    check_at_least("block_size", block_size, 1)
    check_at_least("window", window, 0)
    check_indices(indices, query, key)
    results = _run(
        backend,
        "block_sparse_attention",
        query,
        key,
        value,
        indices,
        block_size=block_size,
        sink=checked_sink(sink, query),
        window=window,
        scaling=scaling_or_default(scaling, query),
        rows=checked_rows(rows, query, key),
        for_kernel={"layouts": layouts},
        return_weights=return_weights,
    )
    return _asked_for(results, return_lse, return_weights)


def token_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    window: int,
    sink: torch.Tensor | None = None,
    scaling: float | None = None,
    rows: Rows | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attend from each query to the last `window` tokens and to selected ones, in one softmax.

    Args:
        query, key, value, scaling, rows, backend: as in `full_attention_with_oracle`.
        indices (`torch.Tensor`): int32 `(batch, kv_heads, q_len, n)`, in tokens since the document's first; -1 means
            none; a token listed twice, or listed and inside the window, counts once.
        window (`int`): tokens, the query's own included; 0 for none.
        sink, return_lse, return_weights: as in `block_sparse_attention`.
    Returns:
        `torch.Tensor`: `(batch, heads, q_len, v_head_dim)`; 0 where nothing is attended. A tuple when more is asked.
    Raises:
        ValueError, NotImplementedError: as in `full_attention_with_oracle`.
    Source: HySparse2 (arXiv:2609.26368), token-level selection.
    """
    check_states(query, key, value)
    check_at_least("window", window, 0)
    check_indices(indices, query, key)
    results = _run(
        backend,
        "token_sparse_attention",
        query,
        key,
        value,
        indices,
        window=window,
        sink=checked_sink(sink, query),
        scaling=scaling_or_default(scaling, query),
        rows=checked_rows(rows, query, key),
        return_weights=return_weights,
    )
    return _asked_for(results, return_lse, return_weights)


def sliding_window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int,
    sink: torch.Tensor | None = None,
    scaling: float | None = None,
    rows: Rows | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attend from each query to the last `window` tokens of its document, its own included.

    Args:
        query, key, value, scaling, rows, backend: as in `full_attention_with_oracle`.
        window (`int`): tokens; 0 attends to nothing and gives 0.
        sink (`torch.Tensor`, *optional*): `(heads,)`, one logit in the denominator.
        return_lse, return_weights (`bool`): as in `block_sparse_attention`.
    Returns:
        `torch.Tensor`: `(batch, heads, q_len, v_head_dim)`. A tuple when more is asked.
    Raises:
        ValueError, NotImplementedError: as in `full_attention_with_oracle`.
    Source: HySparse (arXiv:2602.03560), section 3.3.
    """
    check_states(query, key, value)
    check_at_least("window", window, 0)
    results = _run(
        backend,
        "sliding_window_attention",
        query,
        key,
        value,
        window=window,
        sink=checked_sink(sink, query),
        scaling=scaling_or_default(scaling, query),
        rows=checked_rows(rows, query, key),
        return_weights=return_weights,
    )
    return _asked_for(results, return_lse, return_weights)


def sparse_layer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    window_query: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    *,
    block_size: int,
    window: int,
    gate_global: torch.Tensor | None = None,
    gate_local: torch.Tensor | None = None,
    sink_global: torch.Tensor | None = None,
    sink_local: torch.Tensor | None = None,
    scaling: float | None = None,
    rows: Rows | None = None,
    window_rows: Rows | None = None,
    layouts: tuple | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """A sparse layer's two branches as one operation: selected blocks and the layer's own window, gated and added.

    Args:
        query, key, value, indices, block_size, rows, layouts: of the global branch, as in `block_sparse_attention`.
        window_query, window_key, window_value, window, window_rows: of the local branch, as in
            `sliding_window_attention`; the queries are the same tokens in the same order.
        gate_global, gate_local (`torch.Tensor`, *optional*): both or neither: logits of each branch's gate before the
            sigmoid, `(batch, heads, q_len, v_head_dim)` or `(batch, heads, q_len, 1)`, in the order of the queries.
        sink_global, sink_local (`torch.Tensor`, *optional*): `(heads,)`, one logit in each branch's denominator.
        scaling (`float`, *optional*): factor of both branches' scores; default `head_dim ** -0.5`.
        backend (`str`): `"auto"`, `"reference"` or `"triton"`.
    Returns:
        `torch.Tensor`: `(batch, heads, q_len, v_head_dim)`.
    Raises:
        ValueError, NotImplementedError: as in `full_attention_with_oracle`.
    Source: HySparse (arXiv:2602.03560), section 3.3.
    """
    check_states(query, key, value)
    check_states(window_query, window_key, window_value)
    check_indices(indices, query, key)
    check_at_least("block_size", block_size, 1)
    check_at_least("window", window, 0)
    check_second_branch(query, value, window_query, window_value)
    check_gates(gate_global, gate_local, (*query.shape[:3], value.shape[3]))
    (output,) = _run(
        backend,
        "sparse_layer_attention",
        query,
        key,
        value,
        indices,
        window_query,
        window_key,
        window_value,
        block_size=block_size,
        window=window,
        scaling=scaling_or_default(scaling, query),
        rows=checked_rows(rows, query, key),
        window_rows=checked_rows(window_rows, window_query, window_key),
        gate_global=gate_global,
        gate_local=gate_local,
        sink_global=checked_sink(sink_global, query),
        sink_local=checked_sink(sink_local, query),
        for_kernel={"layouts": layouts},
    )
    return output


def selection_layouts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    *,
    block_size: int,
    rows: Rows | None = None,
    backend: str = "auto",
) -> tuple | None:
    """What the sparse kernels read in place of `indices`, for several layers of equal shapes that share a selection.

    Args:
        query, key, value, indices, block_size, rows, backend: as in `block_sparse_attention`; of the states only
            shapes, dtype and device count.
    Returns:
        `tuple`, *optional*: for the argument `layouts`, with what the backward pass reads where gradients are
        enabled; None where the reference runs.
    """
    check_indices(indices, query, key)
    try:
        return OPERATIONS.by_kernel(
            backend,
            "selection_layouts",
            query,
            key,
            value,
            indices,
            block_size=block_size,
            rows=checked_rows(rows, query, key),
            for_backward=torch.is_grad_enabled(),
        )
    except (NotImplementedError, ImportError):
        return None


def merge_branches(
    outputs: tuple[torch.Tensor, torch.Tensor], lses: tuple[torch.Tensor, torch.Tensor], sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over two sets of candidates, from each set's own softmax.

    Args:
        outputs, lses: each branch's `(batch, heads, q_len, v_head_dim)` and `(batch, heads, q_len)`, without sink.
        sink (`torch.Tensor`, *optional*): `(heads,)`, joins the denominator.
    Returns:
        `(output, shares)`: shares `(2, batch, heads, q_len)`, the weight that each branch received.
    Source: control experiment 11 of HySparse (arXiv:2602.03560), section 4.
    """
    terms = list(lses)
    if sink is not None:
        terms.append(sink.to(lses[0].dtype)[None, :, None].expand_as(lses[0]))
    # exp of the differences, so that a branch without keys (lse of -inf) weighs exactly nothing.
    stacked = torch.stack(terms)
    weights = torch.exp(stacked - stacked.detach().amax(0).nan_to_num(neginf=0.0))
    total = weights.sum(0)
    shares = weights[:2] / torch.where(total == 0, 1.0, total)
    output = shares[0][..., None] * outputs[0] + shares[1][..., None] * outputs[1]
    return output.to(outputs[0].dtype), shares


def _asked_for(results: tuple[torch.Tensor, ...], return_lse: bool, return_weights: bool):
    asked = [results[0]] + [results[1]] * return_lse + [results[2]] * return_weights
    return asked[0] if len(asked) == 1 else tuple(asked)


__all__ = [
    "BACKENDS",
    "block_sparse_attention",
    "full_attention_with_oracle",
    "full_attention_with_token_oracle",
    "merge_branches",
    "resolve_backend",
    "selection_layouts",
    "sliding_window_attention",
    "sparse_layer_attention",
    "token_sparse_attention",
]
