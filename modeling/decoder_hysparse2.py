"""The second generation's decoder layer: what differs from the first (see `decoder_hysparse`)."""

from collections.abc import Sequence

import torch

from .attention_hysparse import full_attention_with_token_oracle, sliding_window_attention, token_sparse_attention
from .cache_hysparse import HySparseCache
from .cache_pending_hysparse import PendingStates
from .configuration_hysparse2 import SELF_OUTPUT, HySparse2Config
from .decoder_hysparse import HySparseAttention, HySparseDecoderLayer, States
from .layers_hysparse import HySparseRMSNorm, Rotation
from .rows_hysparse import TokenLayout


class HySparse2Attention(HySparseAttention):
    """Attention of one layer of either half.

    A layer of the cross-decoder may project its keys and values from a state of the self-decoder: of every new token,
    while its queries are those of a few. A sparse layer reads the window and the selected tokens in one softmax.
    """

    def __init__(self, config: HySparse2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.source = config.bridge_plan[layer_idx]
        self.offers_states = config.bridge_source == "normed" and layer_idx in config.bridge_plan
        if config.bridge_source == "residual" and self.source not in (None, SELF_OUTPUT):
            self.bridge_norm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps, config)

    @property
    def n_selected(self) -> int:
        """Tokens or blocks selected per query and KV head; 0 where everything is read."""
        if self.config.selection == "block":
            return super().n_selected
        return self.config.oracle_budget if self.config.selection == "token" else 0

    @property
    def forced_window(self) -> int:
        """Tokens that every sparse query reads beside its selection, in the same softmax."""
        return self.config.sliding_window if self.config.recent_window == "forced" else 0

    @property
    def adds_branches_at_once(self) -> bool:
        return self.config.selection == "block" and super().adds_branches_at_once

    def _window_branch(self) -> str:
        return "merged_shared" if self.config.recent_window == "forced" else super()._window_branch()

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        shared_key: torch.Tensor | None = None,
        shared_value: torch.Tensor | None = None,
        shared_indices: torch.Tensor | None = None,
        shared_layouts: tuple | None = None,
        bridged_states: torch.Tensor | None = None,
        *,
        key_layout: TokenLayout,
        key_rotations: dict[str, Rotation],
        pending: Sequence[PendingStates] = (),
        cache: HySparseCache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """As the first generation's, which returns six; the seventh is what others project keys and values from.

        Args:
            bridged_states (`torch.Tensor`, *optional*): `(batch, new, hidden)`, all new tokens in slot order, from
                the self-decoder: what this layer's keys and values are projected from.
            key_layout (`TokenLayout`), key_rotations (`dict`): of all new tokens; `layout` and `rotations` are those
                of `hidden_states`.
            pending (`Sequence[PendingStates]`): earlier tokens whose keys and values are still to be made.
        """
        own_states = None
        if bridged_states is not None:
            own_states = self.bridged_keys_and_values(bridged_states, key_layout, key_rotations, pending, cache)
        results = super().forward(
            hidden_states,
            shared_key,
            shared_value,
            shared_indices,
            shared_layouts,
            cache=cache,
            own_states=own_states,
            **kwargs,
        )
        return *results, hidden_states if self.offers_states else None

    def bridged_keys_and_values(
        self,
        states: torch.Tensor,
        layout: TokenLayout,
        rotations: dict[str, Rotation],
        pending: Sequence[PendingStates],
        cache: HySparseCache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `keys_and_values`, of the self-decoder's states, earlier ones first."""
        for earlier in pending:
            self.bridged_keys_and_values(earlier.states[self.source], earlier.layout, earlier.rotations, (), cache)
        if hasattr(self, "bridge_norm"):
            states = self.bridge_norm(states)
        return self.keys_and_values(states, layout, rotations, cache)

    def _full(self, states: States, layout: TokenLayout, n_selected: int, options: dict):
        if self.config.selection != "token" or not n_selected:
            return super()._full(states, layout, n_selected, options)
        output, _, indices, *weights = full_attention_with_token_oracle(
            *states,
            n_selected=n_selected,
            window=self.forced_window,
            scaling=self.scaling,
            rows=layout.rows,
            head_reduction=self.config.oracle_head_reduction,
            **options,
        )
        return output, indices, weights[0] if weights else None

    def _layouts(self, states: States, indices: torch.Tensor, layout: TokenLayout) -> tuple | None:
        return super()._layouts(states, indices, layout) if self.config.selection == "block" else None

    def _global(self, states: States, indices: torch.Tensor, layout: TokenLayout, options: dict, **asked):
        if self.config.selection == "block":
            return super()._global(states, indices, layout, options, **asked)
        options = {"scaling": self.scaling, "rows": layout.rows, "window": 0, **options, **asked}
        if self.config.selection == "token":
            return token_sparse_attention(*states, indices, **options)
        return sliding_window_attention(*states, **options | {"window": states[1].shape[2]})


class HySparse2DecoderLayer(HySparseDecoderLayer):
    """A layer of either half; without rows in `hidden_states` it only adds keys and values to the cache."""

    attention_class = HySparse2Attention
    self_attn: HySparse2Attention

    def forward(
        self,
        hidden_states: torch.Tensor,
        *shared: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """As the first generation's; before the router's logits stands what others project keys and values from."""
        if hidden_states.shape[1]:
            return super().forward(hidden_states, *shared, **kwargs)
        *_, bridged_states = shared
        if bridged_states is not None:
            names = ("key_layout", "key_rotations", "pending", "cache")
            self.self_attn.bridged_keys_and_values(bridged_states, *(kwargs[name] for name in names))
        return hidden_states, *(None,) * 6
