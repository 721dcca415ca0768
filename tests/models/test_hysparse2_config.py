"""HySparse2Config: plans of both halves, the bridge, derived values, and errors that say what to do."""

import json

import pytest
import torch
import transformers
from models.tiny2 import BASELINES, SWITCHES, tiny_baseline, tiny_config, tiny_model

from hysparse_hf import HySparse2Config, HySparse2ForCausalLM, predict_cache_bytes
from hysparse_hf.modeling.configuration_hysparse2 import BASELINES as NAMES


class TestPlan:
    @pytest.mark.parametrize(
        ("layers", "ratio", "plan"),
        [
            pytest.param(1, 5, ["full"], id="one"),
            pytest.param(2, 5, ["full", "full"], id="two"),
            pytest.param(5, 1, ["window", "full", "window", "full", "sparse"], id="five"),
            pytest.param(8, 1, ["window", "window", "full", "window", "full", "sparse", "full", "sparse"], id="eight"),
        ],
    )
    def test_halves_are_made_from_the_number_of_layers(self, layers, ratio, plan):
        config = HySparse2Config(num_hidden_layers=layers, sparse_layers_per_full=ratio)
        assert config.layer_plan == config.self_layer_plan + config.cross_layer_plan == plan

    def test_defaults_are_the_papers_plan(self):
        config = HySparse2Config()
        assert [i for i, kind in enumerate(config.layer_plan) if kind == "full"] == [12, 25, 31, 37, 43]
        assert (len(config.self_layer_plan), len(config.cross_layer_plan)) == (25, 24)
        assert set(config.self_layer_plan) == {"window", "full"}
        assert config.bridge_map == [12] * 4

    def test_defaults_are_those_of_the_specification(self):
        config = HySparse2Config()
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (64, 1, 256)
        assert (config.oracle_budget, config.sliding_window, config.oracle_head_reduction) == (1024, 128, "max")
        assert (config.selection, config.recent_window, config.bridge_source) == ("token", "forced", "normed")
        assert (config.bridge, config.bridge_materialization) == (True, "eager")
        assert (config.gate_granularity, config.window_layer_gate, config.full_layer_gate) == (
            "elementwise",
            True,
            False,
        )
        assert config.rope_for("full") is None
        assert config.rope_for("sparse") is None
        assert config.rope_for("window")["rope_theta"] == 10000
        assert config.rope_for("window")["partial_rotary_factor"] * config.head_dim == 64

    @pytest.mark.parametrize("head_dim", [2, 24, 63, 64, 80, 96, 98, 128, 192, 256])
    def test_default_rotation_turns_64_channels_where_there_are_as_many(self, head_dim):
        config = HySparse2Config(num_hidden_layers=2, head_dim=head_dim)
        width = int(head_dim * config.rope_for("window")["partial_rotary_factor"])
        assert width == min(64, head_dim - head_dim % 2)

    def test_one_plan_leaves_the_rest_to_the_other(self):
        config = HySparse2Config(num_hidden_layers=5, self_layer_plan=["full", "window"], sparse_layers_per_full=1)
        assert config.cross_layer_plan == ["full", "sparse", "full"]
        config = HySparse2Config(num_hidden_layers=5, cross_layer_plan=["full", "sparse"])
        assert config.self_layer_plan == ["window", "full", "window"]

    @pytest.mark.parametrize(
        ("fields", "plan"),
        [
            pytest.param({}, [None, None, None, 1, None, None], id="default"),
            pytest.param({"share_full_kv": False}, [None, None, None, 1, 1, 1], id="own-kv"),
            pytest.param({"bridge": False}, [None] * 6, id="off"),
            pytest.param({"dense": True}, [None] * 6, id="dense"),
            pytest.param({"bridge_map": "self_output"}, [None, None, None, "self_output", None, None], id="output"),
            pytest.param({"bridge_map": [1]}, [None, None, None, 1, None, None], id="explicit"),
        ],
    )
    def test_bridge_plan_says_where_keys_come_from_B12(self, fields, plan):
        assert tiny_config(**fields).bridge_plan == plan

    def test_each_full_layer_may_have_a_source_of_its_own_B12(self):
        config = tiny_config(**SWITCHES["two_bridges"])
        assert config.bridge_plan == [None, None, None, 2, None, 0, None]
        assert config.donor_plan == [None, None, None, None, 3, None, 5]

    def test_without_a_full_self_layer_the_output_is_the_source(self):
        config = tiny_config(self_layer_plan=["window"] * 3)
        assert config.bridge_map == ["self_output"]

    @pytest.mark.parametrize(
        ("fields", "kept"),
        [
            pytest.param({}, ["none"] * 2, id="default"),
            pytest.param({"share_full_kv": False}, ["full"] * 2, id="own-kv"),
            pytest.param({"recent_window": "branch"}, ["window"] * 2, id="branch"),
            pytest.param({"recent_window": "branch", "window_branch": "shared_kv"}, ["none"] * 2, id="shared-window"),
            pytest.param({"selection": "all"}, ["none"] * 2, id="all"),
            pytest.param({"bridge": False}, ["none"] * 2, id="no-bridge"),
            pytest.param({"dense": True}, ["full"] * 2, id="dense"),
        ],
    )
    def test_what_sparse_layers_cache(self, fields, kept):
        own = ["full"] * 3 if "dense" in fields else ["window", "full", "window"]
        assert tiny_config(**fields).cache_plan == [*own, "full", *kept]

    @pytest.mark.parametrize(
        ("fields", "leaves"),
        [
            ({}, True),
            ({"share_full_kv": False}, True),
            ({"selection": "block", "oracle_budget": 8}, True),
            ({"bridge": False}, False),
            ({"recent_window": "branch"}, False),
            ({"dense": True}, False),
            ({"cross_layer_plan": []}, False),
        ],
        ids=str,
    )
    def test_who_leaves_early(self, fields, leaves):
        assert tiny_config(**fields).leaves_early is leaves


