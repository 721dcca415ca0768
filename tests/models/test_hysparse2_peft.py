"""Adapters on a second generation model."""

import pytest
import torch
from models.tiny import assert_same_logits, draw_ids
from models.tiny2 import tiny_model
from peft import LoraConfig, get_peft_model

from hysparse_hf import lora_targets


IDS = draw_ids(2, 30)


@pytest.mark.parametrize("targets", ["all-linear", "attention", "gates"])
def test_train_and_merge_G01_G04(targets):
    model = tiny_model()
    names = targets if targets == "all-linear" else lora_targets(targets)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=names)).train()
    loss = wrapped(IDS, labels=IDS).loss
    loss.backward()
    touched = {name for name, part in wrapped.named_parameters() if part.grad is not None}
    assert touched
    assert all("lora_" in name for name in touched)
    with torch.no_grad():
        for name, part in wrapped.named_parameters():
            if "lora_" in name:
                part.normal_(0, 0.05)
        wrapped.eval()
        adapted = wrapped(input_ids=IDS, logits_to_keep=2).logits
        assert_same_logits(wrapped.merge_and_unload()(IDS, logits_to_keep=2).logits, adapted)
