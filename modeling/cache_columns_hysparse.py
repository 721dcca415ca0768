"""Columns of a cache's buffers: appending to them, rings, and memory that keeps its address."""

import torch


def with_room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of states `(batch, kv_heads, length, dim)` with `capacity` columns."""
    # Zeros, not uninitialised memory: columns behind a shorter row are masked, but 0 * NaN is NaN.
    grown = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    grown[:, :, : states.shape[2]] = states
    return grown


def is_frozen(buffer: torch.Tensor) -> bool:
    """Tensors made in inference mode cannot be written outside it."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()


def write_columns(buffer: torch.Tensor, new: torch.Tensor, start: torch.Tensor) -> None:
    """Write tokens in place, of each row from its own column `start` `(rows,)` on, in the buffer's dtype."""
    columns = start.to(new.device)[:, None] + torch.arange(new.shape[2], device=new.device)
    rows = torch.arange(new.shape[0], device=new.device)[:, None]
    # Not a scatter: the compiler makes that one into a copy of the whole buffer, there and back, at every step.
    buffer[rows, :, columns] = new.transpose(1, 2).to(buffer.dtype)


def appended(states: torch.Tensor, new: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """States and `new`, which stands from each row's column `start` `(rows,)` on; by default behind them."""
    new = new.to(states.dtype)
    if start is None:
        return torch.cat([states, new], dim=2)
    return torch.cat([states, torch.zeros_like(new)], dim=2).scatter(2, _column_index(new, start), new)


def _column_index(new: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    index = start.to(new.device)[:, None] + torch.arange(new.shape[2], device=new.device)
    return index[:, None, :, None].expand_as(new)


def columns_of(states: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Columns `(batch or 1, n)` of `(batch, kv_heads, length, dim)` states."""
    index = columns.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(*states.shape[:2], -1, states.shape[3]))


def ring_positions(ends: torch.Tensor, size: int) -> torch.Tensor:
    """Which position before `ends` `(rows,)` each column of a ring holds, `(rows, size)`; negative for none."""
    last = ends[:, None] - 1
    return last - (last - torch.arange(size, device=ends.device)) % size


def ring_read(buffer: torch.Tensor, first: torch.Tensor | int, count: int) -> tuple[torch.Tensor, ...]:
    """Tokens `first` to `first + count` in order, as parts to be joined along the columns."""
    size = buffer.shape[2]
    if isinstance(first, torch.Tensor):
        return (columns_of(buffer, (first[:, None] + torch.arange(count, device=first.device)) % size),)
    begin = first % size
    around = max(begin + count - size, 0)
    return (buffer[:, :, begin : begin + count], buffer[:, :, :around])


def ring_write(
    buffer: torch.Tensor, new: torch.Tensor, start: torch.Tensor | int, new_counts: torch.Tensor | None
) -> None:
    """Write tokens from content position `start` on; of a padded row, the first `new_counts`."""
    size, q_len = buffer.shape[2], new.shape[2]
    if isinstance(start, int):
        new = new[:, :, -size:]
        begin = (start + q_len - new.shape[2]) % size
        until = min(begin + new.shape[2], size)
        buffer[:, :, begin:until] = new[:, :, : until - begin]
        buffer[:, :, : new.shape[2] - (until - begin)] = new[:, :, until - begin :]
    elif q_len == 1:
        # A hidden token takes a column too; `row_lost` of the cache counts it.
        write_columns(buffer, new, start % size)
    else:
        source = ring_positions(start + new_counts, size) - start[:, None]
        taken = columns_of(new, source.clamp(min=0))
        buffer.copy_(torch.where((source >= 0).to(buffer.device)[:, None, :, None], taken, buffer))


def fixed_zeros(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros that keep their address: never an inference tensor, which could not be written outside inference mode."""
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)
    with torch.inference_mode(False), torch.no_grad():
        zeros = torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)
    # CUDA graphs of a compiled step then read and write it where it lies.
    torch._dynamo.mark_static_address(zeros)
    return zeros


def refill(held: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """`held` with what `states` say, in place where the shapes agree."""
    if held.shape == states.shape:
        return held.copy_(states)
    return fixed_zeros(states.shape, states).copy_(states)


def check_batch(stored: torch.Tensor, new: torch.Tensor) -> None:
    """Raise `ValueError` where new states have other rows or KV heads than the stored ones."""
    if stored.shape[:2] != new.shape[:2]:
        raise ValueError(
            f"the cache holds (batch, kv_heads) = {tuple(stored.shape[:2])}, got new states of "
            f"{tuple(new.shape[:2])}; use a new cache, or `batch_repeat_interleave` / `batch_select_indices`."
        )
