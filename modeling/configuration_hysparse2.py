"""Configuration of HySparse2, second generation (arXiv:2609.26368): what differs from the first.

Keep this file free of registrations: a checkpoint folder loads it as a separate copy.
"""

import math
from typing import Any, NoReturn

from huggingface_hub.dataclasses import strict

from .configuration_hysparse import HySparseConfig, regular_layer_plan


SELF_LAYER_KINDS = ("window", "full")
CROSS_LAYER_KINDS = ("full", "sparse")
# Stands in `bridge_map` for the self-decoder's last hidden states, as in YOCO (arXiv:2405.05254).
SELF_OUTPUT = "self_output"
CHOICES = {
    "bridge_source": ("normed", "residual"),
    "bridge_materialization": ("eager", "lazy"),
    "selection": ("token", "block", "all"),
    "recent_window": ("forced", "branch"),
}
# Without settings of one's own: channels that window layers turn, and their base; other layers know no positions.
WINDOW_ROTARY_DIM = 64
WINDOW_ROPE_THETA = 10000.0
BASELINES = ("dense", "hybrid_swa", "yoco")


def default_self_layer_plan(num_layers: int) -> list[str]:
    """Window layers with one full layer in the middle; of the paper's 25 layers that is layer 12."""
    return ["full" if i == num_layers // 2 else "window" for i in range(num_layers)]


def default_cross_layer_plan(num_layers: int, sparse_layers_per_full: int) -> list[str]:
    """One full layer, then `sparse_layers_per_full` sparse ones, repeated; `ValueError` for a negative number."""
    if sparse_layers_per_full < 0:
        raise ValueError(
            f"`sparse_layers_per_full` must be at least 0, got {sparse_layers_per_full}; 0 makes every layer full."
        )
    return ["sparse" if i % (sparse_layers_per_full + 1) else "full" for i in range(num_layers)]


def _rotary_factor(head_dim: int) -> float:
    """Share of a head's channels that window layers turn; times `head_dim` it is not below the even number meant."""
    width = min(WINDOW_ROTARY_DIM, head_dim - head_dim % 2)
    factor = width / head_dim
    return factor if int(head_dim * factor) == width else math.nextafter(factor, 1.0)


@strict
class HySparse2Config(HySparseConfig):
    r"""
    Configuration of a HySparse2 decoder: a self-decoder of window and full layers, then a cross-decoder of full and
    sparse layers whose full layers read keys and values that are projected from the self-decoder's states.

    Args: as in `HySparseConfig`, and:
        num_hidden_layers (`int`, *optional*): layers of both halves; default: as the plans say, or 49.
        self_layer_plan (`list[str]`, *optional*): `"window"` or `"full"` per layer; default: the larger half of the
            layers, its middle one full.
        cross_layer_plan (`list[str]`, *optional*): `"full"` or `"sparse"` per layer, the first one full; empty for a
            model that is all self-decoder. Default: the rest of the layers, from `sparse_layers_per_full`.
        layer_plan (`list[str]`, *optional*): derived: the two plans in a row.
        bridge_map (`list` or `int` or `str`, *optional*): per full layer of the cross-decoder the layer of the
            self-decoder whose input it projects keys and values from: the index of a full layer, or `"self_output"`
            for the self-decoder's last hidden states, behind a norm of their own. One entry serves all. Default: the
            last full layer of the self-decoder; `"self_output"` where it has none.
        bridge_source (`str`): `"normed"`, what the self layer's own projections read, or `"residual"`, the residual
            stream before it, behind a norm of the reading layer's own.
        bridge_materialization (`str`): `"eager"`: every forward projects its new positions; `"lazy"`: a cache keeps
            the states until a forward runs a position through the cross-decoder.
        bridge (`bool`): False makes the cross-decoder's full layers read keys and values of their own input.
        selection (`str`): `"token"`, `"block"` (as in the first generation) or `"all"`: what sparse layers read.
        recent_window (`str`): `"forced"`: the window joins the selection in one softmax; `"branch"`: it is a branch
            of its own, as `window_branch` says.
        oracle_budget (`int`): tokens selected beside a forced window; any number where single tokens are selected.
        oracle_block_size, oracle_block_reduction, oracle_forced_first_blocks, oracle_forced_local_blocks: read with
            `selection="block"` only, and window tokens are then not taken out of the ranking.
        rope_parameters (`dict`, *optional*): as in `HySparseConfig`; default: 64 channels of window layers turn, at a
            base of 10,000, and other layers have no position encoding.
        share_full_kv (`bool`): False gives each sparse layer its own full-length keys and values, by its own
            projection of the states that its full layer reads.

    Raises:
        ValueError: fields contradict each other; the message says what to change.

    ```python
    >>> from hysparse_hf import HySparse2Config
    >>> config = HySparse2Config(num_hidden_layers=7, sparse_layers_per_full=1)
    >>> config.self_layer_plan, config.cross_layer_plan, config.bridge_map
    (['window', 'window', 'full', 'window'], ['full', 'sparse', 'full'], [2, 2])
    ```
    """

    model_type = "hysparse2"

    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int | None = None
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 1
    head_dim: int | None = 256
    sparse_layers_per_full: int = 5
    window_layer_gate: bool = True

    self_layer_plan: list[str] | None = None
    cross_layer_plan: list[str] | None = None
    bridge_map: list[int | str] | int | str | None = None
    bridge_source: str = "normed"
    bridge_materialization: str = "eager"
    bridge: bool = True
    selection: str = "token"
    recent_window: str = "forced"

    def __post_init__(self, **kwargs):
        self._resolve_plans()
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.rope_parameters is None and self.head_dim > 0 and not kwargs.keys() & {"rope_scaling", "rope_theta"}:
            window = {"rope_theta": WINDOW_ROPE_THETA, "partial_rotary_factor": _rotary_factor(self.head_dim)}
            self.rope_parameters = {"full": None, "sparse": None, "window": window}
        super().__post_init__(**kwargs)

    def _resolve_plans(self) -> None:
        plans = [self.self_layer_plan, self.cross_layer_plan]
        if self.num_hidden_layers is None:
            self.num_hidden_layers = 49 if None in plans else sum(map(len, plans))
        total = self.num_hidden_layers
        if self.self_layer_plan is None:
            count = total - (total // 2 if self.cross_layer_plan is None else len(self.cross_layer_plan))
            self.self_layer_plan = default_self_layer_plan(count)
        if self.cross_layer_plan is None:
            count = total - len(self.self_layer_plan)
            self.cross_layer_plan = default_cross_layer_plan(count, self.sparse_layers_per_full)
        if self.layer_plan is None:
            self.layer_plan = self.self_layer_plan + self.cross_layer_plan
        self.bridge_map = self._bridge_sources()

    def _full_self_layers(self) -> list[int]:
        return [index for index, kind in enumerate(self.self_layer_plan) if kind == "full"]

    def _bridge_sources(self) -> list[int | str]:
        """`bridge_map` with an entry for each full layer of the cross-decoder."""
        if isinstance(self.bridge_map, list):
            return self.bridge_map
        one, full = self.bridge_map, self._full_self_layers()
        if one is None:
            one = full[-1] if full else SELF_OUTPUT
        return [one] * self.cross_layer_plan.count("full")

    @classmethod
    def paper_7b(cls, **changes: Any) -> NoReturn:
        """The first generation's: this paper has no such model.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "`paper_7b` is a model of the first generation, and the second's paper has none of that size; use "
            "`HySparseConfig.paper_7b()`, or `HySparse2Config.paper_80b_a3b()`."
        )

    @classmethod
    def paper_80b_a3b(cls, **changes: Any) -> "HySparse2Config":
        """The paper's mixture of experts of 80 billion parameters: 25 layers with one full layer, then 4 times 1:5.

        Stated there: layers, hidden size, heads, experts, ratio, budget, window, position encodings, gates per
        channel. Not stated, and chosen so that the total is 80.3 billion: the vocabulary, the experts' width, no
        shared expert, no experts in the first layer; and which of the 25 layers is full (12). A token uses 6.05
        billion beside the embeddings, more than the name says: 64 heads of 256 take 3.3 for queries and outputs and
        1.5 for gates.

        Args:
            changes: fields that shall differ.
        Source: HySparse2 (arXiv:2609.26368).
        """
        fields: dict[str, Any] = {
            "vocab_size": 128000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 49,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "num_experts": 512,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 496,
            "mlp_only_layers": [0],
            "sparse_layers_per_full": 5,
            "oracle_budget": 1024,
            "sliding_window": 128,
            "max_position_embeddings": 2**20,
        }
        return cls(**fields | changes)

    @classmethod
    def baseline(cls, name: str, num_hidden_layers: int, **changes: Any) -> "HySparse2Config":
        """A model to compare with, every layer rotating queries and keys alike.

        Args:
            name (`str`): `"dense"`: full layers only; `"hybrid_swa"`: a full layer, then `sparse_layers_per_full`
                window layers, repeated, the last layer full; `"yoco"`: window layers, then one full layer that reads
                the self-decoder's output, and layers that read all of its keys and values.
            num_hidden_layers (`int`): layers of the model.
            changes: fields that shall differ.
        Raises:
            ValueError: another name.
        Source: YOCO (arXiv:2405.05254) for the last.
        """
        if name not in BASELINES:
            raise ValueError(f"`name` must be one of {BASELINES}, got {name!r}; use one of these.")
        plain: dict[str, Any] = {
            "num_hidden_layers": num_hidden_layers,
            "rope_parameters": {"rope_theta": WINDOW_ROPE_THETA},
            "window_layer_gate": False,
        }
        ratio = changes.get("sparse_layers_per_full", cls.sparse_layers_per_full)
        hybrid = ["window" if kind == "sparse" else kind for kind in regular_layer_plan(num_hidden_layers, ratio)]
        cross = num_hidden_layers // 2
        particular: dict[str, dict[str, Any]] = {
            "dense": {"self_layer_plan": ["full"] * num_hidden_layers, "cross_layer_plan": []},
            "hybrid_swa": {"self_layer_plan": hybrid, "cross_layer_plan": []},
            "yoco": {
                "self_layer_plan": ["window"] * (num_hidden_layers - cross),
                "cross_layer_plan": default_cross_layer_plan(cross, cross),
                "bridge_map": SELF_OUTPUT,
                "selection": "all",
                "gate_granularity": "none",
                "attention_sink": False,
            },
        }
        return cls(**plain | particular[name] | changes)

    @property
    def bridge_plan(self) -> list[int | str | None]:
        """Per layer where its keys and values come from, as in `bridge_map`; None: its own input, or no keys."""
        plan: list[int | str | None] = [None] * len(self.layer_plan)
        if self.dense or not self.bridge:
            return plan
        cross = [index for index, kind in enumerate(self.layer_plan) if index >= len(self.self_layer_plan)]
        full = [index for index in cross if self.layer_plan[index] == "full"]
        sources = dict(zip(full, self._bridge_sources(), strict=True))
        for index in cross:
            if self.layer_plan[index] == "full":
                plan[index] = sources[index]
            elif not self.share_full_kv:
                plan[index] = sources[self.donor_plan[index]]
        return plan

    @property
    def leaves_early(self) -> bool:
        """Whether the cross-decoder runs only the positions whose logits are asked for, in a prompt."""
        no_own_keys = self.bridge and not self.dense and self.recent_window == "forced"
        return no_own_keys and bool(self.cross_layer_plan)

    def _cached_by(self, kind: str) -> str:
        no_window_of_own = kind == "sparse" and self.recent_window == "forced"
        if no_window_of_own and self.share_full_kv and not self.dense:
            return "none"
        return super()._cached_by(kind)

    def _check_plan(self) -> None:
        for field, kinds in (("self_layer_plan", SELF_LAYER_KINDS), ("cross_layer_plan", CROSS_LAYER_KINDS)):
            unknown = sorted(set(getattr(self, field)) - set(kinds))
            if unknown:
                raise ValueError(f"`{field}` entries must be among {kinds}, got {unknown}; correct them.")
        if not self.self_layer_plan:
            raise ValueError(
                "`self_layer_plan` must have at least one layer, got none; leave it out for the larger half of the "
                "layers, or give fewer to `cross_layer_plan`."
            )
        if self.cross_layer_plan and self.cross_layer_plan[0] != "full":
            raise ValueError(
                f"`cross_layer_plan` must begin with a full layer, got {self.cross_layer_plan}; its sparse layers "
                "read the full layer before them."
            )
        if self.layer_plan != self.self_layer_plan + self.cross_layer_plan:
            raise ValueError(
                f"`layer_plan` must be `self_layer_plan` and `cross_layer_plan` in a row, got {self.layer_plan} for "
                f"{self.self_layer_plan} and {self.cross_layer_plan}; leave it out and give the two."
            )
        if len(self.layer_plan) != self.num_hidden_layers:
            raise ValueError(
                "`self_layer_plan` and `cross_layer_plan` must have `num_hidden_layers` "
                f"({self.num_hidden_layers}) entries together, got {len(self.layer_plan)}; leave one of the three out."
            )
        super()._check_plan()
        self._check_bridge()

    def _check_bridge(self) -> None:
        count, given = self.cross_layer_plan.count("full"), self._bridge_sources()
        if len(given) != count:
            raise ValueError(
                f"`bridge_map` must have one entry per full layer of the cross-decoder ({count}), got "
                f"{len(given)}; give one that serves all, or leave it out."
            )
        full = self._full_self_layers()
        unknown = [entry for entry in given if entry not in (*full, SELF_OUTPUT)]
        if unknown:
            raise ValueError(
                f"`bridge_map` entries must be full layers of the self-decoder ({full}) or {SELF_OUTPUT!r}, got "
                f"{unknown}; correct them."
            )

    def _check_selection(self) -> None:
        if self.selection == "block":
            super()._check_selection()
        elif self.oracle_budget < 1:
            raise ValueError(f"`oracle_budget` must be at least 1 token, got {self.oracle_budget}; 1024 is usual.")

    def _check_switches(self) -> None:
        super()._check_switches()
        self._check_choices(CHOICES)
        if self.recent_window == "forced" and self.window_branch != "own":
            raise ValueError(
                f"`window_branch={self.window_branch!r}` describes a window branch, but with `recent_window='forced'` "
                "the window joins the selection; set `recent_window='branch'`, or leave `window_branch` out."
            )
        if self.selection == "all" and (self.recent_window == "branch" or not self.share_oracle):
            raise ValueError(
                "`selection='all'` leaves nothing to select and no window to add, got "
                f"`recent_window={self.recent_window!r}` and `share_oracle={self.share_oracle}`; leave both out."
            )


__all__ = ["HySparse2Config"]
