"""What selections look like to a memory system, against sets of tokens made in loops and against known rows."""

import pytest
import torch
from models.tiny import draw_ids, tiny_model

from hysparse_hf import measure_recall
from hysparse_hf.index_patterns import index_patterns, phase_overlap
from hysparse_hf.modeling.selection_hysparse import pack_ids


KV_HEADS, QUERIES, FIRST, WIDTH = 2, 70, 21, 3


def drawn(block_size, first=FIRST, queries=QUERIES):
    """Blocks that each query may see, some rows with one less, `(kv_heads, queries, WIDTH)`."""
    generator = torch.Generator().manual_seed(block_size)
    blocks = (first + torch.arange(queries)) // block_size
    ids = torch.stack(
        [torch.stack([torch.randperm(int(last) + 3, generator=generator)[:WIDTH] for last in blocks])] * KV_HEADS
    )
    ids[1] = (ids[1] + 1) % (blocks[:, None] + 1)
    valid = ids <= blocks[:, None]
    valid[..., 1:] &= (ids[..., 1:] != ids[..., :-1]) & (ids[..., 1:] != ids[..., :1])
    return pack_ids(ids, valid, WIDTH)


def token_sets(row, own, block_size):
    """Tokens up to `own` in the blocks of a row."""
    starts = [block * block_size for block in row if block >= 0]
    return {token for start in starts for token in range(start, start + block_size) if token <= own}


@pytest.mark.parametrize(("block_size", "page"), [(4, 4), (8, 4), (4, 8), (4, 16), (5, 1)])
def test_patterns_are_those_of_sets_of_tokens(block_size, page):
    indices = drawn(block_size)
    found = index_patterns(indices, FIRST, block_size, page)
    chosen = [[set(row.tolist()) - {-1} for row in head] for head in indices]
    for query in range(QUERIES):
        tokens = [token_sets(indices[head, query].tolist(), FIRST + query, block_size) for head in range(KV_HEADS)]
        pages = {token // page for token in tokens[0] | tokens[1]}
        assert found["pages"][query] == len(pages)
        assert found["payload"][query] == pytest.approx(sum(map(len, tokens)) / (KV_HEADS * page * len(pages)))
        for head in range(KV_HEADS):
            blocks = chosen[head][query]
            assert found["blocks"][head, query] == len(blocks)
            assert found["runs"][head, query] == sum(block - 1 not in blocks for block in blocks)
            if query:
                kept = len(blocks & chosen[head][query - 1]) / len(blocks)
                assert found["kept"][head, query - 1] == pytest.approx(kept)
    for width in (16, 32, 64):
        groups = range(0, QUERIES // width * width, width)
        unions = [[len(set().union(*head[start : start + width])) for start in groups] for head in chosen]
        assert found[f"union_{width}"].tolist() == unions


def test_pages_that_blocks_cross_are_refused():
    with pytest.raises(ValueError, match=r"divide `block_size` \(6\) or be a multiple of it, got 4"):
        index_patterns(drawn(6), FIRST, 6, page_tokens=4)


@pytest.mark.parametrize("chunk", [1, 10**9])
def test_phase_overlap_is_that_of_sets_of_tokens(chunk, monkeypatch):
    monkeypatch.setattr("hysparse_hf.index_patterns.CHUNK_ELEMENTS", chunk)
    indices, shifted = drawn(4), drawn(4, first=FIRST - 1)
    both = total = 0
    for head in range(KV_HEADS):
        for query in range(QUERIES):
            whole = token_sets(indices[head, query].tolist(), FIRST + query, 4) - {0}
            later = token_sets(shifted[head, query].tolist(), FIRST + query - 1, 4)
            total += len(whole)
            both += len(whole & {token + 1 for token in later})
    assert phase_overlap(indices, shifted, FIRST, 4) == pytest.approx(both / total)


def test_one_block_that_follows_the_text_loses_a_token_of_its_size():
    """The block of the same number lies one token later in the shifted text."""
    row = torch.full((1, 40, 1), 1, dtype=torch.int32)
    assert phase_overlap(row, row, 24, 8) == pytest.approx(7 / 8)
    assert phase_overlap(row, row + 1, 24, 8) == pytest.approx(0)


@torch.no_grad()
def test_recall_reports_what_full_layers_select():
    """Means over two windows, and the phase of the first one, from the selections that the model itself reports."""
    model = tiny_model(layer_plan=["full", "sparse", "sparse", "full", "sparse"])
    windows = (draw_ids(1, 29)[0], draw_ids(1, 8 + 17, seed=8)[0])
    report = measure_recall(model, windows)
    selected = [model(w[None], output_selected_indices=True).selected_indices for w in windows]
    shifted = model(windows[0][None, 1:], output_selected_indices=True).selected_indices
    for place, index in enumerate((0, 3)):
        counted = [layers[place][0, :, 8:] for layers in selected]
        parts = [index_patterns(part, 8, 4) for part in counted]
        found = report["layers"][index]["patterns"]
        for name in ("blocks", "runs", "kept", "pages", "payload", "union_16"):
            expected = torch.cat([part[name].flatten() for part in parts]).mean().item()
            assert found[name] == pytest.approx(expected), name
        assert found["union_32"] is None
        assert found["phase"] == phase_overlap(counted[0], shifted[place][0, :, 7:], 8, 4)
    assert [layer["patterns"] for layer in report["layers"] if layer["position"]] == [{}, {}, {}]
