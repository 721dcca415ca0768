"""What windows in a self-decoder cost, measured as in `damage`, and the plan with the least cost.

Each layer of the self-decoder but the last, which the bridge reads, is tried as the window that it can be fitted to.
The cross-decoder keeps its regular plan. What its layers lose depends on all that stands between them and the bridge:
measured one by one, they gave plans that started further from the source (docs/converting.md).
"""

import torch

from hysparse_hf.modeling.configuration_hysparse2 import HySparse2Config
from hysparse_hf.modeling.decoder_hysparse import HySparseDecoderLayer

from .damage import Damage, DamagePass
from .layer_stream import AttentionInputs
from .plan import check_run, measured_layer_plan


class HalvesDamagePass(DamagePass):
    """`DamagePass` for the second generation."""

    config: HySparse2Config

    def replacements(
        self, index: int, layer: HySparseDecoderLayer, inputs: list[AttentionInputs]
    ) -> list[list[torch.Tensor]]:
        """As `DamagePass`'s; nothing from the bridge's layer on."""
        if index >= len(self.config.self_layer_plan) - 1:
            return []
        return [self.as_window(layer.self_attn.o_proj, inputs)]

    def damage_of(self, matrix: torch.Tensor) -> Damage:
        """As `DamagePass`'s, of the self-decoder without its last layer."""
        return Damage(matrix, self.text, kind="window")


def measured_halves(damage: Damage, config: HySparse2Config, longest_run: int) -> dict[str, list[str]]:
    """The plan with the least damage in the self-decoder, and as many full layers there as `config` has.

    Args:
        damage (`Damage`): of every layer of the self-decoder but its last.
        config (`HySparse2Config`): of the regular plan.
        longest_run (`int`): window layers in a row, at most.
    Raises:
        ValueError: so few full layers cannot keep all runs that short.
    """
    # The last layer of the self-decoder stays full, as the first one does in `measured_layer_plan`.
    backwards = torch.nn.functional.pad(damage.matrix.flip(0, 1), (1, 0, 1, 0))
    in_self = measured_layer_plan(backwards, config.self_layer_plan.count("full"), longest_run)[::-1]
    return {
        "self_layer_plan": ["window" if kind == "sparse" else kind for kind in in_self],
        "cross_layer_plan": config.cross_layer_plan,
    }


def check_halves(config: HySparse2Config, longest_run: int) -> None:
    """Raise `ValueError` if so few full layers leave longer runs of windows in the self-decoder."""
    check_run(len(config.self_layer_plan), config.self_layer_plan.count("full"), longest_run)
