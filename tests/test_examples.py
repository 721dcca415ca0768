"""The examples run as they are written."""

import importlib.util
from pathlib import Path


EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_finetune_lora_learns_and_merges(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("finetune_lora", EXAMPLES / "finetune_lora.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    before, after = example.main(example.parse(["--steps", "6", "--out", str(tmp_path)]))
    assert after < before - 0.5
    assert {"adapter_config.json", "adapter_model.safetensors", "sinks.safetensors"} <= {
        path.name for path in tmp_path.iterdir()
    }
    difference = float(capsys.readouterr().out.split("logits differ by ")[1].split()[0])
    assert difference < 1e-5
