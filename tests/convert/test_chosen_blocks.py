"""A converted model's first full layer chooses the blocks that the source itself attends to most."""

import pytest
import torch

from hysparse_hf import HySparseForCausalLM


FAMILIES = {
    "llama": ("Llama", {}),
    "llama-scaled": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}
BLOCK, CHOSEN = 8, 2


@pytest.mark.parametrize(("family", "overrides"), FAMILIES.values(), ids=FAMILIES)
@torch.no_grad()
def test_blocks_are_the_best_by_the_sources_own_attention_B09(make_source, convert_naive, family, overrides):
    source, model = make_source(family, **overrides)
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 97, (1, 96), generator=torch.Generator().manual_seed(1))
    # The first layer sees the same embeddings in both models: (KV groups, heads of a group, queries, blocks, tokens).
    maps = model(ids, output_attentions=True).attentions[0][0].unflatten(0, (2, 2)).unflatten(-1, (-1, BLOCK))
    scores = maps.amax(-1).amax(1)
    converted = HySparseForCausalLM.from_pretrained(convert_naive(source, budget=BLOCK * CHOSEN, block_size=BLOCK))
    indices = converted(ids, output_selected_indices=True).selected_indices[0][0]
    for group in range(2):
        for query in range(96):
            seen = query // BLOCK + 1
            chosen = indices[group, query, : min(seen, CHOSEN)].long()
            assert (chosen >= 0).all()
            row = scores[group, query, :seen]
            others = row[torch.ones(seen, dtype=torch.bool).index_fill(0, chosen, False)]
            assert len(others) == max(seen - CHOSEN, 0)
            assert (others <= row[chosen].min() * (1 + 1e-5)).all()
