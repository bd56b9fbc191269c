"""Settings: unknown keys, ranges, overrides, and the way through YAML and JSON and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from draftline.config import (
    DFlashConfig,
    LossConfig,
    RunConfig,
    decay_gamma,
    find_recipe,
    load_run_config,
    parse_run_config,
    read_api_key,
)
from draftline.errors import ConfigError
from tests.draft.layouts import drafter_config


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("loss.decay_gama=4", "did you mean loss.decay_gamma?"),
        ("train.learning_rate=1e-3", "did you mean optim.learning_rate?"),
        ("trian.max_steps=4", "did you mean train?"),
        ("drafter.layers=3", "did you mean drafter.num_layers?"),
        ("data.zzzz=3", "known here are path, heldout_path, heldout_fraction, max_length"),
    ],
)
def test_unknown_key_names_the_nearest(word: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(overrides=[word])
    assert suggestion in str(caught.value)
    assert "is not a setting of Draftline" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("optim.learning_rate=0", "optim.learning_rate = 0"),
        ("optim.beta2=1.0", "optim.beta2 = 1.0"),
        ("drafter.block_size=1", "drafter.block_size = 1"),
        ("loss.labels=soft", "loss.labels = 'soft'"),
        ("train.max_steps=many", "train.max_steps = 'many'"),
        ("train.seed=-1", "train.seed = -1"),
        ("train.attention=sdpa", "train.attention = 'sdpa'"),
        ("data.heldout_fraction=1", "data.heldout_fraction = 1"),
        ("pipeline.mode=ray", "pipeline.mode = 'ray'"),
    ],
)
def test_value_out_of_range_is_named_in_one_line(word: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(overrides=[word])
    assert str(caught.value).startswith(named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.max_steps", "write section.key=value"),
        ("train.max_steps.deep=3", "train.max_steps = .*deep"),
        ("train.seed=[1", r"'\[1' is not a YAML value: quote it"),
    ],
)
def test_malformed_word_says_the_fix(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_run_config(overrides=["train.max_steps=5", word])
    assert "\n" not in str(caught.value)


def test_words_win_over_the_file_and_later_words_over_earlier(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train:\n  max_steps: 7\n  seed: 3\ndrafter:\n  num_layers: 2\n")
    words = ["train.max_steps=8", "train.max_steps=9", "drafter.target_layer_ids=[1, 4]", "target.name=smollm2"]
    config = load_run_config(path, words)
    assert config.train.max_steps == 9
    assert config.train.seed == 3
    assert config.drafter.num_layers == 2
    assert config.drafter.target_layer_ids == (1, 4)
    assert config.target.name == "smollm2"
    assert load_run_config(path, ["train.max_steps=null"]).train.max_steps is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["loss.weights=dpace", "loss.decay_gamma=4"],
            "decay_gamma = 4 does nothing for dpace: set loss.weights=decay",
        ),
        (
            ["optim.muon_learning_rate=0.01"],
            "muon_learning_rate = 0.01 does nothing for adamw: set optim.name=muon too",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_run_config(overrides=words)


def test_the_published_recipe_is_the_defaults_of_every_setting_and_the_default_one_is_faster() -> None:
    assert find_recipe("published") == RunConfig()
    changed = {
        (section, key)
        for section, settings in find_recipe("default").model_dump().items()
        for key, value in settings.items()
        if value != getattr(getattr(RunConfig(), section), key)
    }
    assert changed == {("loss", "weights"), ("optim", "name"), ("optim", "learning_rate")}
    with pytest.raises(ConfigError, match="'paper' is not a recipe: use default, published, quickstart, small-model"):
        find_recipe("paper")


def test_words_change_the_recipe_they_start_from() -> None:
    recipe = load_run_config(overrides=["train.max_steps=40", "drafter.block_size=16"])
    config = load_run_config(overrides=["train.max_steps=50"], recipe=recipe)
    assert (config.train.max_steps, config.drafter.block_size) == (50, 16)
    assert recipe.train.max_steps == 40


def test_nothing_given_is_the_default(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert load_run_config(empty) == load_run_config() == RunConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [unclosed", "is not valid YAML"),
        ("- 1\n- 2\n", "holds a list"),
        ("train: 3\n", "train = 3"),
    ],
)
def test_broken_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_run_config(path)
    assert "\n" not in str(caught.value)


def test_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read .*: give an existing YAML file"):
        load_run_config(tmp_path / "nowhere.yaml")


def test_resolved_configuration_survives_yaml_and_json() -> None:
    config = load_run_config(
        overrides=["drafter.target_layer_ids=[0, 2]", "data.path=prepared", "pipeline.target_devices=[cpu, cpu]"]
    )
    tree = config.model_dump(mode="json")
    assert parse_run_config(yaml.safe_load(yaml.safe_dump(tree))) == config
    assert parse_run_config(json.loads(json.dumps(tree))) == config
    assert set(tree) == set(RunConfig.model_fields)


def test_settings_do_not_change_after_they_are_read() -> None:
    with pytest.raises(ValidationError):
        RunConfig().train.seed = 4  # type: ignore[misc]


def test_every_setting_is_described() -> None:
    for section in RunConfig.model_fields.values():
        assert isinstance(section.annotation, type)
        fields = section.annotation.model_fields
        undescribed = {name for name, field in fields.items() if field.description is None}
        assert undescribed <= {"num_attention_heads", "num_key_value_heads", "head_dim"} | {
            "weight_decay",
            "beta1",
            "beta2",
            "learning_rate",
        }


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 2.0), (12, 6.0)])
def test_decay_is_the_published_one_for_the_block_size(block_size: int, gamma: float) -> None:
    assert decay_gamma(LossConfig(), block_size) == gamma
    assert decay_gamma(LossConfig(decay_gamma=3.0), block_size) == 3.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ("sliding_attention", "full_attention")}, "sliding_window is not set"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads cannot share 3 key-value heads"),
        ({"mask_token_id": 48}, "mask_token_id 48 is not a row of a table of 48"),
        ({"mask_token_id": -1}, "mask_token_id -1 is not a row"),
        ({"windows": 3}, "Extra inputs are not permitted"),
    ],
)
def test_shape_of_a_drafter_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        drafter_config(changes)


def test_drafted_tokens_follow_from_the_layout() -> None:
    assert drafter_config().num_speculative_tokens == 3
    assert drafter_config({"sample_from_anchor": True}).num_speculative_tokens == 4


def test_shape_survives_json() -> None:
    config = drafter_config({"final_logit_softcapping": 30.0})
    assert DFlashConfig.model_validate_json(config.model_dump_json()) == config


def test_a_servers_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("OTHER_KEY", "b")
    assert read_api_key(None) is None
    assert read_api_key("OTHER_KEY") == "b"
    monkeypatch.setenv("OPENAI_API_KEY", "a")
    assert read_api_key(None) == "a"
    monkeypatch.setenv("OTHER_KEY", "")
    with pytest.raises(ConfigError, match="the environment has no OTHER_KEY: set it"):
        read_api_key("OTHER_KEY")
