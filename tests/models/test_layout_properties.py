"""Any shape, padding, plan and chunking gives what each row gives alone; drawn by hypothesis."""

import pytest
import torch
from models.tiny import SWITCHES, assert_same_logits, draw_ids, logits_alone, run_in_chunks, spread, tiny_model

from hysparse_hf import measure_cache_bytes
from hysparse_hf.modeling.cache_layers_hysparse import WINDOW_SLACK
from hysparse_hf.modeling.compat_transformers import cache_of


hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

few_examples = hypothesis.settings(max_examples=15, deadline=None)
kinds = st.sampled_from(["full", "sparse", "window"])
# Without those that fix the plan or the budget, which are drawn here.
switch_names = st.sampled_from([name for name in SWITCHES if name not in ("window_layers", "sum_mean_forced")])


@st.composite
def models(draw):
    plan = [draw(st.sampled_from(["full", "window"])), "full", *draw(st.lists(kinds, min_size=1, max_size=3))]
    block = draw(st.integers(1, 6))
    return tiny_model(
        torch.float64,
        layer_plan=plan,
        oracle_block_size=block,
        oracle_budget=block * draw(st.integers(1, 3)),
        sliding_window=draw(st.integers(1, 9)),
        **SWITCHES[draw(switch_names)],
    )


@st.composite
def masks(draw):
    """`(rows, length)`; the last slot of a row may be padding, and a row may be nothing else."""
    length = draw(st.integers(1, 40))
    row = st.lists(st.sampled_from([1, 1, 1, 0]), min_size=length, max_size=length)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=3)))


@st.composite
def partitions(draw, length):
    cuts = draw(st.sets(st.integers(1, max(1, length - 1)), max_size=6)) if length > 1 else set()
    edges = [0, *sorted(cuts), length]
    return [stop - start for start, stop in zip(edges, edges[1:], strict=False)]


def check(model, logits, rows, mask):
    assert logits.isfinite().all()
    for row, tokens in enumerate(rows):
        if len(tokens):
            assert_same_logits(logits[row][mask[row].bool()], logits_alone(model, tokens))


@few_examples
@hypothesis.given(models(), masks(), st.data(), st.integers(0, 100))
@torch.no_grad()
def test_padding_and_chunks(model, mask, data, seed):
    rows = [draw_ids(1, int(count), seed + row)[0] for row, count in enumerate(mask.sum(-1))]
    ids = spread(rows, mask)
    check(model, model(ids, attention_mask=mask, use_cache=False).logits, rows, mask)
    logits, cache = run_in_chunks(model, ids, data.draw(partitions(mask.shape[1])), mask)
    check(model, logits, rows, mask)
    kept, length, config = model.config.sliding_window + WINDOW_SLACK, mask.shape[1], model.config
    columns = config.cache_plan.count("full") * length + config.cache_plan.count("window") * min(kept, length)
    assert measure_cache_bytes(cache)["used"] == len(rows) * 2 * (24 + config.v_head_dim) * 8 * columns


@few_examples
@hypothesis.given(models(), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 100))
@torch.no_grad()
def test_packing(model, lengths, seed):
    rows = [draw_ids(1, length, seed + number)[0] for number, length in enumerate(lengths)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    output = model(torch.cat(rows)[None], position_ids=positions, use_cache=True)
    assert_same_logits(output.logits[0], torch.cat([logits_alone(model, tokens) for tokens in rows]))
    assert (cache_of(output) is None) == (len(lengths) > 1)


@few_examples
@hypothesis.given(models(), st.data(), st.integers(0, 100))
def test_crop_and_continue(model, data, seed):
    ids, removed = draw_ids(2, 45, seed), 0
    alone = [logits_alone(model, row) for row in ids]
    cache, done = None, 0
    while done < 45:
        size = data.draw(st.integers(1, min(15, 45 - done)))
        logits, cache = run_in_chunks(model, ids[:, done : done + size], [size], cache=cache)
        for row in range(2):
            assert_same_logits(logits[row], alone[row][done : done + size])
        done += size
        # In all at most the slack, so that no window runs dry however the crops fall.
        back = data.draw(st.integers(0, min(3, done, WINDOW_SLACK - removed)))
        cache.crop(-back)
        removed, done = removed + back, done - back
