"""Captured states on disk: what is read is what was captured, however often the filling was interrupted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
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


FILES = ("manifest.json", "hidden_states.bin", "target_ids.bin", "checksums.bin", "done.bin")


def copy_of(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def read_everything(folder: Path) -> None:
    """What a run does: fill what is missing, then read every sample twice."""
    loop = target_loop()
    store = open_store(folder, loop)
    fill_store(store, loop, SAMPLES)
    for _ in range(2):
        store.capture(SAMPLES)


def refusal(folder: Path) -> str:
    """The line that names what is wrong, after which nothing in the folder has changed."""
    before = contents(folder)
    with pytest.raises(CheckpointError) as caught:
        read_everything(folder)
    assert contents(folder) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_store_is_read_without_a_word(whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    read_everything(copy_of(whole, tmp_path / "copy"))
    assert contents(tmp_path / "copy") == before
    assert set(before) == set(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 1])
def test_a_file_that_was_cut_is_named(whole: Path, tmp_path: Path, name: str, share: float) -> None:
    path = copy_of(whole, tmp_path / "copy") / name
    size = path.stat().st_size
    os.truncate(path, min(int(size * share), size - 2))
    line = refusal(path.parent)
    assert str(path) in line
    assert "delete the folder to capture the states again" in line


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    path = copy_of(whole, tmp_path / "copy") / name
    path.unlink()
    assert f"{path} is missing" in refusal(path.parent)


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("place", [0.0, 0.5, 0.99])
def test_one_flipped_bit_is_found(whole: Path, tmp_path: Path, name: str, place: float) -> None:
    path = copy_of(whole, tmp_path / "copy") / name
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)
    line = refusal(path.parent)
    assert str(path) in line or name == "checksums.bin"
    assert "restore it from a copy, or delete the folder" in line


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("pages", [slice(0, 64), slice(64, 128), slice(None)])
def test_zeroed_pages_are_found(whole: Path, tmp_path: Path, name: str, pages: slice) -> None:
    path = copy_of(whole, tmp_path / "copy") / name
    content = bytearray(path.read_bytes())
    content[pages] = bytes(len(content[pages]))
    path.write_bytes(content)
    assert str(path.parent) in refusal(path.parent)


@pytest.mark.parametrize(
    "names", [FILES[1:2], FILES[2:3], FILES[1:3], FILES[1:4], FILES[1:], FILES], ids=lambda names: "+".join(names)
)
def test_states_of_another_target_do_not_pass(whole: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    other = TargetForwardLoop(tiny_target(seed=1), TARGET_LAYER_IDS, "target_ids", 4096)
    fill_store(open_store(tmp_path / "other", other), other, SAMPLES)
    folder = copy_of(whole, tmp_path / "copy")
    for name in names:
        shutil.copy(tmp_path / "other" / name, folder / name)
    assert str(folder) in refusal(folder)


def test_states_of_two_samples_that_were_exchanged_are_found(tmp_path: Path) -> None:
    loop, samples = target_loop(), [replace(SAMPLES[0], sample_id=0), replace(SAMPLES[0], sample_id=1)]
    samples[1] = replace(samples[1], input_ids=samples[1].input_ids.flip(0))
    fill_store(open_store(tmp_path, loop, samples), loop, samples)
    for name in FILES[1:4]:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[len(content) // 2 :] + content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="sample 0 is not what was captured"):
        open_store(tmp_path, loop, samples).capture(samples)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b'{"format": 2, "tar', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[1]", "does not say what the states are"),
        (b"{}", "does not say what the states are"),
        (b'{"format": 1}', "has format 1, known here is 2"),
        (b'{"format": 2}', "does not say target"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_one_line(whole: Path, tmp_path: Path, content: bytes, words: str) -> None:
    path = copy_of(whole, tmp_path / "copy") / "manifest.json"
    path.write_bytes(content)
    line = refusal(path.parent)
    assert f"{path} {words}" in line
    assert "delete the folder" in line


@pytest.mark.parametrize(
    "key", ["target", "target_layer_ids", "hidden_size", "dtype", "send", "data", "tokens", "complete"]
)
def test_a_manifest_without_a_key_is_named(whole: Path, tmp_path: Path, key: str) -> None:
    path = copy_of(whole, tmp_path / "copy") / "manifest.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    assert f"{path} does not say {key}" in refusal(path.parent)


def test_a_fill_that_ended_before_anything_was_kept_begins_anew(whole: Path, tmp_path: Path) -> None:
    """What a process leaves that dies while it makes the files, one after the other."""
    manifest = json.loads((whole / "manifest.json").read_text())
    for kept in range(1, len(FILES) + 1):
        folder = tmp_path / str(kept)
        folder.mkdir()
        (folder / FILES[0]).write_text(json.dumps({**manifest, "complete": False}, indent=2) + "\n")
        for name in FILES[1:kept]:
            half = kept < len(FILES) and name == FILES[kept - 1] and name.endswith(("states.bin", "ids.bin"))
            (folder / name).write_bytes(bytes((whole / name).stat().st_size // (2 if half else 1)))
        (folder / ".unfinished-done.bin").write_bytes(b"")
        fill_store(open_store(folder, target_loop()), target_loop(), SAMPLES)
        (folder / ".unfinished-done.bin").unlink(missing_ok=True)
        assert contents(folder) == contents(whole)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_cut_file_of_an_interrupted_fill_is_named_too(whole: Path, tmp_path: Path, name: str) -> None:
    failing = FailingLoop(target_loop(), 1, RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        fill_store(open_store(tmp_path, target_loop()), failing, SAMPLES)  # type: ignore[arg-type]
    os.truncate(tmp_path / name, (whole / name).stat().st_size - 1)
    assert f"{tmp_path / name} has " in refusal(tmp_path)


def test_states_are_kept_in_the_dtype_that_they_have(tmp_path: Path) -> None:
    captured = target_loop().capture(SAMPLES[:1])[0]
    with pytest.raises(AssertionError, match="bfloat16"):
        open_store(tmp_path, target_loop()).write(
            replace(captured, hidden_states_SLD=captured.hidden_states_SLD.bfloat16())
        )


def test_states_of_something_else_are_refused_by_name(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="with send target_ids, this run wants last_hidden"):
        open_store(whole, target_loop("last_hidden"))
    with pytest.raises(CheckpointError, match="with tokens "):
        open_store(whole, target_loop(), SAMPLES[:-1])


def test_what_was_never_written_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no states of sample 2"):
        open_store(tmp_path, target_loop()).capture([SAMPLES[2]])
