"""What the first step starts from: settings that fit the drafter that is there, and the weights that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.config import DrafterConfig
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError
from draftline.formats.beginning import drafter_to_continue, set_first_weights, settings_of
from draftline.formats.write import export_zlab
from draftline.targets.drafter_shape import resolve_drafter_config
from tests.formats.drafters import ALL_SLIDING, MIX, SMALL, make_drafter, make_target, same_weights


@pytest.mark.parametrize("changes", [{}, MIX, ALL_SLIDING, {"sample_from_anchor": True}, {"draft_vocab_size": 12}])
def test_a_drafter_of_these_settings_has_the_shape_again(changes: dict[str, Any]) -> None:
    shape = SMALL.model_copy(update=changes)
    target = make_target()
    found = resolve_drafter_config(target, settings_of(shape), None)
    of_target = ("rms_norm_eps", "rope_parameters", "bos_token_id", "eos_token_id", "initializer_range")
    assert found == shape.model_copy(update={name: getattr(found, name) for name in of_target})


def test_without_a_folder_nothing_is_continued_and_drawn_weights_stay() -> None:
    model = make_drafter()
    assert drafter_to_continue(DrafterConfig(), make_target()) is None
    set_first_weights(model, DrafterConfig(start_from="random"), make_target(), None)
    assert same_weights(model, make_drafter().state_dict())


def test_the_targets_own_layers_are_copied_where_that_is_asked() -> None:
    model, target = DFlashDraftModel(SMALL), make_target()
    set_first_weights(model, DrafterConfig(start_from="target_layers"), target, None)
    assert torch.equal(model.norm.weight, target.final_norm.get_parameter("weight"))
    weights = [layer.get_parameter("mlp.down_proj.weight") for layer in target.decoder_layers]
    copied = [layer.get_parameter("mlp.down_proj.weight") for layer in model.layers]
    assert all(any(torch.equal(own, theirs) for theirs in weights) for own in copied)


def test_a_drafter_is_continued_with_its_weights_and_the_targets_scales(tmp_path: Path) -> None:
    trained = make_drafter(input_embedding_scale=4.0)
    export_zlab(trained, tmp_path / "drafter", "float32")
    settings = settings_of(trained.config).model_copy(update={"init_from": tmp_path / "drafter"})
    continued = drafter_to_continue(settings, make_target())
    assert continued is not None
    assert continued.config == trained.config.model_copy(update={"input_embedding_scale": 1.0})
    model = DFlashDraftModel(SMALL)
    set_first_weights(model, settings, make_target(), continued)
    assert same_weights(model, trained.state_dict())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 8}, "drafter.block_size=4"),
        ({"num_layers": 5}, "drafter.num_layers=2"),
        ({"target_layer_ids": (1, 2, 4)}, r"drafter.target_layer_ids=\[1,3,4\]"),
        ({"num_sliding_layers": 1, "sliding_window": 6}, "drafter.sliding_window=null"),
    ],
)
def test_settings_of_another_shape_are_refused_with_the_words_that_agree(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    export_zlab(make_drafter(), tmp_path / "drafter", "float32")
    settings = settings_of(SMALL).model_copy(update={"init_from": tmp_path / "drafter", **changes})
    with pytest.raises(ConfigError, match=words) as caught:
        drafter_to_continue(settings, make_target())
    assert "\n" not in str(caught.value)
