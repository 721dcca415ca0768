"""Number formats inside a training step."""

import pytest
import torch
from models.tiny import SWITCHES, draw_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode


ROW = draw_ids(1, 36)


class Dtypes(TorchDispatchMode):
    """Records the floating point dtypes that operations return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                self.seen.add(result.dtype)
        return results


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("switches", ["default", "merged_own", "own_oracle"])
def test_backward_of_bfloat16_autocast_never_meets_float16_C19(switches, checkpointing):
    model = tiny_model(initializer_range=0.05, **SWITCHES[switches]).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ROW, labels=ROW, use_cache=False).loss
    with Dtypes() as dtypes:
        loss.backward()
    assert dtypes.seen == {torch.float32, torch.bfloat16}
