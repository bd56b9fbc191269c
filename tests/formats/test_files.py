"""A folder is read whole or refused, and written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.errors import CheckpointError, ExportError, StorageError
from draftline.formats.load import load_drafter
from draftline.formats.write import export_zlab
from tests.formats.checkpoints import CONTRACTS, tensors_of, write
from tests.formats.drafters import (
    make_drafter,
    same_weights,
)


def sharded(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for part, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, folder / part, metadata={"format": "pt"})
    weight_map = {name: part for part, inside in parts.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_weights_in_several_files_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    model = make_drafter()
    folder = sharded(write(tmp_path / "foreign", CONTRACTS["zlab"](), tensors_of("zlab", model)))
    assert same_weights(load_drafter(folder).draft_model, model.state_dict())
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"misses model-2\.safetensors"):
        load_drafter(folder)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
def test_weights_in_a_number_format_that_is_not_a_drafters_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tree = CONTRACTS["zlab"]()
    del tree["dtype"]
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of("zlab", make_drafter()).items()}
    with pytest.raises(CheckpointError, match=str(dtype).removeprefix("torch.")):
        load_drafter(write(tmp_path / "foreign", tree, tensors))


def test_folders_that_hold_no_drafter_are_refused_in_one_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", CONTRACTS["zlab"](), tensors_of("zlab", make_drafter()))
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights only").mkdir()
    (tmp_path / "weights only" / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    (tmp_path / "config only").mkdir()
    (tmp_path / "config only" / "config.json").write_bytes((whole / "config.json").read_bytes())
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_bytes((whole / "config.json").read_bytes())
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_bytes((whole / "config.json").read_bytes()[:40])
    for name, words in {
        "nothing": "is not a folder",
        "empty": "not a drafter, or only half of one",
        "weights only": "not a drafter, or only half of one",
        "config only": r"has no model\.safetensors: copy the whole folder",
        "pickled": r"pytorch_model\.bin is not read",
        "cut": "not valid JSON",
    }.items():
        with pytest.raises(CheckpointError, match=words) as caught:
            load_drafter(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_configuration_exchanged_after_the_export_is_noticed(tmp_path: Path) -> None:
    export_zlab(make_drafter(), tmp_path / "drafter", "float32")
    path = tmp_path / "drafter" / "config.json"
    path.write_text(path.read_text().replace('"mask_token_id": 39', '"mask_token_id": 38'))
    with pytest.raises(CheckpointError, match="mask_token_id reads as 38, but the weights were written for 39"):
        load_drafter(tmp_path / "drafter")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = make_drafter()
    model.fc.weight.data[0, 0] = float("nan")
    with pytest.raises(ExportError, match=r"fc\.weight"):
        export_zlab(model, tmp_path / "drafter", "bfloat16")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_content_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="drafter"):
        export_zlab(make_drafter(), tmp_path / "drafter", "bfloat16")
    assert [path.name for path in tmp_path.rglob("*")] == ["drafter", "notes.txt"]


def test_missing_and_broken_files_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(tmp_path / "nothing")
    export_zlab(make_drafter(), tmp_path / "drafter", "float32")
    weights = tmp_path / "drafter" / "model.safetensors"
    save_file({**load_file(weights), "embed_tokens.weight": torch.zeros(40, 24)}, weights)
    with pytest.raises(CheckpointError, match=r"unknown 1 tensors, first embed_tokens\.weight"):
        load_drafter(tmp_path / "drafter")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_drafter(tmp_path / "drafter")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load_drafter(tmp_path / "drafter")
