"""What no export could hold, and what no layer could see, is refused; a guard has to know every setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftline.audit import guards
from draftline.audit.served import wrong_command
from draftline.config import DFlashConfig, flatten
from draftline.errors import ConfigError
from draftline.formats.programs import Serving, serving_command
from tests.zoo.pipeline import Recipe, World


def assembled(folder: Path, **drafter: Any) -> DFlashConfig:
    return World.of(Recipe(settings={"drafter": drafter}), pytest.MonkeyPatch(), folder).assemble().shape


@pytest.mark.parametrize(
    ("drafter", "word"),
    [
        (
            {"sample_from_anchor": True, "num_sliding_layers": 1, "sliding_window": 12},
            "without drafter.sample_from_anchor",
        ),
        ({"draft_vocab_size": 64, "num_sliding_layers": 1, "sliding_window": 12}, "without drafter.draft_vocab_size"),
        ({"num_layers": 1, "num_sliding_layers": 1, "sliding_window": 2, "block_size": 2}, "no captured state"),
    ],
)
def test_a_drafter_that_cannot_be_exported_or_sees_nothing_is_refused_in_one_line(
    drafter: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=word) as refused:
        assembled(tmp_path, **drafter)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "drafter",
    [
        {"num_sliding_layers": 1, "sliding_window": 12},
        {"sample_from_anchor": True, "num_sliding_layers": 2, "sliding_window": 12},
        {"draft_vocab_size": 64},
        {"num_layers": 1, "num_sliding_layers": 1, "sliding_window": 3, "block_size": 2},
        {"num_layers": 2, "num_sliding_layers": 2, "sliding_window": 2, "block_size": 2},
    ],
)
def test_others_are_not(drafter: dict[str, Any], tmp_path: Path) -> None:
    assert assembled(tmp_path, **drafter).num_hidden_layers


def test_every_setting_that_decides_what_is_learned_is_changed_once(tmp_path: Path) -> None:
    config = World.of(Recipe(), pytest.MonkeyPatch(), tmp_path).assemble().config
    changed = dict(guards._changed_settings(config))
    ours = flatten(config.model_dump(mode="json"))
    for key, other in changed.items():
        theirs = flatten(other.model_dump(mode="json"))
        assert [name for name, value in ours.items() if theirs[name] != value] == [key]
    assert {"loss.labels", "optim.learning_rate", "train.seed", "drafter.block_size", "target.dtype"} <= changed.keys()
    assert not any(key.startswith(("pipeline.", "train.log_every")) for key in changed)


def test_a_command_with_another_number_of_tokens_is_named(tmp_path: Path) -> None:
    shape = assembled(tmp_path)
    command = serving_command("vllm", Serving("F", "T", "float32", shape))
    assert wrong_command("vllm", command, ("F", "T"), shape) is None
    longer = shape.model_copy(update={"block_size": shape.block_size + 1})
    assert wrong_command("vllm", command, ("F", "T"), longer) == "has num_speculative_tokens 7, trained are 8"
    assert wrong_command("vllm", command, ("G", "T"), shape) == "does not name G"
