"""Configuration: layer plan, checks that say what to do, JSON, and rotary settings against the library's models."""

import json

import naive_model
import pytest
import torch
import transformers
from models.tiny import assert_same_logits, padded_mask, spread, tiny_config

from hysparse_hf import HySparseConfig, HySparseForCausalLM


def small(**fields):
    """Keyword arguments of a config that builds in milliseconds."""
    return {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": 64,
        "sliding_window": 6,
        "oracle_block_size": 4,
        "oracle_budget": 8,
        "bos_token_id": None,
        "eos_token_id": None,
        **fields,
    }


class TestPlan:
    @pytest.mark.parametrize(
        ("layers", "ratio", "full"),
        [
            pytest.param(49, 11, [0, 12, 24, 36, 48], id="49-at-1:11"),
            pytest.param(36, 3, [0, 4, 8, 12, 16, 20, 24, 28, 32, 35], id="36-at-1:3"),
            pytest.param(1, 3, [0], id="one-layer"),
            pytest.param(4, 0, [0, 1, 2, 3], id="ratio-0"),
        ],
    )
    def test_regular_plan_ends_with_a_full_layer(self, layers, ratio, full):
        config = HySparseConfig(num_hidden_layers=layers, sparse_layers_per_full=ratio)
        assert [i for i, kind in enumerate(config.layer_plan) if kind == "full"] == full
        assert set(config.layer_plan) <= {"full", "sparse"}

    def test_explicit_plan_is_kept(self):
        plan = ["window", "full", "sparse", "window", "sparse", "full"]
        assert HySparseConfig(**small(num_hidden_layers=6, layer_plan=plan)).layer_plan == plan

    @pytest.mark.parametrize(
        ("plan", "donors"),
        [
            (["full", "sparse", "sparse", "full", "sparse"], [None, 0, 0, None, 3]),
            (["full", "full", "sparse", "window", "sparse"], [None, None, 1, None, 1]),
            (["window", "full", "sparse", "full"], [None, None, 1, None]),
        ],
    )
    def test_donor_is_the_preceding_full_layer_B12(self, plan, donors):
        config = HySparseConfig(**small(num_hidden_layers=len(plan), layer_plan=plan))
        assert config.donor_plan == donors

    @pytest.mark.parametrize(
        ("switches", "kept"),
        [
            pytest.param({}, ["full", "window", "window", "full"], id="default"),
            pytest.param({"share_full_kv": False}, ["full", "full", "window", "full"], id="own-kv"),
            pytest.param({"window_branch": "none"}, ["full", "none", "window", "full"], id="no-window"),
            pytest.param({"window_branch": "shared_kv"}, ["full", "none", "window", "full"], id="shared-window"),
            pytest.param({"window_branch": "merged_shared"}, ["full", "none", "window", "full"], id="merged-shared"),
            pytest.param({"window_branch": "merged_own"}, ["full", "window", "window", "full"], id="merged-own"),
            pytest.param({"dense": True}, ["full", "full", "full", "full"], id="dense"),
        ],
    )
    def test_what_each_layer_caches(self, switches, kept):
        plan = ["full", "sparse", "window", "full"]
        config = HySparseConfig(**small(layer_plan=plan, **switches))
        assert config.cache_plan == kept
        assert set(config.layer_types) <= {"full_attention", "sliding_attention"}


class TestDefaults:
    def test_are_those_of_the_specification(self):
        config = HySparseConfig()
        fields = {
            "oracle_block_size": 64,
            "oracle_budget": 1024,
            "sliding_window": 128,
            "oracle_block_reduction": "max",
            "oracle_head_reduction": "max",
            "oracle_forced_first_blocks": 0,
            "oracle_forced_local_blocks": 0,
            "gate_granularity": "elementwise",
            "attention_sink": True,
            "full_layer_gate": False,
            "window_layer_gate": False,
            "share_full_kv": True,
            "share_oracle": True,
            "window_branch": "own",
            "dense": False,
        }
        assert {name: getattr(config, name) for name in fields} == fields

    @pytest.mark.parametrize(
        ("given", "name", "value"),
        [
            ({"num_key_value_heads": None}, "num_key_value_heads", 4),
            ({}, "head_dim", 16),
            ({"head_dim": 40}, "v_head_dim", 40),
            ({"attention_bias": True}, "attention_output_bias", True),
            ({"attention_bias": True, "attention_output_bias": False}, "attention_output_bias", False),
        ],
    )
    def test_derived(self, given, name, value):
        assert getattr(HySparseConfig(**small(**given)), name) == value


