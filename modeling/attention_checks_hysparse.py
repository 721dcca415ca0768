"""Rules for the arguments of the public operations; each is checked once, there."""

from dataclasses import replace

import torch

from .rows_hysparse import PLAIN_ROWS, Rows


def scaling_or_default(scaling: float | None, query: torch.Tensor) -> float:
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}.")


def check_at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise ValueError(f"`{name}` must be at least {lowest}, got {value}.")


def check_states(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    for name, states in (("query", query), ("key", key), ("value", value)):
        if states.dim() != 4 or not states.is_floating_point():
            raise ValueError(
                f"`{name}` must be a floating point tensor (batch, heads, length, head_dim), got "
                f"{tuple(states.shape)} of {states.dtype}."
            )
    batch, heads, q_len, dim = query.shape
    if not (key.shape[1] and dim and value.shape[3]):
        raise ValueError(
            f"`key` and `value` must have heads, and heads a width, got {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batch or key.shape[3] != dim:
        raise ValueError(
            "`key` and `value` must agree with `query` in batch and with each other in heads and length, and `key` "
            f"in head_dim; got query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}."
        )
    if heads % key.shape[1]:
        raise ValueError(
            f"`query` heads must be a multiple of `key` heads, got {heads} and {key.shape[1]}; each KV head serves "
            "the same number of query heads."
        )
    if q_len < 1:
        raise ValueError("`query` must hold at least one token, got none; give the tokens to attend from.")
    if key.shape[2] < q_len:
        raise ValueError(
            f"`key` must hold at least the queries' own tokens ({q_len}), got {key.shape[2]}; pass cached and new "
            "keys together."
        )


def checked_sink(sink: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """The sink with its heads side by side in memory, as the kernels read it."""
    if sink is None:
        return None
    if sink.shape != (query.shape[1],) or sink.device != query.device:
        raise ValueError(
            f"`sink` must have shape (heads,) = ({query.shape[1]},) on {query.device}, got {tuple(sink.shape)} on "
            f"{sink.device}."
        )
    return sink.contiguous()


def check_indices(indices: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    expected = (query.shape[0], key.shape[1], query.shape[2])
    if indices.dim() != 4 or indices.shape[:3] != expected or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"`indices` must be integers (batch, kv_heads, q_len, n) = ({', '.join(map(str, expected))}, n), got "
            f"{tuple(indices.shape)} of {indices.dtype}; pass what the full layer returned for these queries."
        )


def checked_rows(rows: Rows | None, query: torch.Tensor, key: torch.Tensor) -> Rows:
    """The rows with `query_start` side by side in memory, as the kernels read it."""
    if rows is None:
        return PLAIN_ROWS
    batch, heads, q_len, _ = query.shape
    if rows.query_start is not None:
        _check_part("query_start", rows.query_start, ((batch,),))
    if rows.first_key is not None:
        _check_part("first_key", rows.first_key, ((batch, q_len), (batch, 1), (1, q_len), (1, 1)))
    if rows.query_columns is not None:
        _check_part("query_columns", rows.query_columns, ((batch, q_len), (1, q_len)))
    if rows.visibility is not None:
        shapes = tuple((n, m, q_len, key.shape[2]) for n in (batch, 1) for m in (heads, 1))
        _check_part("visibility", rows.visibility, shapes)
    if rows.query_start is not None and not rows.query_start.is_contiguous():
        return replace(rows, query_start=rows.query_start.contiguous())
    return rows


def _check_part(name: str, tensor: torch.Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if tuple(tensor.shape) not in shapes:
        raise ValueError(f"`rows.{name}` must have shape {shapes[0]}, got {tuple(tensor.shape)}.")


def check_second_branch(
    query: torch.Tensor, value: torch.Tensor, window_query: torch.Tensor, window_value: torch.Tensor
) -> None:
    if window_query.shape != query.shape or window_value.shape[3] != value.shape[3]:
        raise ValueError(
            "`window_query` and `window_value` must agree with `query` and `value`, so that the branches add up; got "
            f"{tuple(window_query.shape)} with {tuple(query.shape)}, values of {window_value.shape[3]} with "
            f"{value.shape[3]}."
        )


def check_gates(gate_global: torch.Tensor | None, gate_local: torch.Tensor | None, expected: tuple[int, ...]) -> None:
    shapes = [None if gate is None else tuple(gate.shape) for gate in (gate_global, gate_local)]
    if shapes[0] != shapes[1] or shapes[0] not in (None, expected, (*expected[:3], 1)):
        raise ValueError(
            f"`gate_global` and `gate_local` must both be {expected}, both end in 1, or both be None, got {shapes[0]} "
            f"and {shapes[1]}."
        )