@pytest.mark.parametrize("settings", [{}, {"share_full_kv": False}], ids=["shared", "own-kv"])
def test_head_dim_of_its_own_shapes_every_projection_C02(tmp_path, settings):
    tiny_config(head_dim=40, v_head_dim=24, **settings).save_pretrained(tmp_path)
    config = HySparse2Config.from_pretrained(tmp_path)
    assert (config.head_dim, config.v_head_dim) == (40, 24)
    widths = {
        "q_proj": 4 * 40,
        "k_proj": 2 * 40,
        "v_proj": 2 * 24,
        "gate_local_proj": 4 * 24,
        "gate_global_proj": 4 * 24,
    }
    for layer in HySparse2ForCausalLM(config).model.layers:
        for name, module in layer.self_attn.named_children():
            if name.endswith("_proj"):
                assert module.weight.shape == ((64, 4 * 24) if name == "o_proj" else (widths[name], 64)), name


class TestPaper:
    def test_keys_and_values_of_a_million_tokens_in_fp8_are_2_69_gigabytes(self):
        config = HySparse2Config.paper_80b_a3b()
        used = predict_cache_bytes(config, 1, 1_048_576, torch.float8_e4m3fn, slack=0)["used"]
        assert used == 5 * 1 * 512 * 1_048_576 + 24 * 128 * 512
        assert round(used / 1e9, 3) == 2.686

    def test_parameters_are_80_billion(self):
        with torch.device("meta"):
            model = HySparse2ForCausalLM(HySparse2Config.paper_80b_a3b())
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        assert round(sum(sizes.values()) / 1e9, 1) == 80.3
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        embeddings = sizes["model.embed_tokens.weight"] + sizes["lm_head.weight"]
        assert round((sum(sizes.values()) - experts * 504 // 512 - embeddings) / 1e9, 2) == 6.05

    def test_has_no_model_of_7_billion(self):
        with pytest.raises(NotImplementedError, match=r"use `HySparseConfig.paper_7b\(\)`"):
            HySparse2Config.paper_7b()

    def test_fields_may_be_changed(self):
        assert HySparse2Config.paper_80b_a3b(sliding_window=64).sliding_window == 64


class TestBaselines:
    def test_names(self):
        assert BASELINES == NAMES
        with pytest.raises(ValueError, match="`name` must be one of"):
            HySparse2Config.baseline("sparse", 6)

    def test_dense_is_full_layers_alone(self):
        config = tiny_baseline("dense")
        assert (config.layer_plan, config.bridge_map, config.leaves_early) == (["full"] * 6, [], False)

    def test_hybrid_swa_has_the_papers_nine_full_layers_of_49(self):
        config = HySparse2Config.baseline("hybrid_swa", 49)
        assert [i for i, kind in enumerate(config.layer_plan) if kind == "full"] == [0, 6, 12, 18, 24, 30, 36, 42, 48]
        assert config.layer_plan.count("window") == 40
        assert config.attention_sink
        assert not config.window_layer_gate

    def test_yoco_reads_one_pair_of_keys_and_values_in_the_upper_half(self):
        config = tiny_baseline("yoco")
        assert config.self_layer_plan == ["window"] * 3
        assert config.cross_layer_plan == ["full", "sparse", "sparse"]
        assert config.bridge_plan == [None, None, None, "self_output", None, None]
        assert config.cache_plan == ["window"] * 3 + ["full", "none", "none"]
        names = {name for name, _ in tiny_model(baseline="yoco").named_parameters()}
        assert not any("gate_global" in name or "gate_local" in name or "sink" in name for name in names)
        assert "model.bridge_norm.weight" in names

    @pytest.mark.parametrize("name", BASELINES)
    def test_every_layer_turns_alike(self, name):
        config = tiny_baseline(name)
        assert {str(config.rope_for(kind)) for kind in ("full", "sparse", "window")} == {
            "{'rope_theta': 10000.0, 'rope_type': 'default'}"
        }


ERRORS = {
    "self kinds": ({"self_layer_plan": ["sparse"]}, "`self_layer_plan` entries must be among"),
    "cross kinds": ({"cross_layer_plan": ["full", "window"]}, "`cross_layer_plan` entries must be among"),
    "empty self": ({"self_layer_plan": []}, "`self_layer_plan` must have at least one layer"),
    "cross begins sparse": ({"cross_layer_plan": ["sparse", "full"]}, "`cross_layer_plan` must begin with a full"),
    "contradicting plan": ({"layer_plan": ["full"] * 6}, "`layer_plan` must be `self_layer_plan` and"),
    "negative ratio": (
        {"cross_layer_plan": None, "num_hidden_layers": 6, "sparse_layers_per_full": -1},
        "`sparse_layers_per_full` must be at least 0, got -1",
    ),
    "head dim": ({"head_dim": 0}, "`head_dim` and `v_head_dim` must be at least 1"),
    "length": ({"num_hidden_layers": 7}, r"`num_hidden_layers` \(7\) entries together, got 6"),
    "bridge from a window layer": ({"bridge_map": [0]}, r"`bridge_map` entries must be full layers .*got \[0\]"),
    "bridge from the cross-decoder": ({"bridge_map": 3}, r"`bridge_map` entries must be full layers"),
    "bridge count": ({"bridge_map": [1, 1]}, r"one entry per full layer of the cross-decoder \(1\), got 2"),
    "bridge source": ({"bridge_source": "raw"}, "`bridge_source` must be one of"),
    "activation": ({"hidden_act": "sliu"}, "`hidden_act` must be one of"),
    "materialization": ({"bridge_materialization": "never"}, "`bridge_materialization` must be one of"),
    "selection": ({"selection": "page"}, "`selection` must be one of"),
    "recent window": ({"recent_window": "none"}, "`recent_window` must be one of"),
    "window branch": ({"window_branch": "none"}, "set `recent_window='branch'`"),
    "all and a branch": ({"selection": "all", "recent_window": "branch"}, "`selection='all'` leaves nothing"),
    "all and an oracle": ({"selection": "all", "share_oracle": False}, "`selection='all'` leaves nothing"),
    "budget": ({"oracle_budget": 0}, "`oracle_budget` must be at least 1 token"),
    "block budget": ({"selection": "block", "oracle_budget": 6}, "use 4 or 8"),
    "window": ({"sliding_window": 0}, "`sliding_window` must be at least 1"),
    "own keys": (
        {"recent_window": "branch", "window_branch": "shared_kv", "share_full_kv": False},
        "which `share_full_kv=False` removes",
    ),
}


class TestErrors:
    @pytest.mark.parametrize(("fields", "words"), ERRORS.values(), ids=ERRORS.keys())
    def test_say_what_is_wrong(self, fields, words):
        with pytest.raises(ValueError, match=words):
            tiny_config(**fields)

    def test_a_field_set_later_is_checked_when_the_model_is_built(self):
        config = tiny_config()
        config.bridge_map = [0]
        with pytest.raises(ValueError, match="`bridge_map` entries"):
            HySparse2ForCausalLM(config)

    def test_any_budget_serves_single_tokens(self):
        assert tiny_config(oracle_budget=7).oracle_budget == 7


class TestJson:
    @pytest.mark.parametrize("switches", SWITCHES)
    def test_round_trip(self, tmp_path, switches):
        config = tiny_config(**SWITCHES[switches])
        config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "hysparse2"
        loaded = transformers.AutoConfig.from_pretrained(tmp_path)
        assert type(loaded) is HySparse2Config
        assert loaded.to_dict() == {**config.to_dict(), "_name_or_path": str(tmp_path)}
        assert (loaded.bridge_plan, loaded.cache_plan) == (config.bridge_plan, config.cache_plan)
