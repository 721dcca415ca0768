"""Packed documents: they begin where positions restart, or at `cu_seq_lens_q`; with a mask, among visible tokens."""

import pytest
import torch
from models.tiny import CACHE_NAMES, assert_same_logits, draw_ids, tiny_config, tiny_model

from hysparse_hf import HySparseCache
from hysparse_hf.modeling.compat_transformers import cache_of


LENGTHS = (12, 1, 18)


def packed_input():
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(2, 61, (1, length), generator=generator) for length in LENGTHS]
    positions = [torch.arange(length)[None] for length in LENGTHS]
    return documents, torch.cat(documents, 1), torch.cat(positions, 1)


@torch.no_grad()
def alone(model, documents):
    return torch.cat([model(document).logits for document in documents], 1)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@torch.no_grad()
def test_F12_packed_documents_give_logits_and_blocks_of_the_document_alone(by):
    model = tiny_model(torch.float64)
    documents = [draw_ids(1, length, seed=length) for length in (37, 46)]
    ends = torch.tensor([0, 37, 83], dtype=torch.int32)
    # As flash attention's arguments come: both bounds, both longest lengths.
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 46, "max_length_k": 46}
    positions = {"position_ids": torch.cat([torch.arange(37), torch.arange(46)])[None]}
    given = positions if by == "position_ids" else {**positions, **bounds}
    packed = model(torch.cat(documents, 1), output_selected_indices=True, **given)
    apart = [model(document, output_selected_indices=True) for document in documents]
    assert_same_logits(packed.logits, torch.cat([output.logits for output in apart], 1))
    for layer, indices in enumerate(packed.selected_indices):
        assert torch.equal(indices, torch.cat([output.selected_indices[layer] for output in apart], 2))


@torch.no_grad()
def test_F12_packed_documents_with_a_mask_of_ones_equal_the_document_alone():
    model = tiny_model(torch.float64)
    documents, ids, positions = packed_input()
    output = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(output.logits, alone(model, documents), rtol=0, atol=1e-10)
    assert cache_of(output) is None


@torch.no_grad()
def test_F12_padding_between_packed_documents_changes_nothing():
    model = tiny_model(torch.float64)
    documents, ids, positions = packed_input()
    slots = torch.cat([torch.arange(4, 16), torch.arange(19, 20), torch.arange(22, 40)])
    # Padding carries positions that would look like restarts.
    spread, spread_positions = torch.zeros(1, 43, dtype=torch.long), torch.ones(1, 43, dtype=torch.long)
    spread[0, slots], spread_positions[0, slots] = ids[0], positions[0]
    mask = torch.zeros(1, 43).index_fill(1, slots, 1)
    logits = model(spread, position_ids=spread_positions, attention_mask=mask).logits[:, slots]
    torch.testing.assert_close(logits, alone(model, documents), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_F12_packed_documents_with_a_mask_and_a_cache_are_an_error(name):
    model = tiny_model()
    _, ids, positions = packed_input()
    with pytest.raises(ValueError, match="packed documents"):
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids), **{name: HySparseCache(tiny_config())})


@torch.no_grad()
def test_positions_of_left_padded_rows_are_not_packing():
    model = tiny_model()
    ids = torch.randint(2, 61, (2, 20), generator=torch.Generator().manual_seed(6))
    mask = torch.ones(2, 20).index_fill(1, torch.arange(3), 0)
    positions = (mask.cumsum(-1) - 1).clamp(min=0).long()
    output = model(ids, attention_mask=mask, position_ids=positions)
    assert cache_of(output).get_seq_length() == 20
    torch.testing.assert_close(output.logits[:, 3:], model(ids[:, 3:]).logits, rtol=0, atol=1e-5)


def test_position_ids_of_another_length_are_an_error():
    model = tiny_model()
    with pytest.raises(ValueError, match="`position_ids` must be"):
        model(torch.ones(1, 5, dtype=torch.long), position_ids=torch.arange(5))
