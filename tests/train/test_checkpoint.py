"""Checkpoints: exact, atomic, checked, and pruned."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch

from draftline.config import OptimConfig, RunConfig
from draftline.draft.loss import StepMetrics
from draftline.errors import CheckpointError, StorageError
from draftline.train import checkpoint as checkpoint_module
from draftline.train.checkpoint import (
    Checkpoint,
    CheckpointStore,
    TrainState,
    load_draft_model,
    random_states,
    read_checkpoint,
    restore_random_states,
    write_checkpoint,
)
from draftline.train.optim import build_optimizer, optimizer_tensors
from tests.train.tiny_drafter import tiny_config, tiny_drafter, update


def make_checkpoint(step: int = 3, best_step: int | None = None) -> Checkpoint:
    model = tiny_drafter()
    optimizer = build_optimizer(model, OptimConfig())
    update(model, optimizer, seed=step)
    window = StepMetrics.of_blocks(
        correct_target_AP=torch.tensor([[False, True, True, False]]),
        correct_data_AP=torch.tensor([[False, True, False, False]]),
        supervised_AP=torch.tensor([[False, True, True, True]]),
        loss_sum=0.1 + 0.2,
        weight_sum=1 / 3,
        tokens=11,
    )
    state = TrainState(window, step=step, next_row=2 * step, tokens=100, seconds=1.5, best_step=best_step)
    return Checkpoint(
        weights=model.state_dict(),
        moments=optimizer_tensors(optimizer, model),
        random=random_states(),
        state=state,
        run_config=RunConfig(),
        drafter_config=tiny_config(),
        data_fingerprint="abc",
    )


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left
    )


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    written = make_checkpoint(best_step=2)
    write_checkpoint(tmp_path / "c", written)
    read = read_checkpoint(tmp_path / "c")
    assert same_tensors(read.weights, written.weights)
    assert same_tensors(read.moments, written.moments)
    assert same_tensors(read.random, written.random)
    assert read.state.to_json() == written.state.to_json()
    assert read.state.window.loss_sum == 0.1 + 0.2
    assert (read.run_config, read.drafter_config, read.data_fingerprint) == (RunConfig(), tiny_config(), "abc")


def test_generators_continue_where_they_were() -> None:
    states = random_states()
    drawn = torch.rand(5)
    restore_random_states(states)
    assert torch.equal(torch.rand(5), drawn)


def test_the_drafter_of_a_checkpoint_or_of_a_run_can_be_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    written = make_checkpoint(step=1, best_step=1)
    store.save(written)
    store.save(make_checkpoint(step=2, best_step=1))
    for folder in (tmp_path, tmp_path / "checkpoints" / "step-000001", tmp_path / "best"):
        assert same_tensors(load_draft_model(folder).state_dict(), written.weights)


def test_the_newest_k_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in range(1, 7):
        store.save(make_checkpoint(step, best_step=2 if step >= 2 else None))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000005",
        "step-000006",
    ]
    assert (tmp_path / "last").resolve().name == "step-000006"
    assert (tmp_path / "best").resolve().name == "step-000002"
    assert not (tmp_path / "last").readlink().is_absolute(), "a run folder can be moved"


def test_what_a_crash_left_unfinished_is_neither_used_nor_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    folder = store.save(make_checkpoint(1))
    shutil.copytree(folder, folder.with_name(".unfinished-step-000002"))
    shutil.copytree(folder, folder.with_name(".unfinished-removed-step-000000"))
    again = CheckpointStore(tmp_path, keep_last=2)
    assert again.newest() == folder
    again.save(make_checkpoint(3))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("fails_at", range(4))
def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    first = store.save(make_checkpoint(1))
    original, calls = checkpoint_module.save_file, 0

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        nonlocal calls
        if calls == fails_at:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        calls += 1
        original(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", save_file)
    if fails_at == 3:  # the disk fills up when the fourth file is written
        monkeypatch.setattr(checkpoint_module.json, "dumps", lambda *_a, **_k: save_file({}, tmp_path / "x"))
    with pytest.raises(StorageError, match=r"step-000002 cannot be written \(No space left on device\)") as caught:
        store.save(make_checkpoint(2))
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert store.newest() == first
    assert read_checkpoint(first).state.step == 1
    assert [path.name for path in first.parent.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damage_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "c"
    write_checkpoint(folder, make_checkpoint())
    content = bytearray((folder / name).read_bytes())
    if damage == "missing":
        (folder / name).unlink()
    elif damage == "cut":
        (folder / name).write_bytes(content[: len(content) // 2])
    else:
        content[0] ^= 0xFF
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_checkpoint(folder, make_checkpoint())
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format_version": 99}))
    with pytest.raises(CheckpointError, match="has format 99"):
        read_checkpoint(folder)


def test_a_renamed_tensor_is_refused(tmp_path: Path) -> None:
    written = make_checkpoint()
    weights = {("fc.w" if name == "fc.weight" else name): tensor for name, tensor in written.weights.items()}
    folder = tmp_path / "c"
    write_checkpoint(folder, Checkpoint(**{**vars(written), "weights": weights}))
    with pytest.raises(CheckpointError, match=r"tensor fc\.w"):
        load_draft_model(folder)


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_draft_model(tmp_path)


def test_a_drafter_of_another_version_is_explained(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", make_checkpoint())
    content = json.loads((tmp_path / "c" / "state.json").read_text())
    content["drafter_config"]["new_setting"] = 1
    (tmp_path / "c" / "state.json").write_text(json.dumps(content))
    for read in (load_draft_model, read_checkpoint):
        with pytest.raises(CheckpointError, match="another version of Draftline"):
            read(tmp_path / "c")
