"""A dense model layer by layer: weights of two layers at most are in memory, hidden states belong to the caller."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hysparse_hf.modeling.attention_hysparse import full_attention_with_oracle
from hysparse_hf.modeling.configuration_hysparse import HySparseConfig
from hysparse_hf.modeling.decoder_hysparse import HySparseDecoderLayer
from hysparse_hf.modeling.layers_hysparse import HySparseRMSNorm, HySparseRotaryEmbedding, rotate


# Target key -> tensor, of the mapped weights.
ReadTarget = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class AttentionInputs:
    """What one window's attention starts from: the normalised input `(1, length, hidden)`, query, key and value.

    Query and key are rotated; all three are `(1, heads or kv_heads, length, head_dim)`.
    """

    states: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Causal attention over all keys, `(length, heads, head_dim)`."""
        output = nn.functional.scaled_dot_product_attention(
            self.query, self.key, self.value, is_causal=True, enable_gqa=True
        )
        return by_token(output)

    def with_choice(self, config: HySparseConfig, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention over all keys, `(1, heads, length, head_dim)`, and the blocks of `budget` tokens in all
        that it chooses, as a full layer of `config` does.
        """
        output, _, indices = full_attention_with_oracle(
            self.query,
            self.key,
            self.value,
            block_size=config.oracle_block_size,
            n_selected=budget // config.oracle_block_size,
            block_reduction=config.oracle_block_reduction,
            head_reduction=config.oracle_head_reduction,
            forced_first_blocks=config.oracle_forced_first_blocks,
            forced_local_blocks=config.oracle_forced_local_blocks,
        )
        assert output is not None
        assert indices is not None
        return output, indices


def by_token(output: torch.Tensor) -> torch.Tensor:
    """`(1, heads, length, head_dim)` as `(length, heads, head_dim)`."""
    return output[0].transpose(0, 1)


class LayerStream:
    """The layers of a dense model, read one by one, in float32.

    Args:
        config (`HySparseConfig`): of the model; its plan and switches do not matter here.
        read (`ReadTarget`): gives the mapped weights.
    """

    def __init__(self, config: HySparseConfig, read: ReadTarget):
        self.config, self.read = config, read
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dense = copy.deepcopy(config)
        self.dense.layer_plan = ["full"] * config.num_hidden_layers
        self.dense.dense = True
        self.rotary = HySparseRotaryEmbedding(self.dense, "full").to(self.device)

    def embed(self, windows: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """The first layer's hidden states `(1, length, hidden)` of token ids `(length,)`."""
        embedding = self.read("model.embed_tokens.weight")
        return [embedding[ids][None].to(self.device, torch.float32) for ids in windows]

    def layer(self, index: int) -> HySparseDecoderLayer:
        """One layer with its weights."""
        with torch.device("meta"):
            layer = HySparseDecoderLayer(self.dense, index)
        state = {name: self._read(f"model.layers.{index}.{name}") for name in layer.state_dict()}
        layer.load_state_dict(state, assign=True)
        return layer.requires_grad_(False)

    def attention_inputs(self, layer: HySparseDecoderLayer, hidden: torch.Tensor) -> AttentionInputs:
        """Normalise, project and rotate the hidden states of one window."""
        attention = layer.self_attn
        states = layer.input_layernorm(hidden)
        query, key, value = (
            projection(states).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if self.config.use_qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        rotation = self.rotation(hidden)
        return AttentionInputs(states, rotate(query, rotation), rotate(key, rotation), value)

    def rotation(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines at the positions of a window, `(1, length, rotary_dim)`."""
        return self.rotary(hidden, torch.arange(hidden.shape[1], device=self.device)[None])

    def after_attention(
        self, layer: HySparseDecoderLayer, hidden: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        """Add the attention's output `(length, hidden)` and the feed-forward network's to the hidden states.

        Raises:
            ValueError: the sum holds NaN or infinity.
        """
        after = layer.feed_forward(hidden + attended[None])[0]
        if not after.isfinite().all():
            raise ValueError(
                f"the source must give finite numbers on the calibration text, got NaN or infinity after layer "
                f"{layer.self_attn.layer_idx}; look for weights that are not finite, there or in the embeddings."
            )
        return after

    def head(self) -> tuple[HySparseRMSNorm, torch.Tensor]:
        """The last norm, and the head's weight `(vocabulary, hidden)`."""
        norm = HySparseRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)
        norm.load_state_dict({"weight": self._read("model.norm.weight")}, assign=True)
        name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return norm.requires_grad_(False), self._read(name)

    def _read(self, key: str) -> torch.Tensor:
        return self.read(key).to(self.device, torch.float32)
