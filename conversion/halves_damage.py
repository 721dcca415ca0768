"""What a plan of the second generation costs, measured as in `damage`, and the plan that costs least.

Each layer of the self-decoder but the last, which the bridge reads, is tried as the window that it can be fitted to.
Each layer of the cross-decoder is tried twice: as a full layer behind the bridge, and, but for the first, as a sparse
layer behind it, which reads what the layer just before it would give.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hysparse_hf.modeling.configuration_hysparse2 import HySparse2Config
from hysparse_hf.modeling.decoder_hysparse import HySparseDecoderLayer

from .cross_fit import CrossFitter
from .damage import Damage, DamagePass
from .fit import Given
from .layer_stream import AttentionInputs
from .plan import check_run, measured_layer_plan


@dataclass(frozen=True)
class HalvesDamage(Damage):
    """As `Damage`, of replacements: `tried` says which layer and kind each row stands for."""

    tried: tuple[tuple[int, str], ...]

    replacement: ClassVar[str] = "becomes that of its column behind the bridge"

    def of_plan(self, layer_plan: list[str]) -> float:
        """The estimate for all layers of a plan together; a kind that was not tried costs nothing."""
        return self.of([row for row, (layer, kind) in enumerate(self.tried) if layer_plan[layer] == kind])

    def rows(self, kind: str, layers: range) -> list[int]:
        """The rows of one kind, by layer."""
        return [self.tried.index((layer, kind)) for layer in layers]

    def alone(self) -> dict[str, dict[int, float]]:
        """Kind -> layer -> damage of that replacement alone."""
        table: dict[str, dict[int, float]] = {}
        for (layer, kind), kl in zip(self.tried, self.matrix.diagonal().tolist(), strict=True):
            table.setdefault(kind, {})[layer] = kl
        return table

    def record(self) -> dict[str, dict[str, float]]:
        """As `alone`, rounded for a record."""
        return {
            kind: {str(layer): round(kl, 5) for layer, kl in column.items()} for kind, column in self.alone().items()
        }


class HalvesDamagePass(DamagePass):
    """`DamagePass` for the second generation."""

    config: HySparse2Config

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fitter = CrossFitter(self.config, self.stream, refit=self.refit)
        self.border = len(self.config.self_layer_plan)
        self.tried: list[tuple[int, str]] = []
        # What the last layer of the self-decoder gives to the bridge, and the layer before the present one would give.
        self.offered: list[torch.Tensor] = []
        self.given: list[Given] = []

    def replacements(
        self, index: int, layer: HySparseDecoderLayer, inputs: list[AttentionInputs]
    ) -> list[list[torch.Tensor]]:
        """As `DamagePass`'s; notes which kinds they are."""
        if index == self.border - 1:
            self.offered = [part.states for part in inputs]
            return []
        if index < self.border:
            self.tried.append((index, "window"))
            return [self.as_window(layer.self_attn.o_proj, inputs)]
        bias = 0.0 if layer.self_attn.o_proj.bias is None else layer.self_attn.o_proj.bias
        full = self.fitter.fit_full(layer, inputs, self.offered)
        fits = {"full": full}
        if self.given:
            fits["sparse"] = self.fitter.fit_sparse(layer, inputs, self.given)
        self.given = full.given
        self.tried += [(index, kind) for kind in fits]
        return [[output + bias for output in fit.outputs] for fit in fits.values()]

    def damage_of(self, matrix: torch.Tensor) -> HalvesDamage:
        """As `DamagePass`'s."""
        return HalvesDamage(matrix, tuple(self.tried))


def measured_halves(damage: HalvesDamage, config: HySparse2Config, longest_run: int) -> dict[str, list[str]]:
    """The plans of both halves with the least damage, with as many full layers in each as `config` has.

    Making layer i of the cross-decoder sparse and not full changes its row by g_i = s_i - f_i. With F the sum of all
    f, the damage of a set of sparse layers is that of F, plus 2 F g_i for each of them, plus g_i g_j for each pair.

    Args:
        damage (`HalvesDamage`): of every layer.
        config (`HySparse2Config`): of the regular plan.
        longest_run (`int`): window layers in a row, and sparse ones, at most.
    Raises:
        ValueError: so few full layers cannot keep all runs that short.
    """
    border, layers = len(config.self_layer_plan), len(config.layer_plan)
    windows = damage.rows("window", range(border - 1))
    # The last layer of the self-decoder stays full, as the first one does in `measured_layer_plan`.
    backwards = torch.nn.functional.pad(damage.matrix[windows][:, windows].flip(0, 1), (1, 0, 1, 0))
    in_self = measured_layer_plan(backwards, config.self_layer_plan.count("full"), longest_run)[::-1]
    full, sparse = damage.rows("full", range(border, layers)), damage.rows("sparse", range(border + 1, layers))
    change = torch.zeros(len(sparse), len(damage.matrix), dtype=damage.matrix.dtype)
    for place, row in enumerate(sparse):
        change[place, row], change[place, full[place + 1]] = 1.0, -1.0
    costs = change @ damage.matrix @ change.T
    costs.diagonal().add_(2 * (change @ damage.matrix)[:, full].sum(1))
    costs = torch.nn.functional.pad(costs, (1, 0, 1, 0))
    in_cross = measured_layer_plan(costs, config.cross_layer_plan.count("full"), longest_run)
    return {
        "self_layer_plan": ["window" if kind == "sparse" else kind for kind in in_self],
        "cross_layer_plan": in_cross,
    }


def check_halves(config: HySparse2Config, longest_run: int) -> None:
    """Raise `ValueError` if so few full layers leave longer runs in one of the halves."""
    for plan in (config.self_layer_plan, config.cross_layer_plan):
        check_run(len(plan), plan.count("full"), longest_run)
