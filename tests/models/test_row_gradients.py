"""Training on padded or packed rows: every gradient is that of the rows alone."""

import pytest
import torch
from models.tiny import SWITCHES, VOCAB_SIZE, draw_ids, padded_mask, spread, tiny_model


LENGTHS = (33, 20, 41)
ROWS = [draw_ids(1, length, seed=length)[0] for length in LENGTHS]

switches = pytest.mark.parametrize("switch", ["default", "merged_own", "own_oracle", "window_layers"])


def directions():
    """Per row the weights `(length, vocabulary)` of a random linear function of its logits."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(length, VOCAB_SIZE, generator=generator, dtype=torch.float64) for length in LENGTHS]


def gradients(model, outcome):
    model.zero_grad()
    outcome.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_gradients_of_rows_alone(model, outcome):
    together = gradients(model, outcome)
    alone = sum(
        (model(tokens[None], use_cache=False).logits[0] * direction).sum()
        for tokens, direction in zip(ROWS, directions(), strict=True)
    )
    for name, expected in gradients(model, alone).items():
        scale = expected.abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(
            together[name], expected, rtol=0, atol=1e-10 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@switches
def test_padded_rows(switch, kind, checkpointing):
    model = tiny_model(torch.float64, **SWITCHES[switch]).train()
    mask = padded_mask(kind, LENGTHS, 45)
    ids = spread(ROWS, mask)
    if checkpointing:
        model.gradient_checkpointing_enable()
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    outcome = (logits[mask.bool()] * torch.cat(directions())).sum()
    assert_gradients_of_rows_alone(model, outcome)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@switches
def test_packed_rows_F12(switch, by, checkpointing):
    model = tiny_model(torch.float64, **SWITCHES[switch]).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    if by == "position_ids":
        borders = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
    else:
        borders = {"cu_seq_lens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int()}
    logits = model(torch.cat(ROWS)[None], use_cache=False, **borders).logits[0]
    assert_gradients_of_rows_alone(model, (logits * torch.cat(directions())).sum())
