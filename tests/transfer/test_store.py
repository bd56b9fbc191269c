"""Captured states on disk: what is read is what was captured, however often the filling was interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from draftline.errors import CheckpointError
from draftline.records import CapturedSample, Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.transfer.store import SAMPLES_PER_FILL, StatesStore, fill_store, loop_identity
from tests.engine.tiny_target import TARGET_LAYER_IDS, FailingLoop, tiny_samples, tiny_target

SAMPLES = tiny_samples(2 * SAMPLES_PER_FILL + 3)


def target_loop(send: str = "target_ids") -> TargetForwardLoop:
    return TargetForwardLoop(tiny_target(), TARGET_LAYER_IDS, send, 4096)  # type: ignore[arg-type]


def open_store(folder: Path, loop: TargetForwardLoop, samples: Sequence[Sample] = SAMPLES) -> StatesStore:
    return StatesStore(folder, loop_identity(loop, "data"), np.array([len(sample) for sample in samples]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def beside(captured: CapturedSample) -> torch.Tensor:
    found = captured.target_ids_S if captured.target_ids_S is not None else captured.verifier_last_hidden_SD
    assert found is not None
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    fill_store(open_store(folder, target_loop()), target_loop(), SAMPLES)
    return folder


@pytest.mark.parametrize("send", ["target_ids", "last_hidden"])
def test_what_is_read_is_what_the_target_gives(tmp_path: Path, send: str) -> None:
    loop, samples = target_loop(send), SAMPLES[:5]
    store = open_store(tmp_path, loop, samples)
    fill_store(store, loop, samples)
    again = open_store(tmp_path, loop, samples)
    assert again.missing() == []
    for captured, read in zip(loop.capture(samples), again.capture(samples), strict=True):
        assert torch.equal(captured.hidden_states_SLD, read.hidden_states_SLD)
        assert torch.equal(beside(captured), beside(read))


def test_an_interrupted_fill_goes_on_and_equals_an_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    failing = FailingLoop(target_loop(), 1, RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        fill_store(open_store(tmp_path, target_loop()), failing, SAMPLES)  # type: ignore[arg-type]
    store = open_store(tmp_path, target_loop())
    assert store.missing() == list(range(SAMPLES_PER_FILL, len(SAMPLES)))
    fill_store(store, target_loop(), SAMPLES)
    assert contents(tmp_path) == contents(whole)


def test_a_sample_counts_only_after_its_states_are_on_the_disk(tmp_path: Path) -> None:
    loop = target_loop()
    store = open_store(tmp_path, loop)
    store.write(loop.capture(SAMPLES[:1])[0])
    assert open_store(tmp_path, loop).missing() == list(range(len(SAMPLES)))
    store.sync()
    assert open_store(tmp_path, loop).missing() == list(range(1, len(SAMPLES)))


@pytest.mark.parametrize("name", ["hidden_states.bin", "target_ids.bin"])
def test_a_file_that_was_cut_is_filled_again(whole: Path, tmp_path: Path, name: str) -> None:
    for file, content in contents(whole).items():
        (tmp_path / file).write_bytes(content[:-1] if file == name else content)
    store = open_store(tmp_path, target_loop())
    assert store.missing() == list(range(len(SAMPLES)))
    fill_store(store, target_loop(), SAMPLES)
    assert contents(tmp_path) == contents(whole)


def test_states_of_something_else_are_refused_by_name(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="with send target_ids, this run wants last_hidden"):
        open_store(whole, target_loop("last_hidden"))
    with pytest.raises(CheckpointError, match="with tokens "):
        open_store(whole, target_loop(), SAMPLES[:-1])


def test_what_was_never_written_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no states of sample 2"):
        open_store(tmp_path, target_loop()).capture([SAMPLES[2]])
