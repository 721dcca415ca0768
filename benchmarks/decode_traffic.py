"""What one decoding step reads of the cache, counted from the selections it makes: bytes, and pages of 16 tokens.

python benchmarks/decode_traffic.py results.json figure.png

draws both, and the time of a step, against the length of the text, from the rows of `bench_generate.py`. A page counts
once per row and KV head, however few of its tokens are read; a window layer's ring begins anywhere in a page.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


PAGE_TOKENS = 16


def tokens_and_pages(indices: torch.Tensor, block_size: int, lengths: torch.Tensor) -> tuple[int, int]:
    """Different tokens that the selected blocks show to one new token per row, and the pages that they lie on.

    Args:
        indices (`torch.Tensor`): `(batch, kv_heads, 1, n)`, in blocks, -1 for none.
        block_size (`int`): tokens per block.
        lengths (`torch.Tensor`): `(batch,)`, tokens of each row, the new one included.
    """
    ids, _ = indices[:, :, -1].long().sort(-1)
    is_new = torch.ones_like(ids, dtype=torch.bool)
    is_new[..., 1:] = ids[..., 1:] != ids[..., :-1]
    begin = ids * block_size
    tokens = (lengths.to(ids.device)[:, None, None] - begin).clamp(0, block_size) * (is_new & (ids >= 0))
    if block_size % PAGE_TOKENS:
        raise ValueError(f"`block_size` must be a multiple of {PAGE_TOKENS}, got {block_size}; count other pages.")
    return int(tokens.sum()), int((-(-tokens // PAGE_TOKENS)).sum())


def traffic_of_step(
    config, lengths: Sequence[int], selections: Sequence[torch.Tensor], element_bytes: int = 2
) -> dict[str, dict[str, int]]:
    """Bytes and pages that one step reads of keys and values, summed over the layers of each kind.

    Args:
        config (`HySparseConfig`): the model's configuration.
        lengths (`Sequence[int]`): tokens of each row, the new one included.
        selections (`Sequence[torch.Tensor]`): each full layer's `selected_indices` of the step.
        element_bytes (`int`): of keys and values.
    Returns:
        `dict`: `full`, `sparse` and `window` (a sparse layer's own window counts there), each `bytes` and `pages`.
    """
    heads = config.num_key_value_heads
    per_token = (config.head_dim + config.v_head_dim) * element_bytes
    rows = torch.tensor(lengths)
    windows = rows.clamp(max=config.sliding_window)
    counts = {kind: [0, 0] for kind in ("full", "sparse", "window")}
    chosen = iter(selections)
    current = (0, 0)
    for kind in config.layer_plan:
        if kind == "full":
            _add(counts["full"], heads * int(rows.sum()), heads * int((-(-rows // PAGE_TOKENS)).sum()))
            current = tokens_and_pages(next(chosen), config.oracle_block_size, rows)
        if kind == "sparse":
            _add(counts["sparse"], *current)
        if kind == "window" or (kind == "sparse" and config.window_branch != "none"):
            first, last = rows - windows, rows - 1
            _add(
                counts["window"],
                heads * int(windows.sum()),
                heads * int((last // PAGE_TOKENS - first // PAGE_TOKENS + 1).sum()),
            )
    return {kind: {"bytes": tokens * per_token, "pages": pages} for kind, (tokens, pages) in counts.items()}


def _add(counts: list[int], tokens: int, pages: int) -> None:
    counts[0] += tokens
    counts[1] += pages


def draw(result: dict, target: Path) -> None:
    """Bytes, pages and milliseconds of a step at batch 1 against the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [row for row in result["rows"] if row["op"] == "generate" and row["batch"] == 1]
    rows = [row for row in steps if "traffic" in row]
    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for panel, part, title in zip(
        panels, ("bytes", "pages"), ("MB read per step", "pages touched per step"), strict=False
    ):
        for kind in ("full", "sparse", "window"):
            scale = 1e6 if part == "bytes" else 1
            points = sorted({(row["n"], row["traffic"][kind][part] / scale) for row in rows})
            panel.plot(*zip(*points, strict=True), marker="o", label=f"{kind} layers")
        panel.set_title(title)
        panel.legend()
    times = {(row["variant"], row["n"], row["ms"]) for row in steps if row["baseline_ms"]}
    times |= {(row["baseline"], row["n"], row["baseline_ms"]) for row in steps if row["baseline_ms"]}
    for variant in sorted({name for name, _, _ in times}):
        points = sorted((n, ms) for name, n, ms in times if name == variant)
        panels[2].plot(*zip(*points, strict=True), marker="o", label=variant)
    panels[2].set_title("ms per step")
    panels[2].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens in the cache")
    figure.suptitle(f"{result['card']}, torch {result['torch']}, triton {result['triton']}")
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
