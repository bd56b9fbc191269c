"""Filling stores with several writers: the bytes of one, whoever is killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.engine.capture import fill_states
from draftline.engine.worker import WorkerTerms
from draftline.errors import CheckpointError, StorageError
from draftline.targets.loop import TargetForwardLoop
from draftline.transfer.store import SAMPLES_PER_FILL, StatesStore, loop_identity
from tests.engine.test_processes import Deadly
from tests.engine.tiny_target import TARGET_LAYER_IDS, tiny_samples, tiny_target

SAMPLES = tiny_samples(3 * SAMPLES_PER_FILL + 3)


def store_of(folder: Path, loop: TargetForwardLoop, kept: str | None = None) -> StatesStore:
    return StatesStore(folder, loop_identity(loop, "data", kept), np.array([len(s) for s in SAMPLES]), 1)


def fill(store: StatesStore, loop: object, writers: int, repair: bool = False) -> list[str]:
    said = list[str]()
    terms = WorkerTerms(threads=1, device_type="cpu", patience=120.0, say=said.append)
    fill_states({store: SAMPLES}, loop, writers=writers, repair=repair, settings=terms)  # type: ignore[arg-type, dict-item]
    return said


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.fixture(scope="module")
def loop() -> TargetForwardLoop:
    return TargetForwardLoop(tiny_target(), TARGET_LAYER_IDS, "target_ids", 4096)


@pytest.fixture(scope="module")
def alone(loop: TargetForwardLoop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Filled by this process."""
    folder = tmp_path_factory.mktemp("alone")
    said = fill(store_of(folder, loop), loop, 1)
    assert len(said) == 1
    assert f"states of {len(SAMPLES)} conversations in 4 shards" in said[0]
    assert "in float32" in said[0]
    return folder


def test_two_writers_of_which_one_is_killed_twice_write_the_same(
    loop: TargetForwardLoop, alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "lives").write_text("2")
    said = fill(store_of(tmp_path / "states", loop), Deadly(loop, 1, tmp_path / "lives"), 2)
    assert contents(tmp_path / "states") == contents(alone)
    assert len([line for line in said if "was killed by SIGKILL" in line]) == 2


def test_what_is_damaged_is_named_and_captured_again(loop: TargetForwardLoop, alone: Path, tmp_path: Path) -> None:
    fill(store_of(tmp_path, loop), loop, 1)
    path = tmp_path / "shard-000001.safetensors"
    path.write_bytes(path.read_bytes()[:-9] + b"123456789")
    (tmp_path / "shard-000003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard-000003.safetensors is missing: .*--repair"):
        fill(store_of(tmp_path, loop), loop, 1)
    said = fill(store_of(tmp_path, loop), loop, 1, repair=True)
    assert str(path) in said[0]
    assert "sample 63 is not what was captured" in said[0] or "sample" in said[0]
    assert said[1].endswith("shard-000003.safetensors is missing")
    assert said[2].endswith("2 of 4 shards are whole")
    assert contents(tmp_path) == contents(alone)
    assert fill(store_of(tmp_path, loop), loop, 1, repair=True) == [f"{tmp_path}: 4 of 4 shards are whole"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_captured(
    loop: TargetForwardLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("draftline.engine.capture.shutil.disk_usage", lambda _path: usage)
    with pytest.raises(StorageError, match=r"needs .* for states and 1.00 kB are free") as caught:
        fill(store_of(tmp_path, loop), loop, 1)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("shard-*"))


def test_narrow_states_are_never_silent(loop: TargetForwardLoop, tmp_path: Path) -> None:
    said = fill(store_of(tmp_path, loop, "fp8"), loop, 1)
    assert "in fp8" in said[0]
    assert said[1].startswith(f"states in {tmp_path} are kept in fp8: off by ")
    assert fill(store_of(tmp_path, loop, "fp8"), loop, 1) == said[1:], "a run that reads them says so too"
