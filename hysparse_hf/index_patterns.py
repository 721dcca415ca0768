"""What selections look like to a memory system: runs, pages, what neighbouring queries share, and where blocks begin.

A selection is an index tensor `(kv_heads, queries, n_selected)` of blocks, -1 standing for nothing, for queries in a
row of a text that begins with block 0.
"""

import torch

from hysparse_hf.modeling.selection_hysparse import chosen_blocks


PAGE_TOKENS = 16
# Queries that one tile of a kernel may serve.
UNION_WIDTHS = (16, 32, 64)
# Token masks held at once, in elements.
CHUNK_ELEMENTS = 32 * 1024 * 1024


def index_patterns(
    indices: torch.Tensor, first_query: int, block_size: int, page_tokens: int = PAGE_TOKENS
) -> dict[str, torch.Tensor]:
    """Patterns of one selection, each value over all dimensions but what its mean is taken of.

    Args:
        indices (`torch.Tensor`): `(kv_heads, queries, n_selected)`.
        first_query (`int`): position of the first query, in tokens.
        block_size (`int`): tokens per block.
        page_tokens (`int`): tokens per page of a cache; a page holds the keys of all KV heads.
    Returns:
        `dict`: `blocks`, `runs` (of neighbouring blocks) and `kept` (share of the blocks that the query before has
        too, from the second query on), each `(kv_heads, queries)`; `pages` (that a query touches for all its KV heads)
        and `payload` (share of the keys in these pages that are read), `(queries,)`; `union_16` and so on: blocks of
        16 queries in a row together, `(kv_heads, groups)`.
    Raises:
        ValueError: pages and blocks of which neither is a multiple of the other.
    """
    if block_size % page_tokens and page_tokens % block_size:
        raise ValueError(
            f"`page_tokens` must divide `block_size` ({block_size}) or be a multiple of it, got {page_tokens}."
        )
    kv_heads, queries, _ = indices.shape
    own = first_query + torch.arange(queries, device=indices.device)
    starts = torch.arange(0, first_query + queries, block_size, device=indices.device)
    chosen = chosen_blocks(indices[None], len(starts))[0] & (starts <= own[:, None])
    counts = chosen.sum(-1)
    before = torch.nn.functional.pad(chosen, (1, 0))[..., :-1]
    tokens = (chosen * (own[:, None] + 1 - starts).clamp(max=block_size)).sum(-1)
    pages = _pages(chosen.any(0), own, block_size, page_tokens)
    patterns = {
        "blocks": counts.float(),
        "runs": (chosen & ~before).sum(-1).float(),
        "kept": (chosen[:, 1:] & chosen[:, :-1]).sum(-1) / counts[:, 1:],
        "pages": pages.float(),
        "payload": tokens.sum(0) / (kv_heads * page_tokens * pages),
    }
    for width in UNION_WIDTHS:
        groups = chosen[:, : queries // width * width].unflatten(1, (-1, width))
        patterns[f"union_{width}"] = groups.any(2).sum(-1).float()
    return patterns


def _pages(chosen: torch.Tensor, own: torch.Tensor, block_size: int, page_tokens: int) -> torch.Tensor:
    """Pages `(queries,)` under chosen blocks `(queries, blocks)`; none begins after the query's own token."""
    if page_tokens >= block_size:
        per_page = page_tokens // block_size
        missing = -chosen.shape[-1] % per_page
        return torch.nn.functional.pad(chosen, (0, missing)).unflatten(-1, (-1, per_page)).any(-1).sum(-1)
    held = chosen.repeat_interleave(block_size // page_tokens, dim=-1)
    starts = torch.arange(held.shape[-1], device=own.device) * page_tokens
    return (held & (starts <= own[:, None])).sum(-1)


def phase_overlap(indices: torch.Tensor, shifted: torch.Tensor, first_query: int, block_size: int) -> float:
    """Share of the selected tokens that stay selected when the text begins one token later.

    Block boundaries then lie one token later in the text. 1 means that a selection follows the text; less, that it
    also follows where blocks happen to begin.

    Args:
        indices (`torch.Tensor`): `(kv_heads, queries, n_selected)` of the queries from `first_query` on.
        shifted (`torch.Tensor`): of the same queries, from the text without its first token.
        first_query (`int`): position of the first query in the whole text, at least 1.
        block_size (`int`): tokens per block.
    """
    kv_heads, queries, _ = indices.shape
    length = first_query + queries
    columns = torch.arange(1, length, device=indices.device)
    step = max(1, CHUNK_ELEMENTS // (kv_heads * length))
    both = total = 0
    for start in range(0, queries, step):
        own = first_query + torch.arange(start, min(start + step, queries), device=indices.device)
        seen = columns <= own[:, None]
        # The first token is in the whole text alone, so it does not count.
        found, moved = (
            _tokens(part[:, start : start + step], columns - shift, block_size) & seen
            for part, shift in ((indices, 0), (shifted, 1))
        )
        both += int((found & moved).sum())
        total += int(found.sum())
    return both / total


def _tokens(indices: torch.Tensor, columns: torch.Tensor, block_size: int) -> torch.Tensor:
    """Whether each of the tokens `columns` is in a chosen block: `(kv_heads, queries, tokens)`."""
    blocks = columns // block_size
    return chosen_blocks(indices[None], int(blocks[-1]) + 1)[0][..., blocks]
