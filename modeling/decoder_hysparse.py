"""One decoder layer: attention of its kind, then the feed-forward network."""

from functools import reduce

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_hysparse import (
    block_sparse_attention,
    full_attention_with_oracle,
    merge_branches,
    selection_layouts,
    sliding_window_attention,
    sparse_layer_attention,
)
from .cache_hysparse import HySparseCache
from .configuration_hysparse import HySparseConfig
from .dispatch_hysparse import backend_of
from .layers_hysparse import HySparseMLP, HySparseRMSNorm, Rotation, rotate
from .moe_hysparse import HySparseMoE
from .prompt_end_hysparse import PromptEnd, tokens_at
from .rows_hysparse import Rows, TokenLayout


# Query, key and value of one branch.
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class HySparseGate(nn.Linear):
    """Projection of a gate, with bias; zero from scratch."""


class HySparseAttention(nn.Module):
    """Attention of one layer; `layer_plan[layer_idx]` says which kind.

    A full layer returns its keys, values, selected blocks and what kernels read in their place beside its output. A
    sparse layer takes them and adds, gated, a global branch over the selected blocks and a local branch over its own
    window. The tensors between the two are compact (see `TokenLayout`): one column per content position.
    """

    def __init__(self, config: HySparseConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.kind = config.layer_plan[layer_idx]
        self.is_causal = True
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = self.num_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = self.head_dim**-0.5
        self.turns_as_full = config.rope_for(self.kind) == config.rope_for("full")
        self.is_read_by_others = not config.dense and layer_idx in config.donor_plan
        self.window_branch = self._window_branch()
        self.branches = self._branches()

        hidden, bias = config.hidden_size, config.attention_bias
        kv_heads = config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        if config.cache_plan[layer_idx] != "none":
            self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
            self.v_proj = nn.Linear(hidden, kv_heads * self.v_head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, hidden, bias=config.attention_output_bias)
        if config.use_qk_norm:
            self.q_norm = HySparseRMSNorm(self.head_dim, config.rms_norm_eps, config)
            if config.cache_plan[layer_idx] != "none":
                self.k_norm = HySparseRMSNorm(self.head_dim, config.rms_norm_eps, config)

        widths = {"elementwise": self.num_heads * self.v_head_dim, "headwise": self.num_heads, "none": 0}
        for branch in self._gated_branches(widths[config.gate_granularity]):
            setattr(self, f"gate_{branch}_proj", HySparseGate(hidden, widths[config.gate_granularity]))
        for branch in self.branches if config.attention_sink and self.kind != "full" else ():
            setattr(self, f"sink_{branch}", nn.Parameter(torch.empty(self.num_heads)))

    @property
    def n_selected(self) -> int:
        """Blocks selected per query and KV head."""
        return self.config.oracle_budget // self.config.oracle_block_size

    @property
    def adds_branches_at_once(self) -> bool:
        """Whether both branches are one operation, where no attention map is wanted."""
        return self.branches == ("global", "local")

    def _window_branch(self) -> str:
        """Which window a sparse layer has, in the words of `config.window_branch`."""
        return self.config.window_branch

    def _branches(self) -> tuple[str, ...]:
        if self.kind == "full":
            return ("full",)
        if self.kind == "window":
            return ("local",)
        # A window merged into the global softmax has no gate or sink of its own.
        return ("global", "local") if self.window_branch in ("own", "shared_kv") else ("global",)

    def _gated_branches(self, width: int) -> tuple[str, ...]:
        gated = {"full": self.config.full_layer_gate, "window": self.config.window_layer_gate, "sparse": True}
        return self.branches if width and gated[self.kind] else ()

    def forward(
        self,
        hidden_states: torch.Tensor,
        shared_key: torch.Tensor | None = None,
        shared_value: torch.Tensor | None = None,
        shared_indices: torch.Tensor | None = None,
        shared_layouts: tuple | None = None,
        *,
        layout: TokenLayout,
        rotations: dict[str, Rotation],
        cache: HySparseCache | None = None,
        own_states: tuple[torch.Tensor, torch.Tensor] | None = None,
        output_attentions: bool = False,
        output_selected_indices: bool = False,
    ) -> tuple:
        """Returns `(output, weights, key, value, indices, layouts)`; the last four are None where nobody reads them.

        Shapes: hidden_states `(batch, q_len, hidden)`; shared_key `(batch, kv_heads, kv_len, head_dim)`;
        shared_indices int32 `(batch, kv_heads, q_len, n_selected)`; weights `(batch, heads, q_len, kv_len)`.
        `own_states` are the layer's keys and values where they are not made from `hidden_states`.
        """
        layout = layout.to(hidden_states.device)
        query = self._heads(self.q_proj, hidden_states, "q_norm")
        indices = layouts = None
        options = {"return_weights": output_attentions, "backend": self._backend()}
        own_query = self._turned(query, rotations[self.kind], layout)
        if own_states is None and hasattr(self, "k_proj"):
            own_states = self.keys_and_values(hidden_states, layout, rotations, cache)
        key, value = own_states or (None, None)

        own = (own_query, key, value)
        if self.kind == "full" or self.config.dense:
            selects = (self.is_read_by_others and self.config.share_oracle) or output_selected_indices
            n_selected = self.n_selected if selects and self.kind == "full" else 0
            output, indices, weights = self._full(own, layout, n_selected, options)
            results = {"full": (output, weights)}
            if self.is_read_by_others and self.config.share_oracle and indices is not None:
                layouts = self._layouts(own, indices, layout)
        elif self.kind == "window":
            results = {"local": self._window_of_own(own, layout, options)}
        else:
            shared_query = own_query if self.turns_as_full else self._turned(query, rotations["full"], layout)
            shared = (shared_query, shared_key, shared_value)
            selection = (shared_indices, shared_layouts)
            results = self._sparse(own, shared, selection, hidden_states, layout, options)

        gated = [self._gate(branch, hidden_states, layout, *result) for branch, result in results.items()]
        outputs, maps = zip(*gated, strict=True)
        output = self.o_proj(reduce(torch.add, outputs))
        weights = reduce(torch.add, maps) if output_attentions else None
        read = self.is_read_by_others
        return output, weights, key if read else None, value if read else None, indices, layouts

    def keys_and_values(
        self,
        hidden_states: torch.Tensor,
        layout: TokenLayout,
        rotations: dict[str, Rotation],
        cache: HySparseCache | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project states in slot order into compact keys and values; with a cache, add them and return all."""
        layout = layout.to(hidden_states.device)
        key = self._turned(self._heads(self.k_proj, hidden_states, "k_norm"), rotations[self.kind], layout)
        value = layout.compact(self._heads(self.v_proj, hidden_states))
        return (key, value) if cache is None else cache.update(key, value, self.layer_idx, layout=layout)

    def _backend(self) -> str:
        return backend_of(self.config)

    def _turned(self, states: torch.Tensor, rotation: Rotation, layout: TokenLayout) -> torch.Tensor:
        """Queries or keys in slot order, turned by their positions, in compact order."""
        return layout.compact(rotate(states, rotation, backend=self._backend()))

    def _heads(self, projection: nn.Module, hidden_states: torch.Tensor, norm: str = "") -> torch.Tensor:
        dim = self.v_head_dim if norm == "" else self.head_dim
        states = projection(hidden_states).unflatten(-1, (-1, dim))
        if self.config.use_qk_norm and norm:
            # A float32 norm under autocast must not set queries and keys apart from the values.
            states = getattr(self, norm)(states).to(states.dtype)
        return states.transpose(1, 2)

    def _sink(self, branch: str) -> torch.Tensor | None:
        """The branch's sinks `(heads,)`; under tensor parallelism this rank's part of them."""
        sink = getattr(self, f"sink_{branch}", None)
        return sink.to_local() if hasattr(sink, "to_local") else sink

    def _full(self, states: States, layout: TokenLayout, n_selected: int, options: dict):
        output, _, indices, *weights = full_attention_with_oracle(
            *states,
            block_size=self.config.oracle_block_size,
            n_selected=n_selected,
            scaling=self.scaling,
            rows=layout.rows,
            block_reduction=self.config.oracle_block_reduction,
            head_reduction=self.config.oracle_head_reduction,
            forced_first_blocks=self.config.oracle_forced_first_blocks,
            forced_local_blocks=self.config.oracle_forced_local_blocks,
            **options,
        )
        return output, indices, weights[0] if weights else None

    def _local(self, states: States, rows: Rows, options: dict, **asked):
        return sliding_window_attention(
            *states,
            window=self.config.sliding_window,
            scaling=self.scaling,
            rows=rows,
            **options | asked,
        )

    def _global(self, states: States, indices: torch.Tensor, layout: TokenLayout, options: dict, **asked):
        return block_sparse_attention(
            *states,
            indices,
            block_size=self.config.oracle_block_size,
            scaling=self.scaling,
            rows=layout.rows,
            **options | asked,
        )

    def _window_of_own(self, own: States, layout: TokenLayout, options: dict):
        """The local branch over the window cache's states; its map is placed among all columns."""
        rows = layout.window_rows(own[1].shape[2])
        result = self._local(own, rows, options, sink=self._sink("local"))
        output, weights = _with_weights(result)
        return output, None if weights is None else layout.window_in_history(weights)

    def _layouts(self, states: States, indices: torch.Tensor, layout: TokenLayout) -> tuple | None:
        """What the kernels of all layers that read this selection share."""
        return selection_layouts(
            *states, indices, block_size=self.config.oracle_block_size, rows=layout.rows, backend=self._backend()
        )

    def _sparse(
        self, own: States, shared: States, selection: tuple, hidden_states, layout: TokenLayout, options: dict
    ) -> dict:
        """Branches of a sparse layer, each `(output, weights)`, from its own states and the full layer's."""
        branch = self.window_branch
        history = shared if self.config.share_full_kv else own
        indices, layouts = selection
        if not self.config.share_oracle:
            detached = (history[0].detach(), history[1].detach(), history[2].detach())
            indices = self._full(detached, layout, self.n_selected, {**options, "return_weights": False})[1]
        sinks = {name: self._sink(name) for name in self.branches}
        if branch == "merged_own" and self.config.share_full_kv:
            return {"global": self._merged(own, history, indices, sinks["global"], layout, options)}
        has_own_window = branch == "own" and self.config.share_full_kv
        if self.adds_branches_at_once and not options["return_weights"]:
            local = own if has_own_window else history
            output = sparse_layer_attention(
                *history,
                indices,
                *local,
                block_size=self.config.oracle_block_size,
                window=self.config.sliding_window,
                gate_global=self._gate_logits("global", hidden_states, layout),
                gate_local=self._gate_logits("local", hidden_states, layout),
                sink_global=sinks["global"],
                sink_local=sinks["local"],
                scaling=self.scaling,
                rows=layout.rows,
                window_rows=layout.window_rows(local[1].shape[2]) if has_own_window else layout.rows,
                layouts=layouts,
                backend=options["backend"],
            )
            return {"both": (output, None)}
        merged = self.config.sliding_window if branch.startswith("merged") else 0
        result = self._global(history, indices, layout, options, sink=sinks["global"], window=merged)
        results = {"global": _with_weights(result)}
        if has_own_window:
            results["local"] = self._window_of_own(own, layout, options)
        elif branch in ("own", "shared_kv"):
            results["local"] = _with_weights(self._local(history, layout.rows, options, sink=sinks["local"]))
        return results

    def _merged(self, own: States, history: States, indices, sink, layout: TokenLayout, options: dict):
        """One softmax over selected shared keys and the layer's own window (control experiment 11)."""
        parts = (
            self._global(history, indices, layout, options, return_lse=True),
            self._local(own, layout.window_rows(own[1].shape[2]), options, return_lse=True),
        )
        output, shares = merge_branches((parts[0][0], parts[1][0]), (parts[0][1], parts[1][1]), sink)
        if not options["return_weights"]:
            return output, None
        maps = [share[..., None] * part[2] for share, part in zip(shares, parts, strict=True)]
        return output, maps[0] + layout.window_in_history(maps[1])

    def _gate_logits(self, branch: str, hidden_states: torch.Tensor, layout: TokenLayout) -> torch.Tensor | None:
        """Logits of a branch's gate in compact order, `(batch, heads, q_len, v_head_dim or 1)`, or None without."""
        projection = getattr(self, f"gate_{branch}_proj", None)
        if projection is None or self.config.dense:
            return None
        width = self.v_head_dim if self.config.gate_granularity == "elementwise" else 1
        return layout.compact(projection(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2))

    def _gate(self, branch: str, hidden_states: torch.Tensor, layout: TokenLayout, output, weights):
        """A branch times its gate, back in slot order, `(batch, q_len, heads * v_head_dim)`."""
        logits = self._gate_logits(branch, hidden_states, layout)
        if logits is not None:
            gate = torch.sigmoid(logits)
            output = output * gate
            weights = None if weights is None else weights * gate.mean(-1, keepdim=True)
        output = layout.restore(output).transpose(1, 2).flatten(-2)
        return output, None if weights is None else layout.restore_weights(weights)


def _with_weights(result):
    return result if isinstance(result, tuple) else (result, None)


class HySparseDecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward network, each behind a norm and added to the residual stream."""

    attention_class: type[HySparseAttention] = HySparseAttention

    def __init__(self, config: HySparseConfig, layer_idx: int):
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = HySparseMoE(config) if config.moe_plan[layer_idx] else HySparseMLP(config)
        self.input_layernorm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps, config)
        self.post_attention_layernorm = HySparseRMSNorm(config.hidden_size, config.rms_norm_eps, config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *shared: torch.Tensor | None,
        end: PromptEnd | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """Takes tensors of other layers as `self_attn` does, and returns `(hidden_states, *, router_logits)`: what it
        returns behind its weights, and the logits `(batch * q_len, experts)` of a mixture of experts or None.

        With `end` the keys and values are those of all tokens, and everything else is of the last ones.
        Tensors with gradients from another layer are positional, and those that leave are returned: keyword tensors
        and recorded ones lose theirs under reentrant checkpointing.
        """
        normed = self.input_layernorm(hidden_states)
        if end is not None:
            given_to_all = (kwargs[name] for name in ("layout", "rotations", "cache"))
            kwargs["own_states"] = self.self_attn.keys_and_values(normed, *given_to_all)
            kwargs |= {"layout": end.layout, "rotations": end.rotations}
            hidden_states, normed = tokens_at(hidden_states, end.slots), tokens_at(normed, end.slots)
        attended, _, *given = self.self_attn(normed, *shared, **kwargs)
        hidden_states, router_logits = self.feed_forward(hidden_states + attended)
        return hidden_states, *given, router_logits

    def feed_forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states plus what the network makes of them; with a mixture of experts also the router's logits."""
        fed = self.mlp(self.post_attention_layernorm(hidden_states))
        fed, router_logits = fed if isinstance(fed, tuple) else (fed, None)
        return hidden_states + fed, router_logits
