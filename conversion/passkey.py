"""Passkeys: does a model still find a number that stands in one sentence of a long, monotonous text?

The text is made here, from a seed, for any tokenizer and without a chat template.
"""

import copy
import random
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


_OPENING = "The text below hides a secret number. Remember it, for it is asked for at the end.\n"
_FILLER = "The river runs past the mill. The mill stands by the road. The road goes on to the sea.\n"
_SECRET = "The secret number of the {name} is {number}. Remember it: {number}.\n"
_QUESTION = "The secret number of the {name} is"
_NAMES = ("baker", "miller", "sailor", "teacher", "farmer", "painter", "hunter", "singer", "doctor", "weaver")

# Several secrets in one text: each name stands right before its number, since a small model that finds one number
# among others by a name further away is rare.
_OPENING_OF_SEVERAL = "The text below hides numbers. Remember them, for they are asked for at the end.\n"
_NUMBER = "Remember: {name} {number}, {name} {number}.\n"
_QUESTION_OF_SEVERAL = "Remember: {name}"
_MORE_NAMES = (
    *("lawyer", "soldier", "shepherd", "carpenter", "tailor", "butcher", "gardener", "poet", "driver", "judge"),
    *("banker", "captain", "drummer", "barber", "dancer", "editor", "guard", "host", "king", "monk"),
    *("nurse", "pilot", "priest", "queen", "ranger", "sheriff", "student", "surgeon", "thief", "waiter"),
)


class Passkey(NamedTuple):
    """Token ids of one sample: `prefix` before the secret, `rest` with the secret and the question, and the answer."""

    prefix: torch.Tensor
    rest: torch.Tensor
    answer: torch.Tensor


def make_passkeys(tokenizer: Any, samples: int, length: int, seed: int = 0) -> list[Passkey]:
    """Samples whose secrets stand at depths that cover the text evenly, the earliest first.

    Every prefix begins with the one before it.

    Args:
        tokenizer: of the model, from transformers.
        samples (`int`): how many.
        length (`int`): tokens of a sample with its answer, at most.
        seed (`int`): of the numbers and names.
    Raises:
        ValueError: `length` leaves no room for other sentences.
    """
    chance = random.Random(seed)
    opening, filler = _start(tokenizer, _OPENING), _ids(tokenizer, _FILLER)
    parts = []
    for _ in range(samples):
        name, number = chance.choice(_NAMES), str(chance.randint(10000, 99999))
        parts.append((_ids(tokenizer, _SECRET.format(name=name, number=number)), *_question(tokenizer, name, number)))
    fixed = len(opening) + max(sum(map(len, part)) for part in parts)
    lines = _lines(length, fixed, len(filler))
    passkeys = []
    for place, (secret, question, answer) in enumerate(parts):
        before = round(lines * place / max(samples - 1, 1))
        rest = [*secret, *filler * (lines - before), *question]
        passkeys.append(Passkey(*map(torch.tensor, ([*opening, *filler * before], rest, answer))))
    return passkeys


def make_shared_passkeys(tokenizer: Any, texts: int, secrets: int, length: int, seed: int = 0) -> list[Passkey]:
    """Samples of which `secrets` share one text, that holds the numbers of all of them; much cheaper to measure.

    Args:
        tokenizer: of the model, from transformers.
        texts (`int`): how many.
        secrets (`int`): numbers in a text, at even depths, up to 40.
        length (`int`): tokens of a text with one question and answer, at most.
        seed (`int`): of the numbers and names.
    Raises:
        ValueError: `secrets` is out of range, or `length` leaves no room for other sentences.
    """
    names = (*_NAMES, *_MORE_NAMES)
    if not 1 <= secrets <= len(names):
        raise ValueError(f"`secrets` must lie between 1 and {len(names)}, the names that there are, got {secrets}.")
    chance = random.Random(seed)
    opening, filler = _start(tokenizer, _OPENING_OF_SEVERAL), _ids(tokenizer, _FILLER)
    passkeys = []
    for _ in range(texts):
        pairs = [(name, str(chance.randint(10000, 99999))) for name in chance.sample(names, secrets)]
        hidden = [_ids(tokenizer, _NUMBER.format(name=name, number=number)) for name, number in pairs]
        asked = [_question(tokenizer, name, number, _QUESTION_OF_SEVERAL) for name, number in pairs]
        fixed = len(opening) + sum(map(len, hidden)) + max(sum(map(len, part)) for part in asked)
        lines = _lines(length, fixed, len(filler))
        text, before = [*opening], 0
        for place, secret in enumerate(hidden):
            until = round(lines * (place + 0.5) / secrets)
            text += [*filler * (until - before), *secret]
            before = until
        text += filler * (lines - before)
        passkeys += [Passkey(*map(torch.tensor, (text, question, answer))) for question, answer in asked]
    return passkeys


def _lines(length: int, fixed: int, line: int) -> int:
    """How many lines of `line` tokens there is room for beside `fixed` tokens."""
    lines = (length - fixed) // line
    if lines < 1:
        raise ValueError(
            f"`length` must leave room for a sentence beside the secret ({fixed + line} tokens), got {length}; use a "
            "longer one."
        )
    return lines


def _question(tokenizer: Any, name: str, number: str, question_of: str = _QUESTION) -> tuple[list[int], list[int]]:
    """Ids of a question, and of what completes it: the number, with whatever the tokenizer merges into it."""
    question = question_of.format(name=name)
    asked, whole = (_ids(tokenizer, text) for text in (question, f"{question} {number}"))
    same = next(
        (place for place, pair in enumerate(zip(asked, whole, strict=False)) if pair[0] != pair[1]), len(asked)
    )
    return whole[:same], whole[same:]


def _start(tokenizer: Any, text: str) -> list[int]:
    """Ids of the beginning of a document, with the token that the tokenizer puts there."""
    ids, bos = _ids(tokenizer, text), tokenizer.bos_token_id
    return [bos, *ids] if bos is not None and tokenizer(text).input_ids[:1] == [bos] != ids[:1] else ids


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def measure_retrieval(model: PreTrainedModel, passkeys: list[Passkey], description: str) -> dict[str, float]:
    """How many secrets a model completes, as greedy decoding would.

    Args:
        model (`PreTrainedModel`): any causal language model that returns a cache.
        passkeys (`list[Passkey]`): from `make_passkeys` or `make_shared_passkeys`; a prefix that begins with the one
            before it is read from there on.
        description (`str`): of the progress bar.
    Returns:
        `dict`: `exact`: share of the samples that are right in every token; `tokens`: share of the answers' tokens
        that are right, each after the right ones before it; `samples`.
    """
    exact, right = [], []
    cache, known = None, passkeys[0].prefix[:0]
    for prefix, rest, answer in logging.tqdm(passkeys, desc=description, unit="sample", leave=False):
        if not torch.equal(prefix[: len(known)], known):
            cache, known = None, prefix[:0]
        if len(prefix) > len(known):
            ids = prefix[len(known) :][None].to(model.device)
            cache = cache_of(model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}))
            known = prefix
        ids = torch.cat([rest, answer[:-1]])[None].to(model.device)
        options = {CACHE_ARGUMENT: copy.deepcopy(cache), "logits_to_keep": len(answer)}
        hits = model(ids, use_cache=True, **options).logits[0].argmax(-1).cpu() == answer
        exact.append(bool(hits.all()))
        right += hits.tolist()
    return {"exact": sum(exact) / len(exact), "tokens": sum(right) / len(right), "samples": len(exact)}
