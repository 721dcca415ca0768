"""What the kernels of a decode step share: which calls those around attention take, and when a bare launch will do."""

import torch

from .triton_common import DTYPES, is_interpreted, refuse


# Subclasses carry meanings of their own, as a DTensor of tensor parallelism does.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_tensors(*tensors: torch.Tensor) -> None:
    """Raise NotImplementedError for tensors that no kernel here takes; it runs at every call of a decode step."""
    device = tensors[0].get_device()
    rule = None
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            rule = f"plain tensors, got {type(tensor).__name__}"
        elif tensor.dtype not in DTYPES:
            rule = f"one of {DTYPES}, got {tensor.dtype}"
        elif tensor.get_device() != device:
            rule = f"tensors on one device, got {tensors[0].device} and {tensor.device}"
        elif not tensor.is_cuda and not (tensor.is_cpu and is_interpreted()):
            rule = f"tensors on a CUDA device, got {tensor.device}"
    refuse(rule)


def is_bare(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing watches the call: no autograd, compiler, tracer, dispatch mode, transform, or tensor subclass.

    Then the kernel is launched as it is: a registered operation costs a few times what its launch does, which a decode
    step would pay hundreds of times.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if any(type(tensor) not in _PLAIN for tensor in given):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))
