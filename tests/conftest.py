"""Settings for all tests. What must be set before triton or transformers are imported is set here, at import."""

import importlib.metadata
import os


# The processes of a parallel run, and those that their tests start, share the cores; torch reads this when imported.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402 - after the number of threads
import torch  # noqa: E402


HAS_CUDA = torch.cuda.is_available()

# Triton reads its switch when a kernel is defined: without a card the kernels run interpreted.
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Nothing is downloaded; `HF_HUB_OFFLINE=0 pytest -m network` is the way to run the tests that do.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# More threads than this only fight over the tiny models of the tests; PyTorch's own choice counts hyperthreads too.
torch.set_num_threads(min(torch.get_num_threads(), int(os.environ.get("HYSPARSE_TEST_THREADS", "4"))))

try:
    import hypothesis
except ImportError:
    pass  # the property tests skip themselves
else:
    # No deadline: the first example pays for imports and compilation. In CI every run draws the same examples.
    hypothesis.settings.register_profile("hysparse", deadline=None, derandomize=bool(os.environ.get("CI")))
    hypothesis.settings.load_profile("hysparse")

OPT_IN_MARKERS = ("slow", "network")


def pytest_configure():
    """Stop at once where hundreds of kernel tests would fail for what is between two packages."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        triton, numpy = (importlib.metadata.version(name).split(".")[:2] for name in ("triton", "numpy"))
    except importlib.metadata.PackageNotFoundError:
        return
    if [int(part) for part in triton] < [3, 7] and [int(part) for part in numpy] >= [2, 4]:
        raise pytest.UsageError(
            f"Triton {'.'.join(triton)} interprets no loop under NumPy {'.'.join(numpy)}, which makes no number of an "
            "array of one element; run `pip install 'numpy<2.4'`, or `make test HYSPARSE_TORCH=\"torch==2.11.0 "
            'numpy<2.4"` for an environment of its own.'
        )


def pytest_collection_modifyitems(config, items):
    """Skip gpu tests without a card; leave out the opt-in tests unless `-m` or a test's own name asks for them."""
    if not HAS_CUDA:
        skip = pytest.mark.skip(reason="needs a CUDA device, torch.cuda.is_available() is False")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in OPT_IN_MARKERS)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        chosen = set(left_out)
        items[:] = [item for item in items if item not in chosen]


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, or with the lowest integer; bool and complex stay as they are."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
            tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


@pytest.fixture
def nan_filled_empty(monkeypatch):
    """Make `torch.empty` and its relatives return NaN, so that reading what nobody wrote cannot pass unseen."""

    # The first device context of a process lists the functions that it serves, for good: not those put here.
    with torch.device("cpu"):
        torch.zeros(())

    def poisoned(function):
        def wrapper(*args, **kwargs):
            return _poison(function(*args, **kwargs))

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
