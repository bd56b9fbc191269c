"""What a folder does not say is asked for, and a drafter must fit its target."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.errors import CheckpointError, TargetError
from draftline.formats.load import Given, load_drafter
from tests.formats.checkpoints import CONTRACTS, Tree, tensors_of, write
from tests.formats.drafters import (
    SMALL,
    make_drafter,
    make_target,
)


def test_a_class_name_alone_does_not_tell_the_slot_layout(tmp_path: Path) -> None:
    tree = CONTRACTS["zlab"]() | {"mask_token_id": 39, "target_layer_ids": [1, 3, 4]}
    del tree["dflash_config"]
    folder = write(tmp_path / "foreign", tree, tensors_of("zlab", make_drafter()))
    with pytest.raises(CheckpointError, match="--sample-from-anchor or --no-sample-from-anchor"):
        load_drafter(folder)
    for layout in (True, False):
        assert load_drafter(folder, Given(sample_from_anchor=layout)).config.sample_from_anchor is layout


def test_what_is_given_must_not_contradict_the_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "foreign", CONTRACTS["zlab"](), tensors_of("zlab", make_drafter()))
    assert load_drafter(folder, Given(block_size=4)).config == SMALL
    with pytest.raises(CheckpointError, match="block_size is 4 there and 8 was given"):
        load_drafter(folder, Given(block_size=8))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"hidden_size": 32}, "hidden size 24"),
        ({"vocab_size": 64}, "vocabulary rows 40"),
        ({"num_hidden_layers": 8}, "layers 7"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, target: Tree, words: str) -> None:
    folder = write(tmp_path / "foreign", CONTRACTS["zlab"](), tensors_of("zlab", make_drafter()))
    assert load_drafter(folder, target=make_target()).config == SMALL
    with pytest.raises(TargetError, match=words):
        load_drafter(folder, target=make_target(**target))


def test_the_depth_that_speculators_does_not_store_comes_from_the_target(tmp_path: Path) -> None:
    folder = write(tmp_path / "foreign", CONTRACTS["speculators"](), tensors_of("speculators", make_drafter()))
    with pytest.raises(CheckpointError, match="--target or --num-target-layers"):
        load_drafter(folder)
    assert load_drafter(folder, target=make_target()).config == SMALL


@pytest.mark.parametrize("form", ["torchspec", "deepspec"])
def test_a_stored_embedding_must_be_the_targets_own(tmp_path: Path, form: str) -> None:
    target = make_target(tie_word_embeddings=True)
    table = target.embedding.get_parameter("weight").detach().clone()
    right = write(tmp_path / "right", CONTRACTS[form](), tensors_of(form, make_drafter(), table))
    assert "is the target's own" in load_drafter(right, target=target).notes[0]
    table[39] += 1
    trained = write(tmp_path / "trained", CONTRACTS[form](), tensors_of(form, make_drafter(), table))
    with pytest.raises(CheckpointError, match="it was trained, or belongs to another target"):
        load_drafter(trained, target=target)
