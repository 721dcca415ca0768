"""Sparse layers follow the full layer before them, and its choice is what its own probabilities say."""

import pytest
import torch
from models.tiny import SWITCHES, assert_same_logits, changed_layer_output, draw_ids, tiny_model

import hysparse_hf.modeling.decoder_hysparse as decoder


DONOR_SWITCHES = ["default", "no_window", "merged_shared", "own_kv"]


def rolled(indices):
    """Other valid blocks than the chosen ones, where a query sees enough of them."""
    last = torch.arange(indices.shape[2])[:, None] // 4
    return torch.where(indices < 0, indices, (indices + 1) % (last + 1)).to(indices.dtype)


@pytest.mark.parametrize(
    ("part", "change"), [(1, torch.neg), (2, torch.neg), (3, rolled)], ids=["key", "value", "ids"]
)
@pytest.mark.parametrize("switch", DONOR_SWITCHES)
@torch.no_grad()
def test_B08_sparse_layers_follow_their_own_donor(switch, part, change):
    model = tiny_model(torch.float64, **SWITCHES[switch])
    ids = draw_ids(1, 64)  # eight times the budget

    def edit(parts):
        parts[part] = change(parts[part])

    plain = model(ids, output_hidden_states=True)
    with changed_layer_output(model, 3, edit):
        late = model(ids, output_hidden_states=True)
    with changed_layer_output(model, 0, edit):
        early = model(ids, output_hidden_states=True)
    moved = [
        [(a - b).abs().max().item() > 1e-3 for a, b in zip(changed.hidden_states, plain.hidden_states, strict=True)]
        for changed in (early, late)
    ]
    if switch == "own_kv" and part != 3:
        assert moved == [[False] * 7] * 2
        return
    # hidden_states[i] is what enters layer i; the last is what leaves the model.
    assert moved == [[False, False] + [True] * 5, [False] * 5 + [True] * 2]
    assert (early.logits - plain.logits).abs().max() > 1e-2
    assert (late.logits - plain.logits).abs().max() > 1e-2


@torch.no_grad()
def test_B08_sparse_layers_receive_the_preceding_full_layers_tensors():
    model = tiny_model()
    given, received = {}, {}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _, args, output, n=number: given.update({n: output[1:5]}))
        layer.self_attn.register_forward_pre_hook(lambda _, args, n=number: received.update({n: args[1:]}))
    output = model(draw_ids(1, 64), output_selected_indices=True)
    for number, donor in enumerate(model.config.donor_plan):
        if donor is not None:
            assert all(a is b for a, b in zip(received[number], given[donor], strict=True))
    assert torch.equal(given[0][2], output.selected_indices[0])
    assert torch.equal(given[3][2], output.selected_indices[1])


@pytest.mark.parametrize("budget", [64, 8], ids=["covering", "small"])
@torch.no_grad()
def test_B08_a_budget_that_covers_everything_is_dense_attention(budget, monkeypatch):
    switches = {"window_branch": "none", "gate_granularity": "none", "attention_sink": False, "oracle_budget": budget}
    model = tiny_model(torch.float64, **switches)
    ids = draw_ids(1, 64)
    sparse = model(ids).logits

    def dense(query, key, value, indices, *, block_size, sink=None, window=0, backend, return_weights, **options):
        return decoder.full_attention_with_oracle(query, key, value, block_size=4, n_selected=0, **options)[0]

    monkeypatch.setattr(decoder, "block_sparse_attention", dense)
    expected = model(ids).logits
    if budget == 64:
        assert_same_logits(sparse, expected)
    else:
        assert (sparse - expected).abs().max() > 1e-2


@torch.no_grad()
def test_B08_own_keys_and_a_covering_budget_equal_the_dense_switch():
    switches = {"share_full_kv": False, "window_branch": "none", "gate_granularity": "none", "attention_sink": False}
    sparse = tiny_model(torch.float64, oracle_budget=64, **switches)
    dense = tiny_model(torch.float64, oracle_budget=64, dense=True, **switches)
    dense.load_state_dict(sparse.state_dict())
    ids = draw_ids(2, 64)
    assert_same_logits(sparse(ids).logits, dense(ids).logits)


@pytest.mark.parametrize(("block", "head"), [("max", "max"), ("sum", "max"), ("max", "mean"), ("sum", "mean")])
@torch.no_grad()
def test_B09_the_chosen_blocks_have_the_highest_scores(block, head):
    model = tiny_model(torch.float64, oracle_block_reduction=block, oracle_head_reduction=head)
    output = model(draw_ids(1, 96), output_attentions=True, output_selected_indices=True)
    for layer, indices in zip((0, 3), output.selected_indices, strict=True):
        weights = output.attentions[layer][0].unflatten(0, (2, 2)).unflatten(-1, (24, 4))
        scores = weights.amax(-1) if block == "max" else weights.sum(-1)
        scores = scores.amax(1) if head == "max" else scores.mean(1)
        for group in range(2):
            for query in range(96):
                seen = query // 4 + 1
                # Lower ids come first and a stable sort keeps them there: the tie rule.
                order = scores[group, query, :seen].sort(descending=True, stable=True).indices[:2].tolist()
                expected = sorted(order) + [-1] * (2 - min(seen, 2))
                assert indices[0, group, query].tolist() == expected
