"""`hysparse recall`: what a reused selection catches of each layer's own attention, and what it leaves out.

Figures are grouped by position r in the hybrid block. At r = 0 stand the full layer's own heads, which share one
selection per KV group: what they lose is the price of the group. From r = 1 on a sparse layer reads blocks that
another layer chose: what it loses beyond r = 0 is the price of staleness. For the full layers there is also what their
selections look like to a memory system (`index_patterns`).
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hysparse_hf.conversion.architectures import ARCHITECTURES
from hysparse_hf.conversion.source import open_source
from hysparse_hf.conversion.texts import add_text_arguments, read_texts
from hysparse_hf.index_patterns import PAGE_TOKENS, UNION_WIDTHS, index_patterns, phase_overlap
from hysparse_hf.modeling.layers_hysparse import rotate
from hysparse_hf.modeling.selection_hysparse import chosen_blocks, reduce_blocks, reduce_heads, select_blocks


# Scores held at once, in elements.
CHUNK_ELEMENTS = 4 * 1024 * 1024
# A gate nearer to 0 or 1 than this hardly moves any more.
SATURATED = 0.05


@torch.no_grad()
def measure_recall(model: Any, windows: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Compare the selection that each layer reads with the layer's own attention A, dense and without a sink.

    A sparse layer's A is over the keys that its global branch reads. Only queries that see more blocks than are
    selected count; for the others nothing is left out.

    Args:
        model (`HySparseForCausalLM`): with sparse layers that reuse a selection.
        windows (`Sequence[torch.Tensor]`): token ids, each `(length,)`, longer than the budget.
    Returns:
        `dict`: `queries` that counted; `layers`: per layer its index, `position` r, `recall` (share of each head's own
        best blocks that are in the selection), `left_out` (eps: mass of A outside it), `coverage` per head (mass of A
        inside), `margin` (median over queries, full layers only: log score of the last chosen block over that of the
        first rejected), `gates` (per branch mean and share within 0.05 of 0 or 1, sparse layers only), `patterns`
        (full layers only: means of what `index_patterns` gives, None where the text is too short, and `phase`, the
        `phase_overlap` of the first window longer than the budget); and `positions`: r -> mean `recall`, mean
        `left_out`, lowest `coverage` of a head, mean `margin`.
    Raises:
        ValueError: no layer reuses a selection, or no window is longer than the budget.
        NotImplementedError: a model of the second generation.
    """
    config = model.config
    if config.model_type != "hysparse":
        raise NotImplementedError(
            f"recall is of blocks, got a model of type {config.model_type!r}, which selects single tokens; `hysparse "
            "verify` measures what its selection costs."
        )
    if config.dense or not config.share_oracle or "sparse" not in config.layer_plan:
        raise ValueError(
            "recall is of a selection that sparse layers reuse: `dense` must be False, `share_oracle` True and "
            f"`layer_plan` have sparse layers, got {config.dense}, {config.share_oracle} and {config.layer_plan}."
        )
    longest = max(len(window) for window in windows)
    if longest <= config.oracle_budget:
        raise ValueError(
            f"a window must be longer than `oracle_budget` ({config.oracle_budget} tokens), got {longest}; up to "
            "there every block is selected, so use longer text."
        )
    parts: dict[int, list[dict[str, torch.Tensor]]] = {}
    selections: dict[int, torch.Tensor] = {}

    def measure(attention: Any, args: tuple, kwargs: dict, output: tuple) -> None:
        index, hidden, rotations = attention.layer_idx, args[0], kwargs["rotations"]
        if attention.kind == "full":
            given = (output[2], output[4])
        else:
            given = (args[1] if config.share_full_kv else None, args[3])
        kind = attention.kind if given[0] is None else "full"
        query, key = _projected(attention, hidden, "q", rotations[kind]), given[0]
        key = _projected(attention, hidden, "k", rotations[kind]) if key is None else key
        part = _joined(_figures(attention, query, key, given[1]))
        if attention.kind == "full":
            counted = given[1][0, :, config.oracle_budget :]
            part |= index_patterns(counted, config.oracle_budget, config.oracle_block_size)
            # Of the first window alone; the others come later.
            selections.setdefault(index, counted)
        part |= {f"gate_{name}": gate.flatten() for name, gate in _gates(attention, hidden)}
        parts.setdefault(index, []).append(part)

    donors = [index if donor is None else donor for index, donor in enumerate(config.donor_plan)]
    measured = [index for index, donor in enumerate(donors) if donor in config.donor_plan]
    handles = [model.model.layers[i].self_attn.register_forward_hook(measure, with_kwargs=True) for i in measured]
    try:
        for window in logging.tqdm(windows, desc="recall", unit="window"):
            if len(window) > config.oracle_budget:
                model.model(input_ids=window[None].to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    layers = [_layer_record(index, index - donors[index], _joined(parts[index])) for index in measured]
    first = next(window for window in windows if len(window) > config.oracle_budget)
    phases = _phases(model, first, selections)
    for layer in layers:
        layer["patterns"] |= {"phase": phases[layer["layer"]]} if layer["position"] == 0 else {}
    queries = next(iter(_joined(parts[measured[0]]).values())).shape[-1]
    return {"queries": queries, "layers": layers, "positions": _by_position(layers)}


def _projected(attention: Any, hidden: torch.Tensor, name: str, rotation: Any) -> torch.Tensor:
    """Rotated queries or keys, `(1, heads, length, head_dim)`."""
    states = getattr(attention, f"{name}_proj")(hidden).unflatten(-1, (-1, attention.head_dim))
    if attention.config.use_qk_norm:
        states = getattr(attention, f"{name}_norm")(states)
    return rotate(states.transpose(1, 2), rotation)


def _phases(model: Any, window: torch.Tensor, selections: dict[int, torch.Tensor]) -> dict[int, float]:
    """Full layer -> `phase_overlap` of its selections on `window` and on the window without its first token."""
    config = model.config
    output = model.model(
        input_ids=window[None, 1:].to(model.device), use_cache=False, output_selected_indices=True
    ).selected_indices
    full = [index for index, kind in enumerate(config.layer_plan) if kind == "full"]
    return {
        index: phase_overlap(
            counted,
            output[full.index(index)][0, :, config.oracle_budget - 1 :],
            config.oracle_budget,
            config.oracle_block_size,
        )
        for index, counted in selections.items()
    }


def _gates(attention: nn.Module, hidden: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("global", "local"):
        projection = getattr(attention, f"gate_{name}_proj", None)
        if projection is not None:
            yield name, torch.sigmoid(projection(hidden)).float()


def _figures(
    attention: Any, query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor
) -> Iterator[dict[str, torch.Tensor]]:
    """`recall` and `inside` `(heads, queries)`, and `margin` `(kv_heads, queries)`, a few queries at a time."""
    config = attention.config
    size, kv_heads, length = config.oracle_block_size, key.shape[1], query.shape[2]
    n_selected, group = indices.shape[-1], query.shape[1] // key.shape[1]
    choices = {
        "forced_first_blocks": config.oracle_forced_first_blocks,
        "forced_local_blocks": config.oracle_forced_local_blocks,
    }
    step = max(1, CHUNK_ELEMENTS // (query.shape[1] * length))
    columns = torch.arange(length, device=query.device)
    for start in range(n_selected * size, length, step):
        stop = min(start + step, length)
        own = torch.arange(start, stop, device=query.device)
        keys = key[:, :, :stop].float().repeat_interleave(group, dim=1)
        logits = query[:, :, start:stop].float() @ keys.transpose(-1, -2) * attention.scaling
        logits = logits.masked_fill(columns[:stop] > own[:, None], -math.inf)
        lse = logits.logsumexp(-1, keepdim=True)
        scores = reduce_blocks(logits, size, config.oracle_block_reduction) - lse
        mass = (reduce_blocks(logits, size, "sum") - lse).exp()
        blocks = scores.shape[-1]
        best = chosen_blocks(select_blocks(scores, own[None] // size, n_selected, **choices), blocks)
        chosen = chosen_blocks(indices[:, :, start:stop], blocks)
        reused = chosen.repeat_interleave(group, dim=1)
        shared = reduce_heads(scores.unflatten(1, (kv_heads, group)), config.oracle_head_reduction)
        last = shared.masked_fill(~chosen, math.inf).amin(-1)
        margin = last - shared.masked_fill(chosen, -math.inf).amax(-1)
        yield {
            "recall": ((best & reused).sum(-1) / best.sum(-1))[0],
            "inside": (mass * reused).sum(-1)[0],
            "margin": margin[0],
        }


def _joined(parts: Any) -> dict[str, torch.Tensor]:
    """Figures of several pieces, one after the other."""
    pieces = list(parts)
    return {name: torch.cat([piece[name] for piece in pieces], dim=-1) for name in pieces[0]}


def _layer_record(index: int, position: int, part: dict[str, torch.Tensor]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "layer": index,
        "position": position,
        "recall": part["recall"].mean().item(),
        "left_out": 1 - part["inside"].mean().item(),
        "coverage": part["inside"].mean(-1).tolist(),
        "margin": part["margin"].median().item() if position == 0 else None,
        "gates": {},
        "patterns": {},
    }
    if position == 0:
        names = ("blocks", "runs", "kept", "pages", "payload", *(f"union_{width}" for width in UNION_WIDTHS))
        record["patterns"] = {name: part[name].mean().item() if part[name].numel() else None for name in names}
    for name in ("global", "local"):
        gate = part.get(f"gate_{name}")
        if gate is not None:
            saturated = (gate < SATURATED) | (gate > 1 - SATURATED)
            record["gates"][name] = {"mean": gate.mean().item(), "saturated": saturated.float().mean().item()}
    return record


def _by_position(layers: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    table = {}
    for position in sorted({layer["position"] for layer in layers}):
        rows = [layer for layer in layers if layer["position"] == position]
        margins = [row["margin"] for row in rows if row["margin"] is not None]
        table[str(position)] = {
            "layers": len(rows),
            "recall": _mean([row["recall"] for row in rows]),
            "left_out": _mean([row["left_out"] for row in rows]),
            "coverage": min(min(row["coverage"]) for row in rows),
            "margin": _mean(margins) if margins else None,
        }
    return table


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def table(report: dict[str, Any]) -> str:
    """A report of `measure_recall` for people."""
    lines = [
        f"{report['queries']} queries that see more blocks than are selected; eps is the mass that a selection leaves "
        "out, recall the share of a head's own best blocks in it",
        f"{'r':>2}{'layers':>8}{'recall':>9}{'eps':>9}{'lowest coverage of a head':>27}{'margin at the cut':>19}",
    ]
    for position, row in report["positions"].items():
        margin = "" if row["margin"] is None else f"{row['margin']:.3f}"
        lines.append(
            f"{position:>2}{row['layers']:8}{row['recall']:9.3f}{row['left_out']:9.3f}{row['coverage']:27.3f}"
            f"{margin:>19}"
        )
    lines += ["", *_pattern_lines(report["layers"])]
    gates = [layer for layer in report["layers"] if layer["gates"]]
    if gates:
        lines += ["", f"{'layer':>5}{'r':>3}{'recall':>9}{'eps':>9}   gates: mean (share within 0.05 of 0 or 1)"]
    for layer in gates:
        parts = (f"{name} {gate['mean']:.2f} ({gate['saturated']:.2f})" for name, gate in layer["gates"].items())
        figures = f"{layer['layer']:5}{layer['position']:3}{layer['recall']:9.3f}{layer['left_out']:9.3f}"
        lines.append(f"{figures}   {', '.join(parts)}")
    return "\n".join(lines)


def _pattern_lines(layers: list[dict[str, Any]]) -> list[str]:
    """What the full layers' selections look like, one line a layer."""
    unions = "".join(f"{f'of {width}':>8}" for width in UNION_WIDTHS)
    lines = [
        f"selections of the full layers: blocks and runs of them per query and KV head; pages of {PAGE_TOKENS} tokens",
        "per query, and the share of their keys that is read; blocks that the query before has too; blocks of 16 and",
        "more queries together; tokens that stay selected when the text begins one token later",
        f"{'layer':>5}{'blocks':>8}{'runs':>7}{'pages':>8}{'read':>8}{'kept':>8}{unions}{'phase':>8}",
    ]
    for layer in layers:
        row = layer["patterns"]
        if row:
            cells = (row[f"union_{width}"] for width in UNION_WIDTHS)
            wide = "".join(f"{'' if cell is None else format(cell, '.1f'):>8}" for cell in cells)
            kept = "" if row["kept"] is None else f"{row['kept']:.3f}"
            lines.append(
                f"{layer['layer']:5}{row['blocks']:8.1f}{row['runs']:7.1f}{row['pages']:8.1f}{row['payload']:8.3f}"
                f"{kept:>8}{wide}{row['phase']:8.3f}"
            )
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hysparse recall`."""
    parser.add_argument("checkpoint", help="a HySparse checkpoint folder")
    add_text_arguments(parser, required=True)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")


def run(args: argparse.Namespace) -> int:
    """Run `hysparse recall`."""
    source = open_source(args.checkpoint)
    texts = read_texts(source, args.text, length=args.length, windows=args.windows)
    model: Any = source.load_model(torch.float32)
    if model.config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"`checkpoint` must be a HySparse checkpoint, got {source.name}, of type {model.config.model_type!r}; "
            "convert it first."
        )
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    report = measure_recall(model, [window for text in texts for window in text.windows])
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))
    return 0
