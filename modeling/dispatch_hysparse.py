"""How a call reaches a back end: `"reference"` (plain torch, any float dtype and device) or `"triton"`.

A back end asked for by name never falls back; `"auto"` takes the best that can do the call, and the environment
variable `HYSPARSE_BACKEND` overrides `"auto"`.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch


logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "triton")

# Why there are no kernels, or None; filled by the first call that may use them. A cached function would warn under
# torch.compile.
_MISSING: list[ImportError | None] = []
# Operations whose kernel failed once: a compiler that fails takes seconds for it, and would at every call.
_FAILED: set[str] = set()


def missing_triton() -> ImportError | None:
    """Why the kernels cannot be imported; None where they can."""
    if not _MISSING:
        _MISSING.append(_triton_error())
    return _MISSING[0]


def _triton_error() -> ImportError | None:
    try:
        from .triton_common import DTYPES  # noqa: F401 - only whether it can be imported is asked
    except ImportError as error:
        return error
    return None


def _requested(backend: str) -> str:
    source = "`backend`"
    if backend == "auto":
        backend, source = os.environ.get("HYSPARSE_BACKEND", "auto"), "environment variable HYSPARSE_BACKEND"
    if backend not in BACKENDS:
        raise ValueError(f"{source} must be one of {BACKENDS}, got {backend!r}.")
    return backend


def _on_device(requested: str, device: torch.device | None) -> str:
    """What a back end, once the environment was asked, means for tensors on `device`."""
    if requested != "auto":
        return requested
    on_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    return "triton" if on_cuda and missing_triton() is None else "reference"


def resolve_backend(backend: str, device: torch.device | None = None) -> str:
    """The back end that `backend` means for tensors on `device` (default: the best device here).

    Returns:
        `"reference"` or `"triton"`; single calls that the kernels do not take may still go to the reference.
    Raises:
        ValueError: an unknown name, given or in `HYSPARSE_BACKEND`.
    """
    return _on_device(_requested(backend), device)


def backend_of(config: Any) -> str:
    """The back end of a model's operations: `attn_implementation="eager"` means the reference everywhere.

    Args:
        config (`PretrainedConfig`, *optional*): the model's own, which the library writes the implementation into.
    """
    return "reference" if config is not None and config._attn_implementation == "eager" else "auto"


class Operations:
    """Operations by name: what each means in plain torch, and its kernel where there is one.

    The loader of checkpoints copies only files that it finds in literal imports, so both are imported by the caller.

    Args:
        references (`Mapping`): name -> function of tensors, then options by keyword.
        load_kernels (`Callable`): imports and returns name -> function of the same arguments, where triton is.
    """

    def __init__(
        self, references: Mapping[str, Callable[..., Any]], load_kernels: Callable[[], dict[str, Callable[..., Any]]]
    ):
        self.references = references
        self._load_kernels = load_kernels
        self._loaded: list[dict[str, Callable[..., Any]]] = []

    @property
    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The Triton operations by name."""
        if not self._loaded:
            self._loaded.append(self._load_kernels())
        return self._loaded[0]

    def run(self, backend: str, operation: str, *tensors: Any, for_kernel: dict | None = None, **options: Any) -> Any:
        """Call the operation on its back end; `auto` goes to the reference where the kernels do not take the call.

        Args:
            for_kernel (`dict`, *optional*): more options, which the reference does not know.
        """
        kernel, reference = self._kernel(backend, operation, tensors[0].device), self.references[operation]
        if kernel is None:
            return reference(*tensors, **options)
        try:
            return kernel(*tensors, **options, **for_kernel or {})
        except NotImplementedError as reason:
            if _requested(backend) == "triton":
                raise
            _log_once(f"`{operation}` runs on the reference back end: {reason}")
        except Exception as failure:
            _raise_unless_replaceable(failure, backend)
            # Where the call itself is at fault the reference raises too, and nothing is said of the kernel.
            result = reference(*tensors, **options)
            _do_without_kernel(operation, failure)
            return result
        return reference(*tensors, **options)

    def by_kernel(self, backend: str, operation: str, *tensors: Any, **options: Any) -> Any:
        """What the operation's kernel gives, or None where the reference is to run.

        Raises:
            ImportError: the kernels are asked for by name and cannot be imported.
            NotImplementedError: the kernel does not take the call, or there is none.
        """
        kernel = self._kernel(backend, operation, tensors[0].device)
        try:
            return None if kernel is None else kernel(*tensors, **options)
        except NotImplementedError:
            raise
        except Exception as failure:
            _raise_unless_replaceable(failure, backend)
            _do_without_kernel(operation, failure)
            return None

    def _kernel(self, backend: str, operation: str, device: torch.device) -> Callable[..., Any] | None:
        """The kernel that is to run, or None where the reference is."""
        backend = _requested(backend)
        if _on_device(backend, device) != "triton" or (operation in _FAILED and backend != "triton"):
            return None
        missing = missing_triton()
        if missing is not None:
            raise missing
        if operation not in self.kernels:
            if backend == "triton":
                raise NotImplementedError(f"`{operation}` has no Triton kernel; use backend='reference'.")
            _log_once(f"`{operation}` runs on the reference back end: it has no Triton kernel.")
            return None
        return self.kernels[operation]


def _raise_unless_replaceable(failure: Exception, backend: str) -> None:
    """Compilers and drivers fail in ways of their own; raise what the reference shall not stand in for."""
    # The reference needs more memory than the kernels do.
    if _requested(backend) == "triton" or isinstance(failure, torch.OutOfMemoryError):
        raise failure


def _do_without_kernel(operation: str, failure: Exception) -> None:
    """Warn, and remember it."""
    _FAILED.add(operation)
    logger.warning(
        f"`{operation}` runs on the reference back end from now on: its Triton kernel failed with "
        f"{type(failure).__name__}: {failure}. Set HYSPARSE_BACKEND=reference to leave the kernels out, or "
        "HYSPARSE_BACKEND=triton to make this an error."
    )


@functools.cache
def _log_once(message: str) -> None:
    logger.info(message)
