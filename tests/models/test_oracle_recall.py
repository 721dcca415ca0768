"""`hysparse recall` against loops over heads and queries in float64, and against selections that are known."""

import json
import math

import pytest
import torch
import transformers
from models.tiny import draw_ids, tiny_model

from hysparse_hf import cli, measure_recall
from hysparse_hf.modeling.layers_hysparse import rotate
from hysparse_hf.oracle_recall import table


SETTINGS = {"layer_plan": ["full", "sparse", "sparse", "full", "sparse"]}
WINDOWS = (draw_ids(1, 29)[0], draw_ids(1, 22, seed=8)[0])


def captured(model, window):
    """Per layer query, key `(heads or kv_heads, length, head_dim)` and the indices that it reads, in float64."""
    found = {}

    def keep(attention, args, kwargs, output):
        config = model.config
        own = config.share_full_kv is False and attention.kind == "sparse"
        rotation = kwargs["rotations"][attention.kind if own else "full"]
        parts = []
        for name in ("q", "k") if own or attention.kind == "full" else ("q",):
            states = getattr(attention, f"{name}_proj")(args[0]).unflatten(-1, (-1, 24))
            if config.use_qk_norm:
                states = getattr(attention, f"{name}_norm")(states)
            parts.append(rotate(states.transpose(1, 2), rotation)[0].double())
        parts += [args[1][0].double()] if len(parts) == 1 else []
        found[attention.layer_idx] = (*parts, (output[4] if attention.kind == "full" else args[3])[0])

    handles = [layer.self_attn.register_forward_hook(keep, with_kwargs=True) for layer in model.model.layers]
    model.model(window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def naive(query, key, indices, size, group):
    """Recall, and mass inside the selection, per head and query beyond the budget."""
    recall, inside = [], []
    n_selected = indices.shape[-1]
    for head in range(len(query)):
        recall.append([])
        inside.append([])
        for place in range(n_selected * size, query.shape[1]):
            logits = [float(query[head, place] @ key[head // group, s]) / math.sqrt(24) for s in range(place + 1)]
            total = sum(math.exp(x) for x in logits)
            weights = [math.exp(x) / total for x in logits]
            blocks = [weights[start : start + size] for start in range(0, place + 1, size)]
            best = sorted(range(len(blocks)), key=lambda block: -max(blocks[block]))[:n_selected]
            read = {int(i) for i in indices[head // group, place]} - {-1}
            recall[-1].append(len(read & set(best)) / len(best))
            inside[-1].append(sum(sum(blocks[block]) for block in read))
    return recall, inside


def naive_margins(query, key, indices, size, group):
    """Log score of the last chosen block over that of the first rejected, all KV heads and queries."""
    found = []
    for place in range(indices.shape[-1] * size, query.shape[1]):
        for kv_head in range(len(key)):
            scores = []
            for head in range(kv_head * group, (kv_head + 1) * group):
                logits = [float(query[head, place] @ key[kv_head, s]) / math.sqrt(24) for s in range(place + 1)]
                lse = math.log(sum(math.exp(x) for x in logits))
                scores.append([max(logits[start : start + size]) - lse for start in range(0, place + 1, size)])
            shared = [max(column) for column in zip(*scores, strict=True)]
            read = {int(i) for i in indices[kv_head, place]}
            chosen = min(score for block, score in enumerate(shared) if block in read)
            rejected = max(score for block, score in enumerate(shared) if block not in read)
            found.append(chosen - rejected)
    return sorted(found)


@pytest.mark.parametrize(
    "switches",
    [{}, {"share_full_kv": False}, {"use_qk_norm": True, "gate_granularity": "none"}],
    ids=["shared", "own-keys", "norms-and-no-gates"],
)
@torch.no_grad()
def test_figures_are_those_of_loops(switches, monkeypatch):
    model = tiny_model(**SETTINGS, **switches)
    # Pieces of a few queries, the last one short.
    monkeypatch.setattr("hysparse_hf.oracle_recall.CHUNK_ELEMENTS", 4 * 29 * 5)
    report = measure_recall(model, WINDOWS)
    assert report["queries"] == sum(len(window) - 8 for window in WINDOWS)
    assert [layer["position"] for layer in report["layers"]] == [0, 1, 2, 0, 1]
    seen = [captured(model, window) for window in WINDOWS]
    for layer in report["layers"]:
        per_head = [[] for _ in range(4)], [[] for _ in range(4)]
        margins = []
        for found in seen:
            states = found[layer["layer"]]
            recall, inside = naive(*states, size=4, group=2)
            for head in range(4):
                per_head[0][head] += recall[head]
                per_head[1][head] += inside[head]
            margins += naive_margins(*states, size=4, group=2)
        recall, inside = (torch.tensor(values, dtype=torch.float64) for values in per_head)
        assert layer["recall"] == pytest.approx(recall.mean().item(), abs=1e-5)
        assert layer["left_out"] == pytest.approx(1 - inside.mean().item(), abs=1e-5)
        assert layer["coverage"] == pytest.approx(inside.mean(1).tolist(), abs=1e-5)
        if layer["position"] == 0:
            expected = sorted(margins)[(len(margins) - 1) // 2]
            assert layer["margin"] == pytest.approx(expected, abs=1e-4)
            assert layer["margin"] > 0
        else:
            assert layer["margin"] is None


@torch.no_grad()
def test_positions_are_means_over_their_layers():
    report = measure_recall(tiny_model(**SETTINGS), WINDOWS)
    for position, row in report["positions"].items():
        layers = [layer for layer in report["layers"] if layer["position"] == int(position)]
        assert row["layers"] == len(layers)
        for name in ("recall", "left_out"):
            assert row[name] == pytest.approx(sum(layer[name] for layer in layers) / len(layers))
        assert row["coverage"] == min(min(layer["coverage"]) for layer in layers)
    printed = table(report)
    assert all(f"{row['recall']:.3f}" in printed for row in report["positions"].values())


@torch.no_grad()
def test_one_head_per_group_catches_its_own_best_blocks():
    """Without a group there is nothing to aggregate: a full layer's selection is its head's own."""
    report = measure_recall(tiny_model(**SETTINGS, num_key_value_heads=4), WINDOWS)
    assert report["positions"]["0"]["recall"] == 1
    assert report["positions"]["1"]["recall"] < 1


@torch.no_grad()
def test_gates_are_those_of_the_layer():
    model = tiny_model(**SETTINGS)
    for name, bias in (("global", -20.0), ("local", 0.0)):
        gate = getattr(model.model.layers[1].self_attn, f"gate_{name}_proj")
        gate.weight.zero_()
        gate.bias.fill_(bias)
    gates = measure_recall(model, WINDOWS)["layers"][1]["gates"]
    assert gates["global"] == {"mean": pytest.approx(0, abs=1e-6), "saturated": 1}
    assert gates["local"] == {"mean": 0.5, "saturated": 0}


@pytest.mark.parametrize(
    ("switches", "windows", "match"),
    [
        ({"dense": True}, WINDOWS, "sparse layers reuse"),
        ({"share_oracle": False}, WINDOWS, "sparse layers reuse"),
        ({"layer_plan": ["full", "full"]}, WINDOWS, "sparse layers reuse"),
        ({}, (draw_ids(1, 8)[0],), r"longer than `oracle_budget` \(8 tokens\), got 8"),
    ],
    ids=["dense", "own-oracle", "all-full", "short"],
)
def test_what_has_no_reused_selection_is_refused(switches, windows, match):
    with pytest.raises(ValueError, match=match):
        measure_recall(tiny_model(**switches), windows)


def test_command_prints_by_position(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tiny_model(**SETTINGS).save_pretrained(tmp_path)
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path)
    text, report = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text(" ".join(f"w{i * 7 % 61}" for i in range(100)))
    command = ["recall", str(tmp_path), "--text", str(text), "--length", "30", "--json", str(report)]
    assert cli.main(command) == 0
    record = json.loads(report.read_text())
    assert list(record["positions"]) == ["0", "1", "2"]
    assert f"{record['positions']['1']['left_out']:.3f}" in capsys.readouterr().out