REFUSED = {
    "heads": ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads"),
    "no-kv-heads": ({"num_key_value_heads": 0}, "num_key_value_heads"),
    "no-layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "negative-ratio": ({"sparse_layers_per_full": -1}, "sparse_layers_per_full"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout"),
    "kind": ({"layer_plan": ["full", "dense", "sparse", "full"]}, "layer_plan"),
    "plan-length": ({"layer_plan": ["full", "sparse"]}, "layer_plan"),
    "sparse-first": ({"layer_plan": ["sparse", "full", "sparse", "full"]}, "layer_plan"),
    "block-size": ({"oracle_block_size": 0}, "oracle_block_size"),
    "budget": ({"oracle_block_size": 64, "oracle_budget": 1000}, "oracle_budget"),
    "small-budget": ({"oracle_block_size": 64, "oracle_budget": 32}, "oracle_budget"),
    "forced": ({"oracle_forced_first_blocks": 2, "oracle_forced_local_blocks": 1}, "oracle_forced_first_blocks"),
    "forced-negative": ({"oracle_forced_local_blocks": -1}, "oracle_forced_local_blocks"),
    "window": ({"sliding_window": 0}, "sliding_window"),
    "window-branch": ({"window_branch": "both"}, "window_branch"),
    "shared-window-of-own-kv": ({"share_full_kv": False, "window_branch": "shared_kv"}, "window_branch"),
    "merged-shared-of-own-kv": ({"share_full_kv": False, "window_branch": "merged_shared"}, "window_branch"),
    "rope-without-full": ({"rope_parameters": {"sparse": {"rope_type": "default"}}}, "rope_parameters"),
    "rope-unknown-kind": (
        {"rope_parameters": {"full": {"rope_type": "default"}, "sprase": {"rope_type": "default"}}},
        "rope_parameters",
    ),
    "rope-library-kinds": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e5}}},
        "rope_parameters",
    ),
    "rope-type": ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
    "odd-head-dim": ({"head_dim": 15}, "head_dim"),
    "no-channels": ({"head_dim": 0}, "head_dim"),
    "no-value-channels": ({"v_head_dim": 0}, "v_head_dim"),
    "empty-plan": ({"layer_plan": []}, "layer_plan"),
}


class TestErrors:
    @pytest.mark.parametrize(("fields", "name"), REFUSED.values(), ids=REFUSED)
    def test_names_the_field_and_says_what_to_do(self, fields, name):
        with pytest.raises(ValueError, match=name) as caught:
            HySparseConfig(**small(**fields))
        remedies = ("; ", "must be one of", "among")
        assert any(words in str(caught.value) for words in remedies), f"no remedy in: {caught.value}"

    def test_budget_message_offers_the_multiples_around_it(self):
        with pytest.raises(ValueError, match=r"got 1000; use 960 or 1024"):
            HySparseConfig(**small(oracle_block_size=64, oracle_budget=1000))

    @pytest.mark.parametrize(
        "field", ["hidden_act", "oracle_block_reduction", "oracle_head_reduction", "gate_granularity"]
    )
    def test_unknown_choice_is_refused(self, field):
        with pytest.raises(ValueError, match=f"`{field}` must be one of"):
            HySparseConfig(**small(**{field: "median"}))

    def test_a_field_set_later_is_checked_when_the_model_is_built(self):
        config = HySparseConfig(**small())
        config.oracle_budget = 10
        with pytest.raises(ValueError, match="`oracle_budget` must be a multiple"):
            HySparseForCausalLM(config)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.3 * i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


