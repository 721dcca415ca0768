"""Packed documents: they begin where positions restart, or at `cu_seq_lens_q`; with a mask, among visible tokens."""

import pytest
import torch
from models.generations import over_settings
from models.tiny import CACHE_NAMES, assert_same_logits, draw_ids, logits_alone, tiny_config, tiny_model

from hysparse_hf import HySparseCache
from hysparse_hf.modeling.compat_transformers import cache_of


DOCUMENTS = (20, 30, 1, 9)


def packed():
    """Documents, their ids in one row, and the two ways to say where they begin."""
    rows = [draw_ids(1, length, seed=3 + number)[0] for number, length in enumerate(DOCUMENTS)]
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    cu_seqlens = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    return rows, torch.cat(rows)[None], {"position_ids": positions}, {"cu_seq_lens_q": cu_seqlens}


@torch.no_grad()
def alone(model, documents):
    return torch.cat([logits_alone(model, document) for document in documents])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@over_settings()
@torch.no_grad()
def test_F12_packed_documents_equal_the_document_alone(generation, switch, dtype):
    model = generation.tiny_model(dtype, **generation.MODELS[switch])
    rows, ids, positions, cu_seqlens = packed()
    expected = alone(model, rows)
    for arguments in (positions, cu_seqlens, {**positions, **cu_seqlens}):
        output = model(ids, use_cache=True, **arguments)
        assert cache_of(output) is None
        assert_same_logits(output.logits[0], expected)


@torch.no_grad()
def test_packed_rows_of_a_batch_have_documents_of_their_own():
    model = tiny_model(torch.float64)
    lengths = ((20, 25), (9, 30, 6))
    rows = [[draw_ids(1, length, 10 * number + length)[0] for length in row] for number, row in enumerate(lengths)]
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    logits = model(ids, position_ids=positions).logits
    for row, documents in enumerate(rows):
        assert_same_logits(logits[row], alone(model, documents))


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("by", [2, 3], ids=["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@torch.no_grad()
def test_packed_input_with_a_cache_is_an_error(filled, by, name):
    model = tiny_model()
    cache = HySparseCache(model.config)
    if filled:
        model(draw_ids(1, 5), **{name: cache})
    with pytest.raises(ValueError, match="packed documents"):
        model(packed()[1], **packed()[by], **{name: cache})
    assert cache.get_seq_length() == (5 if filled else 0)


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
    documents, ids, positions, _ = packed()
    output = model(ids, attention_mask=torch.ones_like(ids), **positions)
    assert_same_logits(output.logits[0], alone(model, documents))
    assert cache_of(output) is None


@torch.no_grad()
def test_F12_padding_between_packed_documents_changes_nothing():
    model = tiny_model(torch.float64)
    documents, ids, positions, _ = packed()
    slots = torch.cat([torch.arange(start, start + n) for start, n in zip((4, 27, 60, 63), DOCUMENTS, strict=True)])
    # Padding carries positions that would look like restarts.
    spread, spread_positions = torch.zeros(1, 75, dtype=torch.long), torch.ones(1, 75, dtype=torch.long)
    spread[0, slots], spread_positions[0, slots] = ids[0], positions["position_ids"][0]
    mask = torch.zeros(1, 75).index_fill(1, slots, 1)
    logits = model(spread, position_ids=spread_positions, attention_mask=mask).logits[0, slots]
    assert_same_logits(logits, alone(model, documents))


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_F12_packed_documents_with_a_mask_and_a_cache_are_an_error(name):
    model = tiny_model()
    _, ids, positions, _ = packed()
    with pytest.raises(ValueError, match="packed documents"):
        model(ids, attention_mask=torch.ones_like(ids), **positions, **{name: HySparseCache(tiny_config())})


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
