"""What the arguments of one forward call mean: which tokens are visible, where documents begin, which cache to use.

Everything that contradicts itself is an error here, before any layer runs.
"""

from dataclasses import replace

import torch

from .cache_hysparse import HySparseCache
from .compat_transformers import CACHE_ARGUMENT
from .configuration_hysparse import HySparseConfig
from .rows_hysparse import PLAIN_ROWS, Rows, TokenLayout, layout_of_length, layout_of_mask, packed_rows


def read_inputs(
    config: HySparseConfig,
    states: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cache: HySparseCache | None,
    use_cache: bool | None,
) -> tuple[TokenLayout, HySparseCache | None]:
    """Find the layout of the new tokens, and make a cache where one is wanted and possible.

    Args:
        states (`torch.Tensor`): `(batch, q_len, hidden)`, the new tokens' embeddings.
        attention_mask (`torch.Tensor`, *optional*): `(batch, cached + q_len)` or 4-D, as in the model's forward.
        position_ids (`torch.Tensor`, *optional*): `(batch or 1, q_len)`.
        cu_seqlens (`torch.Tensor`, *optional*): `(documents + 1,)`, bounds of packed documents.
        cache (`HySparseCache`, *optional*): filled or empty; must have passed `check_cache`.
        use_cache (`bool`, *optional*): make a cache when none is given; packed input makes none.
    Raises:
        ValueError: arguments that contradict each other or the cache.
        TypeError: a mask that is no tensor.
    """
    q_len, device = states.shape[1], states.device
    if position_ids is not None and position_ids.shape[1:] != (q_len,):
        raise ValueError(
            f"`position_ids` must be (batch or 1, {q_len}), one per new token, got {tuple(position_ids.shape)}; give "
            "those of the new tokens alone."
        )
    if cache is not None:
        cache.check_room(q_len)
    layout = _masked_layout(states, attention_mask, cu_seqlens, cache)
    documents = packed_rows(position_ids, cu_seqlens, q_len, layout)
    if cache is not None and documents is not None and _restarts(documents, while_tracing=False):
        if layout is not None and _hides_amid(layout.visible, q_len):
            raise ValueError(
                "`position_ids` restart behind tokens that `attention_mask` hides, got that with a "
                f"`{CACHE_ARGUMENT}`: assisted decoding and prompt lookup of transformers count anew behind a prompt "
                "padded on the right; pad it on the left."
            )
        raise ValueError(
            f"packed documents (restarting `position_ids` or `cu_seq_lens_q`) cannot be added to a "
            f"`{CACHE_ARGUMENT}`; leave it out, or give each document a row of its own."
        )
    if use_cache and cache is None and (documents is None or not _restarts(documents, while_tracing=True)):
        cache, documents = HySparseCache(config), None
    if layout is None and cache is not None:
        layout = cache.layout_without_mask(q_len, device)
    elif layout is None:
        layout = layout_of_length(0, q_len, device, documents or PLAIN_ROWS)
    elif cache is None and documents is not None:
        layout = replace(layout, rows=documents)
    if cache is not None and layout.past and q_len > 1 and attention_mask is not None:
        # Decoding only adds to the mask, and is spared the look at it.
        cache.check_rows(layout)
    return layout, cache


def check_cache(cache, n_layers: int) -> None:
    """Raise `TypeError` for a cache of another class, `ValueError` for one of another number of layers."""
    # By name: a checkpoint's own copy of the code has a cache class of its own.
    if cache is not None and "HySparseCache" not in (known.__name__ for known in type(cache).__mro__):
        raise TypeError(
            f"`{CACHE_ARGUMENT}` must be a HySparseCache, got {type(cache).__name__}; pass "
            "`HySparseCache(model.config)`, or leave it out and use the one in the output."
        )
    if cache is not None and len(cache) != n_layers:
        raise ValueError(
            f"`{CACHE_ARGUMENT}` must have one layer per model layer ({n_layers}), got {len(cache)}; make it from "
            "this model's config."
        )


def check_logits_to_keep(logits_to_keep, q_len: int) -> None:
    """Raise `ValueError` unless it is a number that is not negative, or a tensor of some of `q_len` positions.

    The positions themselves are tried on the host alone: a device would have to be waited for.
    """
    if isinstance(logits_to_keep, int) and logits_to_keep >= 0:
        return
    came: object = logits_to_keep
    if isinstance(logits_to_keep, torch.Tensor):
        came = f"{logits_to_keep.dtype} of {tuple(logits_to_keep.shape)}"
        if logits_to_keep.dtype == torch.bool and logits_to_keep.shape == (q_len,):
            return
        if logits_to_keep.dtype in (torch.int32, torch.int64) and logits_to_keep.dim() == 1:
            if logits_to_keep.device.type != "cpu" or torch.compiler.is_compiling():
                return
            try:
                torch.arange(q_len, device="cpu")[logits_to_keep]
                return
            except IndexError as error:
                came = error
    raise ValueError(
        f"`logits_to_keep` must be a number of last positions (0: all), a tensor of positions from {-q_len} to "
        f"{q_len - 1}, or a bool tensor of {q_len}, got {came}; positions count the new tokens of this call."
    )


