"""The opt-in search for launch sizes: `HYSPARSE_AUTOTUNE=1`, or `HYSPARSE_AUTOTUNE=sizes.json` to keep what it finds.

Without it the kernels run with the tables in their modules, which name card and date, and nothing is searched. With it
each table is searched when it is first read for a dtype and a head dimension: one size after another is varied, on
random states of that call's heads, and the fastest kept. Later processes on such a card and triton read the file.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .rows_hysparse import PLAIN_ROWS
from .triton_band_backward import LAUNCH_DKDV as BAND_DKDV
from .triton_band_backward import LAUNCH_DQ as BAND_DQ
from .triton_band_backward import LAUNCH_WINDOW_DKDV as WINDOW_DKDV
from .triton_band_backward import LAUNCH_WINDOW_DQ as WINDOW_DQ
from .triton_block_sparse import LAUNCH as BLOCK_SPARSE
from .triton_block_sparse import block_sparse_attention
from .triton_block_sparse_backward import LAUNCH_DKDV as BLOCK_SPARSE_DKDV
from .triton_block_sparse_backward import LAUNCH_DQ as BLOCK_SPARSE_DQ
from .triton_common import triton, use_tuner
from .triton_full_attention import LAUNCH as FULL_ATTENTION
from .triton_full_attention import LAUNCH_SCORES as FULL_ATTENTION_SCORES
from .triton_full_attention import full_attention_with_oracle
from .triton_sliding_window import LAUNCH as SLIDING_WINDOW
from .triton_sliding_window import sliding_window_attention


logger = logging.getLogger(__name__)

Key = tuple[int, int]
Sizes = tuple[int, ...]

# What a size may be instead; stages also one more and one fewer.
_VALUES = {"rows": (16, 32, 64, 128), "columns": (16, 32, 64, 128), "warps": (2, 4, 8)}
# A change must gain this share of the time, or it may be noise.
_GAIN = 0.02
_BLOCK_SIZE, _WINDOW, _N_SELECTED = 64, 128, 16
# Tokens of a trial, by bytes per element: float32 takes plain arithmetic.
_LENGTHS = {2: 8192, 4: 1024}


@dataclass(frozen=True)
class _Searched:
    """A launch table, what each place of its entries means (None: not searched), and the operation that reads it."""

    table: dict[Key, Any]
    places: tuple[str | None, ...]
    operation: str
    is_backward: bool = False


_ROWS = ("rows", "columns", "warps", "stages")
_TABLES = {
    "full_attention": _Searched(FULL_ATTENTION, _ROWS, "full_attention"),
    "full_attention_scores": _Searched(FULL_ATTENTION_SCORES, _ROWS, "oracle"),
    "sliding_window": _Searched(SLIDING_WINDOW, _ROWS, "window"),
    "block_sparse": _Searched(BLOCK_SPARSE, _ROWS, "blocks"),
    "band_dq": _Searched(BAND_DQ, _ROWS, "full_attention", True),
    "band_dkdv": _Searched(BAND_DKDV, _ROWS, "full_attention", True),
    "window_dq": _Searched(WINDOW_DQ, _ROWS, "window", True),
    "window_dkdv": _Searched(WINDOW_DKDV, _ROWS, "window", True),
    "block_sparse_dq": _Searched(BLOCK_SPARSE_DQ, (None, *_ROWS[1:]), "blocks", True),
    "block_sparse_dkdv": _Searched(BLOCK_SPARSE_DKDV, _ROWS, "blocks", True),
}


@dataclass
class Tuner:
    """Searches tables as they are read, and remembers in `path` what it found.

    Args:
        path (`Path`, *optional*): a JSON file of launch sizes by card and triton version; read first, then kept up.
        time_of (`Callable`): milliseconds of a call without arguments.
    """

    path: Path | None
    time_of: Callable[[Callable[[], object]], float]
    _known: dict[str, list[int]] = field(default_factory=dict)
    _done: set[tuple[str, Key]] = field(default_factory=set)
    _is_searching: bool = False

    def __call__(self, table: dict[Key, Sizes], key: Key, query: torch.Tensor, value: torch.Tensor) -> None:
        """Replace the entry that is about to be read by the fastest one, the first time that it is."""
        name = next((name for name, searched in _TABLES.items() if searched.table is table), None)
        if name is None or (name, key) in self._done or self._is_searching:
            return
        self._done.add((name, key))
        label = f"{name} {key[0]} bytes {key[1]} dims"
        if not self._known and self.path is not None and self.path.exists():
            self._known = _read(self.path).get(_machine(query.device), {})
        if label in self._known:
            table[key] = tuple(self._known[label])
            return
        self._is_searching = True
        try:
            table[key] = self._search(_TABLES[name], key, _trial(_TABLES[name], query, value))
        finally:
            self._is_searching = False
        logger.info(f"launch sizes of {label}: {table[key]}")
        self._known[label] = list(table[key])
        if self.path is not None:
            _keep(self.path, _machine(query.device), self._known)

    def _search(self, searched: _Searched, key: Key, trial: Callable[[], object]) -> Sizes:
        best = searched.table[key]
        fastest = self.time_of(trial)
        for place in range(len(best)):
            for sizes in _neighbours(best, place, searched.places[place]):
                searched.table[key] = sizes
                try:
                    elapsed = self.time_of(trial)
                except Exception as failure:
                    # Too large for the card, or not compiled: the other sizes remain.
                    logger.debug(f"launch sizes {sizes}: {type(failure).__name__}")
                    continue
                if elapsed < fastest * (1 - _GAIN):
                    best, fastest = sizes, elapsed
        searched.table[key] = best
        return best


def _neighbours(sizes: Sizes, place: int, meaning: str | None) -> Iterator[Sizes]:
    values: tuple[int, ...] = () if meaning is None else _VALUES.get(meaning, (sizes[place] - 1, sizes[place] + 1))
    for value in values:
        if value >= 1 and value != sizes[place]:
            yield (*sizes[:place], value, *sizes[place + 1 :])


def _trial(searched: _Searched, query: torch.Tensor, value: torch.Tensor) -> Callable[[], object]:
    """A call of the operation that reads the table, on random states of the given heads, dimensions and dtype."""
    length = _LENGTHS[query.element_size()]
    heads, kv_heads = query.shape[1], value.shape[1]
    shapes = ((heads, query.shape[3]), (kv_heads, query.shape[3]), (kv_heads, value.shape[3]))
    states = [torch.randn(1, n, length, dim, device=query.device, dtype=query.dtype) for n, dim in shapes]
    indices = _indices(states[1])
    if not searched.is_backward:
        return lambda: _run(searched.operation, states, indices)
    states = [state.requires_grad_() for state in states]
    with torch.enable_grad():
        output = _run(searched.operation, states, indices)
    grad = torch.randn_like(output)

    def backward():
        # Else the library's gradient would be timed in place of ours.
        with sdpa_kernel(SDPBackend.MATH):
            return torch.autograd.grad(output, states, grad, retain_graph=True)

    return backward


def _run(operation: str, states: list[torch.Tensor], indices: torch.Tensor) -> torch.Tensor:
    query, key, value = states
    common: dict[str, Any] = {"scaling": query.shape[3] ** -0.5, "rows": PLAIN_ROWS}
    if operation in ("full_attention", "oracle"):
        n_selected = _N_SELECTED if operation == "oracle" else 0
        return full_attention_with_oracle(*states, block_size=_BLOCK_SIZE, n_selected=n_selected, **common)[0]
    if operation == "window":
        return sliding_window_attention(*states, window=_WINDOW, **common)[0]
    return block_sparse_attention(query, key, value, indices, block_size=_BLOCK_SIZE, **common)[0]


def _indices(key: torch.Tensor) -> torch.Tensor:
    """Choices whose neighbours agree, as in real text: each run of queries draws from one pool of earlier blocks."""
    kv_heads, length = key.shape[1:3]
    blocks = length // _BLOCK_SIZE
    own = torch.arange(blocks, device=key.device)
    pool = (torch.rand(kv_heads, blocks, 2 * _N_SELECTED, device=key.device) * (own[:, None] + 1)).int()
    pool = pool.repeat_interleave(_BLOCK_SIZE, 1)
    drawn = torch.rand(pool.shape, device=key.device).topk(_N_SELECTED, -1).indices
    return pool.gather(2, drawn)[None]


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, triton {triton.__version__}"


def _read(path: Path) -> dict[str, dict[str, list[int]]]:
    """Launch sizes by machine."""
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        content = error
    if not isinstance(content, dict):
        raise ValueError(f"{path} (HYSPARSE_AUTOTUNE) must hold launch sizes as JSON, got {content}; remove the file.")
    return content


def _keep(path: Path, machine: str, known: dict[str, list[int]]) -> None:
    """Add what is known of this machine to the file, which is replaced as a whole."""
    content = _read(path) if path.exists() else {}
    content[machine] = {**content.get(machine, {}), **known}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(path)


def _median_ms(call: Callable[[], object]) -> float:
    return triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median")


def install() -> None:
    """Search from now on, as the environment variable `HYSPARSE_AUTOTUNE` says.

    Raises:
        ValueError: it is neither 0 nor 1 nor the name of a `.json` file, or that file holds something else.
    """
    asked = os.environ["HYSPARSE_AUTOTUNE"]
    if asked != "1" and not asked.endswith(".json"):
        raise ValueError(
            f"environment variable HYSPARSE_AUTOTUNE must be 0, 1 or the name of a .json file, got {asked!r}."
        )
    path = None if asked == "1" else Path(asked)
    if path is not None and path.exists():
        _read(path)
    use_tuner(Tuner(path, _median_ms))