class TestJson:
    @pytest.mark.parametrize("rope", [None, *ROPES], ids=str)
    def test_round_trip(self, tmp_path, rope):
        config = HySparseConfig(**small(head_dim=16, v_head_dim=24, rope_parameters=ROPES.get(rope)))
        config.save_pretrained(tmp_path)
        loaded = HySparseConfig.from_pretrained(tmp_path)
        assert loaded.to_dict() == config.to_dict()
        assert loaded.head_dim == 16
        assert loaded.v_head_dim == 24

    def test_head_dim_of_its_own_shapes_every_projection_C02(self, tmp_path):
        # 4 heads of 40 channels on a hidden size of 64.
        tiny_config(head_dim=40).save_pretrained(tmp_path)
        config = HySparseConfig.from_pretrained(tmp_path)
        assert (config.head_dim, config.v_head_dim, config.hidden_size) == (40, 40, 64)
        for layer in HySparseForCausalLM(config).model.layers:
            attention = layer.self_attn
            shapes = [tuple(getattr(attention, f"{name}_proj").weight.shape) for name in "qkvo"]
            assert shapes == [(160, 64), (80, 64), (80, 64), (64, 160)]

    def test_round_trip_of_settings_per_kind(self, tmp_path):
        ropes = {"full": None, "sparse": ROPES["yarn"], "window": ROPES["linear"]}
        config = HySparseConfig(**small(rope_parameters=ropes))
        config.save_pretrained(tmp_path)
        loaded = HySparseConfig.from_pretrained(tmp_path)
        assert loaded.rope_for("full") is None
        for kind in ("sparse", "window"):
            assert loaded.rope_for(kind) == config.rope_for(kind)
            assert loaded.rope_for(kind).items() >= ropes[kind].items()

    def test_every_own_field_is_written(self, tmp_path):
        HySparseConfig(**small()).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert {"layer_plan", "oracle_budget", "gate_granularity", "share_full_kv", "dense"} <= set(written)
        assert written["model_type"] == "hysparse"

    def test_a_config_leaves_the_callers_dict_alone(self):
        given = {"rope_theta": 5000.0}
        HySparseConfig(**small(rope_parameters=given))
        assert given == {"rope_theta": 5000.0}

    def test_unknown_future_keys_are_kept(self, tmp_path):
        HySparseConfig(**small()).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "oracle_colour": "green", "later": {"a": [1]}}))
        loaded = HySparseConfig.from_pretrained(tmp_path)
        loaded.save_pretrained(tmp_path / "again")
        written = json.loads((tmp_path / "again" / "config.json").read_text())
        assert written["oracle_colour"] == "green"
        assert written["later"] == {"a": [1]}

    def test_layer_types_of_a_file_do_not_override_the_plan(self):
        config = HySparseConfig(**small(layer_types=["full_attention"] * 4))
        assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

    @pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
    def test_older_spelling_of_rotary_settings(self, name):
        settings = {"type": "linear", "factor": 2.0}
        config = HySparseConfig(**small(**{name: settings}, rope_theta=777.0))
        assert config.rope_for("sparse") == {"rope_type": "linear", "factor": 2.0, "rope_theta": 777.0}


def dense_like(source, **fields):
    """A `dense=True` model holding the weights of a library model, in eval mode."""
    config = HySparseConfig(
        **small(
            rms_norm_eps=source.config.rms_norm_eps,
            rope_parameters=source.config.rope_parameters,
            layer_plan=["full", "sparse", "window", "full"],
            dense=True,
            **fields,
        )
    )
    model = HySparseForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert unexpected == []
    assert all(".gate_" in name or ".sink_" in name for name in missing)
    return model