def check_generation_cache(cache, max_cache_length: int, drafts: bool) -> None:
    """Raise `ValueError` for a cache with which `generate()` could not go on, or would go on wrong.

    Args:
        cache (`HySparseCache`, *optional*): given, or made for this call.
        max_cache_length (`int`): tokens that will be cached at most.
        drafts (`bool`): whether tokens are drafted and undone.
    """
    if drafts and cache is not None and int(cache.get_seq_length()):
        raise ValueError(
            f"assisted decoding must begin with an empty `{CACHE_ARGUMENT}`, got one of {int(cache.get_seq_length())} "
            "tokens, behind which transformers would write the whole prompt again; leave it out."
        )
    room = getattr(cache, "max_cache_len", None)
    if room is None:
        return
    if max_cache_length > room:
        raise ValueError(
            f"`{CACHE_ARGUMENT}` was made for `max_cache_len` = {room} tokens, but up to {max_cache_length} are to be "
            "cached; make it longer, or ask for fewer new tokens."
        )
    if drafts:
        raise ValueError(
            "assisted decoding undoes tokens, which the windows of a pre-allocated cache cannot without limit; use "
            "`cache_implementation='dynamic'`, or a HySparseCache without `max_cache_len`."
        )


def _masked_layout(
    states: torch.Tensor, attention_mask, cu_seqlens, cache: HySparseCache | None
) -> TokenLayout | None:
    """The layout that a mask describes, if there is one; `ValueError` for a mask that cannot be what was meant."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(
            f"`attention_mask` must be a tensor, got {type(attention_mask).__name__}; pass the tokenizer's mask "
            "with `return_tensors='pt'`."
        )
    (batch, q_len), device = states.shape[:2], states.device
    past = cache.known_length(q_len) if cache is not None else 0
    rows, length = attention_mask.shape[0], attention_mask.shape[-1]
    if past is None:
        past = length - q_len
    is_one_for_all = attention_mask.dim() == 4 and rows == 1
    # A pre-allocated cache knows its rows, so that a step's mask need not grow.
    is_of_new = attention_mask.dim() == 2 and length == q_len and cache is not None and cache.max_cache_len is not None
    fits = (length == past + q_len or is_of_new) and (rows == batch or is_one_for_all)
    if attention_mask.dim() not in (2, 4) or not fits:
        raise ValueError(
            f"`attention_mask` must be ({batch}, {past + q_len}) or ({batch} or 1, 1 or heads, {q_len}, "
            f"{past + q_len}): {past} cached and {q_len} new tokens; got {tuple(attention_mask.shape)}. "
            "Pass the mask of all tokens, cached ones included."
        )
    if cu_seqlens is not None:
        raise ValueError(
            "`attention_mask` and `cu_seq_lens_q` both say where rows begin, got both; leave out the mask: "
            "packed documents have no padding."
        )
    if attention_mask.dim() == 2:
        make_layout = layout_of_mask if cache is None else cache.layout_of_mask
        return make_layout(attention_mask.to(device), q_len)
    if cache is not None and past and (cache.row_counts is not None or cache.max_cache_len is not None):
        raise ValueError(
            f"a 4-D `attention_mask` counts slots, but the `{CACHE_ARGUMENT}` is pre-allocated, or holds rows that "
            "came with a (batch, length) mask and are stored without their padding; keep to one kind of mask."
        )
    return layout_of_length(past, q_len, device, Rows(visibility=_visibility(attention_mask.to(device))))


def last_tokens(
    config: HySparseConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    *,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """The slot `(batch,)` of each row's last token, for a head that reads one token per row.

    A `(batch, length)` mask has the last word. Without one a row ends with its last id that is not the padding's, and
    embeddings end with the last slot. Arguments as in the model's forward, which has accepted them.

    Raises:
        ValueError: packed documents, several rows of which nothing says where they end, or one without a new token.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    assert given is not None
    batch, q_len = given.shape[:2]
    is_masked = attention_mask is not None and attention_mask.dim() == 2
    layout = layout_of_mask(attention_mask.to(given.device), q_len) if is_masked else None
    documents = packed_rows(position_ids, cu_seqlens, q_len, layout)
    if documents is not None and _restarts(documents, while_tracing=False):
        raise ValueError(
            "packed documents (restarting `position_ids` or `cu_seq_lens_q`) cannot be classified: a row has one "
            "label; give each document a row of its own."
        )
    slots = torch.arange(q_len, device=given.device).expand(batch, q_len)
    if layout is not None and layout.visible is not None:
        slots = slots * layout.visible[:, -q_len:]
        if layout.past and not torch.compiler.is_compiling() and not bool(layout.new_counts.all()):
            raise ValueError(
                "`attention_mask` must show a new token in every row that is classified behind a cache, got rows of "
                "nothing but padding there; classify the other rows alone."
            )
    elif config.pad_token_id is None and batch > 1:
        raise ValueError(
            f"several rows ({batch}) need `attention_mask` or `config.pad_token_id`, got neither: nothing says where "
            "each row ends; pass the tokenizer's mask."
        )
    elif config.pad_token_id is not None and input_ids is not None:
        slots = slots * (input_ids != config.pad_token_id)
    return slots.amax(-1)


def _restarts(rows: Rows, while_tracing: bool) -> bool:
    """Whether there is more than one document. Reads the data, or answers `while_tracing` when it cannot."""
    return while_tracing if torch.compiler.is_compiling() else bool(rows.first_key.any())


def _hides_amid(visible: torch.Tensor | None, q_len: int) -> bool:
    """Whether a new token is hidden behind a visible one. Reads the data."""
    if visible is None:
        return False
    new = visible[:, -q_len:]
    return bool((new[:, :-1] & ~new[:, 1:]).any())


def _visibility(attention_mask: torch.Tensor) -> torch.Tensor:
    """A 4-D mask as bool: additive float masks hide with -10,000 or less, which no bias reaches."""
    if attention_mask.is_floating_point():
        return attention_mask > -1e4
    return attention_mask.bool()
