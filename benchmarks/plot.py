"""Draw the ratios to cuDNN's dense attention over the length of the text.

python benchmarks/plot.py benchmarks/results/ratios.png benchmarks/results/*.json
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib


matplotlib.use("Agg")
from matplotlib import pyplot


PASSES = ("forward", "backward")
# Blocks of other sizes are left out; a plot needs no card, which `registry` does.
BLOCK_SIZE = 64


def collect(files: list[Path]) -> tuple[dict, str]:
    """Points `{(pass, label): {n: ratio}}` of the rows whose check passed, the last of a place, and the card."""
    lines = defaultdict(dict)
    cards = set()
    for file in files:
        result = json.loads(file.read_text())
        cards.add(f"{result['card']}, torch {result['torch']}, triton {result['triton']}")
        for row in result["rows"]:
            if (
                row["baseline"] == "cudnn dense"
                and row["check_passed"]
                and row.get("block_size") in (None, BLOCK_SIZE)
            ):
                detail = row.get("index_set") or row.get("variant") or ""
                label = f"{row['op']} {row['shape']} {detail}".strip()
                lines[row["pass"], label][row["n"]] = row["ratio"]
    return lines, "; ".join(sorted(cards))


def draw(files: list[Path], target: Path) -> None:
    """One panel per pass, one line per operation, shape and index set."""
    lines, card = collect(files)
    figure, panels = pyplot.subplots(1, len(PASSES), figsize=(13, 7), sharey=True, layout="constrained")
    for panel, passed_over in zip(panels, PASSES, strict=True):
        panel.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
        for (of, label), points in sorted(lines.items()):
            if of == passed_over:
                lengths, ratios = zip(*sorted(points.items()), strict=True)
                panel.plot(lengths, ratios, marker="o", label=label)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=passed_over, xlabel="tokens")
        panel.set_xticks([8192, 32768, 131072], ["8k", "32k", "128k"])
        panel.minorticks_off()
        panel.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 1.5], ["0.05", "0.1", "0.2", "0.5", "1", "1.5"])
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    panels[0].set_ylabel("time / cuDNN dense causal attention")
    figure.suptitle(card, fontsize=9)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    draw([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
