"""Passkeys: what the generator promises, and retrieval against decoding without a cache."""

import re

import pytest
import torch

from hysparse_hf import HySparseForCausalLM
from hysparse_hf.conversion.passkey import make_passkeys, make_shared_passkeys, measure_retrieval


def test_every_sample_hides_one_number_and_asks_for_it(letters):
    for sample in make_passkeys(letters, 7, 900):
        text = letters.decode(torch.cat(sample))
        hidden = re.findall(r"The secret number of the (\w+) is (\d{5})\. Remember it: (\d{5})\.\n", text)
        assert len(hidden) == 1
        name, number, again = hidden[0]
        assert number == again
        assert text.endswith(f"The secret number of the {name} is {number}")
        assert letters.decode(sample.answer).strip() == number
        assert 900 - 200 < sum(map(len, sample)) <= 900


def test_samples_are_repeatable_and_cover_the_text(letters):
    first, again, other = (make_passkeys(letters, 5, 900, seed=seed) for seed in (0, 0, 1))
    texts = [[letters.decode(torch.cat(sample)) for sample in samples] for samples in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]
    depths = [text.index("Remember it:") / len(text) for text in texts[0]]
    assert depths == sorted(depths)
    assert depths[0] < 0.25 < 0.75 < depths[-1]
    assert all(torch.equal(b.prefix[: len(a.prefix)], a.prefix) for a, b in zip(first, first[1:], strict=False))


def test_shared_texts_hold_every_number_that_is_asked_for(letters):
    samples = make_shared_passkeys(letters, 3, 4, 900)
    assert len(samples) == 12
    texts = [letters.decode(sample.prefix) for sample in samples]
    assert texts == [texts[i] for i in (0, 4, 8) for _ in range(4)]
    assert len(set(texts)) == 3
    for sample, text in zip(samples, texts, strict=True):
        name = letters.decode(sample.rest).removeprefix("Remember: ").strip()
        number = letters.decode(sample.answer).strip()
        assert text.count(f"Remember: {name} {number}, {name} {number}.\n") == text.count(name + " ") / 2 == 1
        assert 900 - 200 < sum(map(len, sample)) <= 900
    depths = [text.index("Remember: " + letters.decode(s.rest)[10:]) for s, text in zip(samples, texts, strict=True)]
    assert all(depths[i : i + 4] == sorted(depths[i : i + 4]) for i in (0, 4, 8))
    assert depths[0] < 900 / 4 < 900 * 3 / 4 < depths[3]


def test_shared_texts_have_as_many_secrets_as_names(letters):
    with pytest.raises(ValueError, match="between 1 and 40"):
        make_shared_passkeys(letters, 1, 41, 4000)


def test_a_length_without_room_is_refused(letters):
    with pytest.raises(ValueError, match="room for a sentence beside the secret"):
        make_passkeys(letters, 1, 100)


def test_first_token_of_a_document_is_kept(letters):
    letters.add_special_tokens({"bos_token": "<s>"})
    plain = make_passkeys(letters, 1, 900)[0]
    assert plain.prefix[0] != letters.bos_token_id, "this tokenizer adds none"
    from tokenizers.processors import TemplateProcessing

    letters.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", letters.bos_token_id)]
    )
    begun = make_passkeys(letters, 1, 901)[0]
    assert begun.prefix.tolist() == [letters.bos_token_id, *plain.prefix.tolist()]
    assert torch.equal(begun.rest, plain.rest)


@torch.no_grad()
def test_retrieval_is_that_of_greedy_decoding(make_source, convert_naive, letters):
    """Answers are replaced by what the model itself writes, some of them spoilt, so that both counts are known."""
    source, _ = make_source(max_position_embeddings=1024, num_hidden_layers=3)
    model = HySparseForCausalLM.from_pretrained(convert_naive(source, block_size=16, budget=64)).eval()
    samples = []
    # A text of its own for each of the first, then two of one text.
    for number, sample in enumerate([*make_passkeys(letters, 2, 400), *make_shared_passkeys(letters, 1, 2, 400)]):
        ids = torch.cat([sample.prefix, sample.rest])
        for _ in range(len(sample.answer)):
            ids = torch.cat([ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
        answer = ids[-len(sample.answer) :].clone()
        if number % 2:
            answer[-1] = (answer[-1] + 1) % 97
        samples.append(sample._replace(answer=answer))
    tokens = sum(len(sample.answer) for sample in samples)
    assert measure_retrieval(model, samples, "") == {"exact": 0.5, "tokens": (tokens - 2) / tokens, "samples": 4}
