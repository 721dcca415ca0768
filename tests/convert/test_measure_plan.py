"""`hysparse plan` says what `hysparse convert --plan auto` does."""

import pytest
import torch

from hysparse_hf import cli, convert, measure_plan


IDS = torch.randint(3, 97, (3, 48), generator=torch.Generator().manual_seed(2))
OPTIONS = {"window": 12, "calibrate": IDS}


def test_plan_is_that_of_a_conversion(make_source, tmp_path):
    source, _ = make_source(num_hidden_layers=7)
    report = measure_plan(source, ratio="1:2", **OPTIONS)
    record = convert(source, tmp_path / "out", ratio="1:2", budget=16, block_size=8, **OPTIONS)
    full = [layer for layer, kind in enumerate(record["plan"]) if kind == "full"]
    assert report["plans"]["auto"]["full"] == full
    assert report["plans"]["regular"]["full"] == [0, 3, 6]
    assert report["damage"] == pytest.approx(list(record["damage"]["kl"].values()), abs=1e-5)
    assert report["plans"]["auto"]["estimate"] <= report["plans"]["regular"]["estimate"]
    assert report["calibration"] == record["calibration"]


def test_plan_of_keep_kv_is_that_of_its_conversion(make_source, tmp_path):
    source, _ = make_source(num_hidden_layers=7)
    sizes = {"ratio": "1:2", "keep_kv": True, "budget": 8, "block_size": 4, **OPTIONS}
    report, record = measure_plan(source, **sizes), convert(source, tmp_path / "out", **sizes)
    full = [layer for layer, kind in enumerate(record["plan"]) if kind == "full"]
    assert report["plans"]["auto"]["full"] == full
    assert report["text"] == record["damage"]["text"]
    for layer, pairs in record["damage"]["kl"].items():
        for donor, kl in pairs.items():
            distance = int(layer) - int(donor)
            assert report["damage"][f"f = l-{distance}"][int(layer)] == pytest.approx(kl, abs=1e-5)
    estimates = {name: plan["estimate"] for name, plan in report["plans"].items()}
    assert 0 < estimates["auto"] <= estimates["regular"]


def test_regular_plan_has_an_estimate_whatever_runs_are_asked_for(make_source):
    """Its runs of 3 are longer than those that the measured plan may have."""
    source, _ = make_source()
    report = measure_plan(source, ratio="1:3", max_sparse_run=2, keep_kv=True, budget=8, block_size=4, **OPTIONS)
    assert 0 < report["plans"]["regular"]["estimate"] < float("inf")
    assert report["plans"]["auto"]["full"][1] in (2, 3)


def test_command_prints_layers_and_the_plan_to_give(make_source, letters, tmp_path, capsys):
    source, _ = make_source()
    letters.save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("Layers differ in what they are worth. " * 40)
    options = ["--window", "12", "--calibrate", str(text), "--calibration-tokens", "192", "--calibration-length", "96"]
    assert cli.main(["plan", str(source), *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[2:8]] == ["0", "1", "2", "3", "4", "all"]
    marked = [line.split()[0] for line in printed[2:7] if line.split()[3] == "full"]
    assert printed[-1] == f"--plan {','.join(marked)}"


def test_command_prints_a_column_per_full_layer_that_was_tried(make_source, letters, tmp_path, capsys):
    source, _ = make_source()
    letters.save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("Layers differ in what they are worth. " * 40)
    options = ["--keep-kv", "--budget", "16", "--block-size", "8", "--window", "12", "--calibrate", str(text)]
    assert cli.main(["plan", str(source), *options, "--calibration-tokens", "192", "--calibration-length", "96"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "on 4 pieces of 48 tokens that stand twice each, reading 16" in printed[0]
    assert [f"f = l-{distance}" in printed[1] for distance in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
    assert [line.split()[0] for line in printed[2:7]] == ["1", "2", "3", "4", "all"]
    assert [len(line.split()) for line in printed[2:6]] == [4, 5, 6, 7]


def test_a_ratio_without_sparse_layers_is_refused(make_source):
    source, _ = make_source()
    with pytest.raises(ValueError, match="or windows in the self-decoder, got '1:0'"):
        measure_plan(source, ratio="1:0", **OPTIONS)