def library_model(config_class, model_class, **fields):
    torch.manual_seed(0)
    known = small(initializer_range=0.1)
    for name in ("sliding_window", "oracle_block_size", "oracle_budget"):
        known.pop(name)
    model = model_class(config_class(**known, **fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def ids(length=41, batch=2):
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(5))


def assert_equals_library(model, source, input_ids):
    with torch.no_grad():
        assert_same_logits(model(input_ids, use_cache=False).logits, source(input_ids, use_cache=False).logits)


class TestDenseEqualsTheLibrary:
    @pytest.mark.parametrize("rope", ROPES)
    @pytest.mark.parametrize("length", [9, 41, 70], ids=lambda length: f"{length}-tokens")
    def test_llama_in_every_rope_type(self, rope, length):
        source = library_model(transformers.LlamaConfig, transformers.LlamaForCausalLM, rope_parameters=ROPES[rope])
        assert_equals_library(dense_like(source), source, ids(length))

    def test_a_long_call_leaves_no_trace_in_the_next(self):
        source = library_model(
            transformers.LlamaConfig, transformers.LlamaForCausalLM, rope_parameters=ROPES["dynamic"]
        )
        model = dense_like(source)
        before = model(ids(20), use_cache=False).logits
        model(ids(100), use_cache=False)
        assert torch.equal(model(ids(20), use_cache=False).logits, before)

    @pytest.mark.parametrize("rope", ROPES)
    @pytest.mark.parametrize("padding", ["left", "right"])
    def test_a_row_beside_a_longer_one_gives_what_it_gives_alone(self, rope, padding):
        # The longer row passes the lengths at which frequencies change; the shorter one does not.
        model = HySparseForCausalLM(HySparseConfig(**small(rope_parameters=ROPES[rope]))).eval().double()
        mask = padded_mask(padding, [20, 90], 90)
        rows = [ids(length, 1)[0] for length in (20, 90)]
        with torch.no_grad():
            together = model(spread(rows, mask), attention_mask=mask, use_cache=False).logits
            for row, tokens in enumerate(rows):
                alone = model(tokens[None], use_cache=False).logits[0]
                assert_same_logits(together[row][mask[row].bool()], alone)

    def test_llama_with_explicit_head_dim_C02(self):
        source = library_model(transformers.LlamaConfig, transformers.LlamaForCausalLM, head_dim=40)
        model = dense_like(source, head_dim=40)
        assert model.model.layers[0].self_attn.q_proj.weight.shape == (160, 64)
        assert model.model.layers[1].self_attn.k_proj.weight.shape == (80, 64)
        assert_equals_library(model, source, ids())

    def test_llama_with_biases_everywhere(self):
        source = library_model(
            transformers.LlamaConfig, transformers.LlamaForCausalLM, attention_bias=True, mlp_bias=True
        )
        assert_equals_library(dense_like(source, attention_bias=True, mlp_bias=True), source, ids())

    def test_qwen2_with_biases_on_query_key_and_value(self):
        source = library_model(transformers.Qwen2Config, transformers.Qwen2ForCausalLM)
        model = dense_like(source, attention_bias=True, attention_output_bias=False)
        assert_equals_library(model, source, ids())

    def test_qwen3_with_query_and_key_norms(self):
        source = library_model(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, head_dim=16)
        assert_equals_library(dense_like(source, use_qk_norm=True), source, ids())

    @pytest.mark.parametrize("other", [None, "default", "llama3"], ids=str)
    def test_each_kind_of_layer_has_its_own_settings(self, other):
        plain = {"rope_type": "default", "rope_theta": 100.0}
        source = library_model(transformers.LlamaConfig, transformers.LlamaForCausalLM, rope_parameters=plain)
        model = dense_like(source)
        ropes = {"full": plain, "sparse": ROPES.get(other), "window": ROPES["linear"]}
        config = HySparseConfig(**{**small(), **model.config.to_dict(), "rope_parameters": ropes})
        mixed = HySparseForCausalLM(config).eval()
        mixed.load_state_dict(model.state_dict())

        def rotations(settings):
            if settings is None:
                return torch.ones(1, 41, 16), torch.zeros(1, 41, 16)
            own = transformers.LlamaConfig(**{**source.config.to_dict(), "rope_parameters": settings})
            embedding = type(source.model.rotary_emb)(own)
            return embedding(torch.zeros(1), torch.arange(41)[None])

        for layer, kind in zip(source.model.layers, config.layer_plan, strict=True):
            turns = rotations(ropes[kind])
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, turns=turns: (args, {**kwargs, "position_embeddings": turns}),
                with_kwargs=True,
            )
        assert_equals_library(mixed, source, ids())


class TestKindsOfRotation:
    """Without `dense`: the global branch turns its query by the full layer's setting, the local one by its own."""

    @pytest.mark.parametrize(
        "ropes",
        [
            pytest.param(None, id="one-for-all"),
            pytest.param({"full": {"rope_theta": 100.0}, "sparse": {"rope_theta": 5000.0}}, id="two-thetas"),
            pytest.param({"full": {"rope_theta": 100.0}, "sparse": None, "window": None}, id="none-but-full"),
            pytest.param({"full": None, "sparse": {"rope_theta": 100.0}}, id="full-none"),
            pytest.param({"full": None}, id="none-at-all"),
            pytest.param(
                {"full": {"rope_theta": 100.0}, "window": {"rope_theta": 50.0, "partial_rotary_factor": 0.5}},
                id="window-partial",
            ),
        ],
    )
    def test_logits_equal_the_loops(self, ropes):
        torch.manual_seed(0)
        plan = ["window", "full", "sparse", "sparse", "full", "sparse"]
        config = HySparseConfig(**small(num_hidden_layers=6, layer_plan=plan, rope_parameters=ropes))
        model = HySparseForCausalLM(config).eval().double()
        row = ids(40, batch=1)
        expected = naive_model.forward(model, row).logits
        torch.testing.assert_close(model(row, use_cache=False).logits, expected, rtol=0, atol=1e-9)

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(24, 24), (16, 40), (24, 8)])
    def test_value_heads_of_another_width(self, head_dim, v_head_dim):
        torch.manual_seed(0)
        config = HySparseConfig(**small(head_dim=head_dim, v_head_dim=v_head_dim))
        model = HySparseForCausalLM(config).eval().double()
        row = ids(40, batch=1)
        expected = naive_model.forward(model, row).logits
        torch.testing.assert_close(model(row, use_cache=False).logits, expected, rtol=0, atol=1e-9)
