"""Attention one query at a time, in Python loops: slow, obvious, and written without the code under test.

Everything is differentiable, so that autograd of these loops is the oracle of every gradient.
"""

import math
from dataclasses import dataclass

import torch

from hysparse_hf.modeling.rows_hysparse import Rows


NOTHING = Rows()


def random_states(q_len, kv_len=None, *, batch=1, heads=2, kv_heads=1, head_dim=8, v_head_dim=None, seed=0):
    """Query, key and value in float64."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len

    def states(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return (
        states(batch, heads, q_len, head_dim),
        states(batch, kv_heads, kv_len, head_dim),
        states(batch, kv_heads, kv_len, v_head_dim or head_dim),
    )


@dataclass(frozen=True)
class Place:
    """Where one query stands: the key column it owns, the first column of its document, the columns it sees."""

    own: int
    first: int
    seen: list[int]


def place_of(rows: Rows, batch: int, head: int, query: int, q_len: int, kv_len: int) -> Place:
    """Read `rows` for one query."""
    own = query + (kv_len - q_len if rows.query_start is None else int(rows.query_start[batch]))
    if rows.query_columns is not None:
        own = int(rows.query_columns[batch % rows.query_columns.shape[0], query])
    if rows.visibility is not None:
        mask = rows.visibility[batch % rows.visibility.shape[0], head % rows.visibility.shape[1], query]
        return Place(own, 0, [column for column in range(kv_len) if mask[column]])
    first = 0
    if rows.first_key is not None:
        table = rows.first_key
        first = int(table[batch % table.shape[0], query % table.shape[1]])
    return Place(own, first, list(range(first, own + 1)))


def attend(query, key, value, columns, scaling, sink=None):
    """One query `(dim,)` over the given columns of `(kv_len, dim)`: output, log-sum-exp, probabilities."""
    if not columns:
        nothing = query.sum() * 0
        return value.new_zeros(value.shape[-1]) + nothing, query.new_tensor(-math.inf), query.new_zeros(0)
    logits = key[columns] @ query * scaling
    everything = logits if sink is None else torch.cat([logits, sink[None]])
    probabilities = torch.softmax(everything, 0)[: len(columns)]
    return probabilities @ value[columns], torch.logsumexp(logits, 0), probabilities


def rank_blocks(logits_of_heads, columns, first, own, options):
    """Chosen blocks of one query and KV head, from each head's logits over `columns`."""
    blocks = sorted({(column - first) // options["block_size"] for column in columns})
    scores = {}
    for block in blocks:
        inside = [i for i, column in enumerate(columns) if (column - first) // options["block_size"] == block]
        per_head = []
        for logits in logits_of_heads:
            part = logits[inside]
            largest = part.max() if options["block_reduction"] == "max" else torch.logsumexp(part, 0)
            per_head.append(float(largest - torch.logsumexp(logits, 0)))
        if options["head_reduction"] == "max":
            scores[block] = max(per_head)
        else:
            scores[block] = float(torch.logsumexp(torch.tensor(per_head, dtype=torch.float64), 0))
    own_block = (own - first) // options["block_size"]
    forced = {
        block
        for block in blocks
        if block < options["forced_first_blocks"] or block > own_block - options["forced_local_blocks"]
    }
    ranked = sorted(blocks, key=lambda block: (block not in forced, -scores[block], block))
    return sorted(ranked[: options["n_selected"]])


def full_attention(query, key, value, *, scaling=None, rows=NOTHING, sink=None, **options):
    """Output, log-sum-exp, indices and attention map of a full layer; `n_selected=0` gives no indices."""
    batches, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    scaling = dim**-0.5 if scaling is None else scaling
    options = {
        "block_size": 64,
        "n_selected": 0,
        "block_reduction": "max",
        "head_reduction": "max",
        "forced_first_blocks": 0,
        "forced_local_blocks": 0,
        **options,
    }

    def columns_of(batch, head, index):
        return place_of(rows, batch, head, index, q_len, kv_len).seen

    output, lse, weights = _every_query(query, key, value, columns_of, scaling, sink)
    if not options["n_selected"]:
        return output, lse, None, weights
    group = heads // kv_heads
    indices = torch.full((batches, kv_heads, q_len, options["n_selected"]), -1, dtype=torch.int32)
    for batch in range(batches):
        for kv_head in range(kv_heads):
            for index in range(q_len):
                members = range(kv_head * group, (kv_head + 1) * group)
                place = place_of(rows, batch, members[0], index, q_len, kv_len)
                if place.seen:
                    states = key[batch, kv_head, place.seen].detach()
                    logits = [states @ query[batch, head, index].detach() * scaling for head in members]
                    chosen = rank_blocks(logits, place.seen, place.first, place.own, options)
                    indices[batch, kv_head, index, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return output, lse, indices, weights


def rank_tokens(logits_of_heads, columns, first, own, n_selected, window, head_reduction):
    """Chosen tokens before the window of one query and KV head, counted from the document's first."""
    scores = {}
    for i, column in enumerate(columns):
        if not own - window < column <= own:
            per_head = [float(logits[i] - torch.logsumexp(logits, 0)) for logits in logits_of_heads]
            mean = float(torch.logsumexp(torch.tensor(per_head, dtype=torch.float64), 0))
            scores[column - first] = max(per_head) if head_reduction == "max" else mean
    ranked = sorted(scores, key=lambda token: (-scores[token], token))
    return sorted(ranked[:n_selected])


def full_attention_with_token_oracle(
    query, key, value, *, n_selected, window, head_reduction="max", scaling=None, rows=NOTHING
):
    """Output, log-sum-exp, token indices and attention map of a full layer."""
    output, lse, _, weights = full_attention(query, key, value, scaling=scaling, rows=rows)
    batches, heads, q_len, dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    group, scaling = heads // kv_heads, dim**-0.5 if scaling is None else scaling
    indices = torch.full((batches, kv_heads, q_len, n_selected), -1, dtype=torch.int32)
    for batch in range(batches):
        for kv_head in range(kv_heads):
            for index in range(q_len):
                members = range(kv_head * group, (kv_head + 1) * group)
                place = place_of(rows, batch, members[0], index, q_len, kv_len)
                if place.seen:
                    states = key[batch, kv_head, place.seen].detach()
                    logits = [states @ query[batch, head, index].detach() * scaling for head in members]
                    chosen = rank_tokens(
                        logits, place.seen, place.first, place.own, n_selected, window, head_reduction
                    )
                    indices[batch, kv_head, index, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return output, lse, indices, weights


def token_sparse_attention(query, key, value, indices, *, window, scaling=None, rows=NOTHING, sink=None):
    """Output, log-sum-exp and attention map over the union of the listed tokens and the window."""
    q_len, dim = query.shape[2:]
    kv_heads, kv_len = key.shape[1:3]
    group = query.shape[1] // kv_heads

    def columns_of(batch, head, index):
        place = place_of(rows, batch, head, index, q_len, kv_len)
        listed = {place.first + token for token in indices[batch, head // group, index].tolist() if token >= 0}
        near = set(range(place.own - window + 1, place.own + 1))
        return [column for column in place.seen if column in listed | near]

    return _every_query(query, key, value, columns_of, dim**-0.5 if scaling is None else scaling, sink)


def block_sparse_attention(query, key, value, indices, *, block_size, scaling=None, rows=NOTHING, sink=None, window=0):
    """Output, log-sum-exp and attention map over the listed blocks and, in the same softmax, a window."""
    q_len, dim = query.shape[2:]
    kv_heads, kv_len = key.shape[1:3]
    group = query.shape[1] // kv_heads

    def columns_of(batch, head, index):
        place = place_of(rows, batch, head, index, q_len, kv_len)
        listed = set(indices[batch, head // group, index].tolist())
        return [
            column
            for column in place.seen
            if (column - place.first) // block_size in listed or (window and column > place.own - window)
        ]

    return _every_query(query, key, value, columns_of, dim**-0.5 if scaling is None else scaling, sink)


def sliding_window_attention(query, key, value, *, window, scaling=None, rows=NOTHING, sink=None):
    """Output, log-sum-exp and attention map over the last `window` tokens."""
    q_len, dim = query.shape[2:]
    kv_len = key.shape[2]

    def columns_of(batch, head, index):
        place = place_of(rows, batch, head, index, q_len, kv_len)
        return [column for column in place.seen if column > place.own - window]

    return _every_query(query, key, value, columns_of, dim**-0.5 if scaling is None else scaling, sink)


def _every_query(query, key, value, columns_of, scaling, sink):
    batches, heads, q_len, _ = query.shape
    group = heads // key.shape[1]
    outputs, lses = [], []
    weights = query.new_zeros(batches, heads, q_len, key.shape[2])
    for batch in range(batches):
        for head in range(heads):
            for index in range(q_len):
                columns = columns_of(batch, head, index)
                states = (key[batch, head // group], value[batch, head // group])
                own_sink = None if sink is None else sink[head]
                output, lse, shares = attend(query[batch, head, index], *states, columns, scaling, own_sink)
                outputs.append(output)
                lses.append(lse)
                weights[batch, head, index, columns] = shares.detach()
    output = torch.stack(outputs).view(batches, heads, q_len, -1)
    return output, torch.stack(lses).view(batches, heads, q_len), weights


def plain_attention(query, key, value, mask, *, scaling=None, sink=None):
    """Textbook masked attention in the tensors' own dtype, float32 softmax: the error that low precision costs.

    Args:
        mask (`torch.Tensor`): bool `(batch, heads, q_len, kv_len)`, True where a key is attended.
    Returns:
        `(output, lse)`.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = (query @ key.transpose(-1, -2) * scaling).float().masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(logits, -1)
    everything = logits
    if sink is not None:
        everything = torch.cat([logits, sink.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1)
    probabilities = torch.softmax(everything, -1)[..., : logits.shape[-1]].nan_to_num(0.0)
    return probabilities.to(value.dtype) @ value, lse
