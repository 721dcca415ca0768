"""Ways of decoding other than one greedy token at a time, and what `generate()` can be asked for beside tokens."""

import pytest
import torch
from models import tiny, tiny2
from models.generations import WAYS, both_generations, case, over_settings
from models.tiny import (
    assert_same_logits,
    draw_ids,
    greedy,
    padded_mask,
    recorded_forwards,
    spread,
    tiny_model,
    uncached_greedy,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

from hysparse_hf.modeling.compat_transformers import CACHE_ARGUMENT, cache_of


@over_settings(second=WAYS, fast=("default",))
def test_A06_beams_equal_beams_without_a_cache(generation, switch):
    model = generation.tiny_model(**generation.MODELS[switch])
    ids = draw_ids(2, 13)
    arguments = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    on, off = (greedy(model, ids, 14, use_cache=use_cache, **arguments) for use_cache in (True, False))
    assert torch.equal(on.sequences, off.sequences)
    torch.testing.assert_close(on.sequences_scores, off.sequences_scores, atol=1e-5, rtol=0)


@both_generations
def test_beams_of_a_padded_batch_equal_solo_beams(generation):
    model = generation.tiny_model()
    rows = [draw_ids(1, length, seed=length)[0] for length in (7, 13)]
    mask = padded_mask("left", (7, 13), 13)
    output = greedy(model, spread(rows, mask), 10, attention_mask=mask, num_beams=3)
    for row, tokens in enumerate(rows):
        solo = greedy(model, tokens[None], 10, num_beams=3, use_cache=False)[0, len(tokens) :]
        assert torch.equal(output[row, 13:], solo)


@pytest.mark.parametrize(
    ("generation", "switch", "padding"),
    [case(tiny, switch, 0) for switch in tiny.SWITCHES]
    + [case(tiny, switch, 3) for switch in ("default", "window_layers", "merged_own")]
    + [case(tiny2, "default", padding) for padding in (0, 3)]
    + [case(tiny2, way, 3, marks=pytest.mark.slow) for way in WAYS if way != "default"],
)
def test_A03_prompt_lookup_equals_greedy(generation, switch, padding):
    model = generation.tiny_model(**generation.MODELS[switch])
    tokens = draw_ids(1, 5)[0].repeat(4)
    mask = padded_mask("left", (20,), 20 + padding)
    ids = spread([tokens], mask)
    with recorded_forwards(model) as shapes:
        output = greedy(model, ids, 25, attention_mask=mask, prompt_lookup_num_tokens=3)
    assert max(length for _, length in shapes[1:]) > 1
    assert torch.equal(output, uncached_greedy(model, ids, 25, mask))


@pytest.mark.parametrize("same", [True, False], ids=["good_drafts", "bad_drafts"])
@both_generations
def test_A03_an_assistant_model_equals_greedy(generation, same):
    model = generation.tiny_model()
    assistant = generation.tiny_model(seed=0 if same else 7)
    ids = draw_ids(1, 20)
    assert torch.equal(greedy(model, ids, 25, assistant_model=assistant), uncached_greedy(model, ids, 25))


@pytest.mark.parametrize("layers", [1, 3, 4, 5])
@both_generations
def test_drafts_that_leave_the_model_early_equal_greedy(generation, layers):
    model, ids = generation.tiny_model(), draw_ids(1, 20)
    drafted = greedy(model, ids, 25, assistant_early_exit=layers)
    assert model.config.num_hidden_layers == 6
    assert torch.equal(drafted, uncached_greedy(model, ids, 25))


@pytest.mark.parametrize("kind", ["assistant", "lookup"])
@both_generations
def test_drafts_behind_a_prompt_padded_on_the_right_are_refused_A03(generation, kind):
    model = generation.tiny_model()
    mask = padded_mask("right", (17,), 20)
    drafting = {"assistant_model": generation.tiny_model(seed=7)} if kind == "assistant" else {}
    ids = draw_ids(1, 5).repeat(1, 4) * mask
    with pytest.raises(ValueError, match="pad it on the left"):
        greedy(model, ids, 8, attention_mask=mask, **(drafting or {"prompt_lookup_num_tokens": 3}))


def test_drafts_of_an_assistant_sample_what_the_model_samples():
    """With an assistant that is the model itself every draft is accepted, so only the model speaks."""
    model = tiny_model()
    with recorded_forwards(model) as shapes:
        output = model.generate(
            draw_ids(1, 20),
            max_new_tokens=25,
            do_sample=True,
            top_k=1,
            assistant_model=tiny_model(),
            eos_token_id=None,
        )
    assert max(length for _, length in shapes[1:]) > 1
    assert torch.equal(output, uncached_greedy(model, draw_ids(1, 20), 25))


@pytest.mark.parametrize("kind", ["lookup", "assistant"])
def test_a_turn_without_drafts_goes_on_where_drafts_were(kind):
    model = tiny_model()
    drafts = {"lookup": {"prompt_lookup_num_tokens": 3}, "assistant": {"assistant_model": tiny_model(seed=7)}}[kind]
    first = greedy(model, draw_ids(1, 20), 12, return_dict_in_generate=True, **drafts)
    ids = torch.cat([first.sequences, draw_ids(1, 5, seed=9)], dim=1)
    kept = {CACHE_ARGUMENT: cache_of(first)}
    with recorded_forwards(model) as shapes, pytest.raises(ValueError, match="must begin with an empty"):
        greedy(model, ids, 12, **drafts, **kept)
    assert shapes == []
    assert torch.equal(greedy(model, ids, 12, **kept), uncached_greedy(model, ids, 12))


# What can be asked for


@pytest.mark.parametrize("implementation", [None, "static", "offloaded"])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_scores_logits_and_states_of_every_step(padded, implementation):
    model = tiny_model(torch.float64)
    mask = padded_mask("left", (9, 14), 14) if padded else torch.ones(2, 14, dtype=torch.long)
    ids = draw_ids(2, 14) * mask
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    result = greedy(
        model,
        ids,
        8,
        attention_mask=mask,
        return_dict_in_generate=True,
        repetition_penalty=1.5,
        cache_implementation=implementation,
        **asked,
    )
    whole = torch.cat([mask, mask.new_ones(2, 8)], dim=1)
    with torch.no_grad():
        expected = model(result.sequences, attention_mask=whole, use_cache=False, output_hidden_states=True)
    for step in range(8):
        torch.testing.assert_close(result.logits[step].double(), expected.logits[:, 13 + step], atol=1e-4, rtol=1e-5)
        assert not torch.equal(result.scores[step], result.logits[step])
        assert torch.equal(result.scores[step].argmax(-1), result.sequences[:, 14 + step])
        for ours, theirs in zip(result.hidden_states[step], expected.hidden_states, strict=True):
            assert_same_logits(ours[:, -1], theirs[:, 13 + step])


@pytest.mark.parametrize("implementation", [None, "static"])
def test_maps_of_every_step(implementation):
    model = tiny_model(torch.float64)
    model.set_attn_implementation("eager")
    ids = draw_ids(2, 14)
    asked = {"output_attentions": True, "return_dict_in_generate": True}
    result = greedy(model, ids, 5, cache_implementation=implementation, **asked)
    with torch.no_grad():
        expected = model(result.sequences, use_cache=False, output_attentions=True).attentions
    for step in range(1, 5):
        for ours, theirs in zip(result.attentions[step], expected, strict=True):
            # A pre-allocated cache has room behind the tokens, which nothing attends to.
            assert_same_logits(ours[:, :, 0, : 14 + step], theirs[:, :, 13 + step, : 14 + step])
            assert not ours[:, :, 0, 14 + step :].any()


class OnlyEven(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 1, -float("inf"))


class AfterThree(StoppingCriteria):
    def __init__(self, prompt):
        self.prompt = prompt

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.prompt + 3)


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_custom_logits_processors_and_stopping_criteria(arguments):
    model = tiny_model()
    ids = draw_ids(1, 3).repeat(1, 4)
    asked = {"logits_processor": LogitsProcessorList([OnlyEven()]), **arguments}
    new = greedy(model, ids, 12, **asked)[:, 12:]
    assert not (new % 2).any()
    if "num_beams" not in arguments:
        plain = ids
        for _ in range(12):
            with torch.no_grad():
                logits = model(plain, use_cache=False).logits[:, -1]
            plain = torch.cat([plain, OnlyEven()(plain, logits).argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(new, plain[:, 12:])
        stopped = greedy(model, ids, 12, stopping_criteria=StoppingCriteriaList([AfterThree(12)]), **asked)
        assert 3 <= stopped.shape[1] - 12 < 12
        assert torch.equal(stopped[:, 12:], new[:, : stopped.shape[1] - 12])


# With a tokenizer


TEMPLATE = (
    "{% for message in messages %}w2 {{ message['content'] }} w3 {% endfor %}"
    "{% if add_generation_prompt %}w4{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per word `w0` to `w60`; the first pads."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", unk_token="w1", padding_side="left", chat_template=TEMPLATE
    )


def test_text_generation_pipeline(tokenizer):
    model = tiny_model()
    prompts = ["w5 w6 w7 w8", "w9 w10 w11 w12 w13 w14 w15 w16 w17 w18"]
    # One setting object: the pipeline would fill in defaults of its own.
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    answers = generate(prompts, batch_size=2, max_new_tokens=9, do_sample=False, return_full_text=False)
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = uncached_greedy(model, ids, 9)[0, ids.shape[1] :]
        assert answer["generated_text"].split() == tokenizer.decode(new, skip_special_tokens=True).split()


def test_chat_template_over_several_turns(tokenizer):
    model = tiny_model()
    chat = [{"role": "user", "content": "w20 w21 w22"}]
    for turn in range(3):
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True, tokenize=True
        )
        output = model.generate(**inputs, max_new_tokens=7, do_sample=False)
        assert torch.equal(output, uncached_greedy(model, inputs["input_ids"], 7))
        reply = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        chat += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"w{30 + turn}"}]


def test_text_streams_word_by_word(tokenizer):
    model = tiny_model()
    inputs = tokenizer("w5 w6 w7 w8", return_tensors="pt", return_token_type_ids=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert "".join(streamer).split() == tokenizer.decode(output[0, 4:]).split()
