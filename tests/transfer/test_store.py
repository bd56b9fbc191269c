"""Captured states on disk: what is read is what was captured, whatever was interrupted, damaged or exchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftline.errors import CheckpointError, StorageError
from draftline.records import CapturedSample, Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.transfer.store import SAMPLES_PER_FILL, StatesStore, fill_store, loop_identity
from tests.engine.tiny_target import TARGET_LAYER_IDS, FailingLoop, tiny_samples, tiny_target

SAMPLES = tiny_samples(2 * SAMPLES_PER_FILL + 3)
SHARDS = [f"shard-{number:06d}.safetensors" for number in range(3)]
FILES = ["manifest.json", *SHARDS]


def target_loop(send: str = "target_ids") -> TargetForwardLoop:
    return TargetForwardLoop(tiny_target(), TARGET_LAYER_IDS, send, 4096)  # type: ignore[arg-type]


def open_store(
    folder: Path, loop: TargetForwardLoop, samples: Sequence[Sample] = SAMPLES, kept: str | None = None, size: int = 1
) -> StatesStore:
    return StatesStore(folder, loop_identity(loop, "data", kept), np.array([len(s) for s in samples]), size)


def fill(store: StatesStore, loop: TargetForwardLoop, samples: Sequence[Sample] = SAMPLES) -> StatesStore:
    with store.lock():
        fill_store(store, store.missing(), loop, samples)  # type: ignore[arg-type]
    store.finish()
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def beside(captured: CapturedSample) -> torch.Tensor:
    found = captured.target_ids_S if captured.target_ids_S is not None else captured.verifier_last_hidden_SD
    assert found is not None
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    fill(open_store(folder, target_loop()), target_loop())
    return folder


@pytest.mark.parametrize("send", ["target_ids", "last_hidden"])
def test_what_is_read_is_what_the_target_gives(tmp_path: Path, send: str) -> None:
    loop, samples = target_loop(send), SAMPLES[:5]
    fill(open_store(tmp_path, loop, samples), loop, samples)
    again = open_store(tmp_path, loop, samples)
    assert again.complete
    assert again.error() == 0.0
    for captured, read in zip(loop.capture(samples), again.capture(samples), strict=True):
        assert torch.equal(captured.hidden_states_SLD, read.hidden_states_SLD)
        assert torch.equal(beside(captured), beside(read))


def test_a_shard_says_what_it_is_to_any_program(whole: Path) -> None:
    tensors = load_file(whole / SHARDS[1])
    assert set(tensors) == {"hidden_states", "target_ids", "lengths", "checksums"}
    assert tensors["lengths"].tolist() == [len(sample) for sample in SAMPLES[32:64]]
    assert tensors["hidden_states"].shape == (sum(tensors["lengths"].tolist()), 2 * 16)
    header = (whole / SHARDS[1]).read_bytes()[:3000].decode(errors="replace")
    for text in ("output of decoder layer 0, output of decoder layer 2", "input_ids_sha256", "manifest"):
        assert text in header


def test_shards_hold_as_many_groups_as_their_size_allows_and_the_same_states(whole: Path, tmp_path: Path) -> None:
    large = fill(open_store(tmp_path / "large", target_loop(), size=1 << 20), target_loop())
    assert (large.num_shards, open_store(whole, target_loop()).num_shards) == (1, 3)
    assert open_store(tmp_path / "large", target_loop(), size=1).num_shards == 1, "as it was begun"
    for one, other in zip(large.capture(SAMPLES), open_store(whole, target_loop()).capture(SAMPLES), strict=True):
        assert torch.equal(one.hidden_states_SLD, other.hidden_states_SLD)


@pytest.mark.parametrize(("kept", "error"), [("bfloat16", 2.0**-9), ("fp8", 2.0**-4)])
def test_narrow_states_are_rounded_and_say_how_far(tmp_path: Path, kept: str, error: float) -> None:
    """Against rounding each number of a token and layer by hand, to the nearest of all that the format has."""
    loop, samples = target_loop(), SAMPLES[:3]
    store = fill(open_store(tmp_path, loop, samples, kept), loop, samples)
    exact = torch.cat([item.hidden_states_SLD for item in loop.capture(samples)]).double()
    found = torch.cat([item.hidden_states_SLD for item in store.capture(samples)]).double()
    assert all(
        torch.equal(beside(a), beside(b)) for a, b in zip(loop.capture(samples), store.capture(samples), strict=True)
    )
    measured = float((found - exact).norm() / exact.norm())
    assert 0 < store.error() < error
    assert store.error() == pytest.approx(measured, rel=1e-3)
    if kept == "fp8":
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        numbers = numbers[numbers.isfinite()].unique()
        for token in range(0, len(exact), 7):
            for layer in (slice(0, 16), slice(16, 32)):
                unit = exact[token, layer].abs().max() / 448
                nearest = (exact[token, layer, None] / unit - numbers).abs().min(1).values * unit
                assert torch.allclose((found - exact)[token, layer].abs(), nearest, atol=1e-5 * float(448 * unit))


def test_an_interrupted_fill_goes_on_and_equals_an_uninterrupted_one(whole: Path, tmp_path: Path) -> None:
    failing = FailingLoop(target_loop(), 1, RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        fill(open_store(tmp_path, target_loop()), failing)  # type: ignore[arg-type]
    (tmp_path / ".unfinished-shard-000001.safetensors").write_bytes(b"half")
    store = open_store(tmp_path, target_loop())
    assert store.missing() == [1, 2]
    fill(store, target_loop())
    assert contents(tmp_path) == contents(whole)


def copy_of(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def read_everything(folder: Path) -> None:
    """What a run does: see that nothing is missing, then read every sample twice."""
    store = open_store(folder, target_loop())
    store.refuse_gaps()
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


def repaired(folder: Path) -> None:
    """Capture again what is damaged, which gives the bytes of before."""
    store = open_store(folder, target_loop())
    for shard in store.damaged(SAMPLES):  # type: ignore[arg-type]
        store.delete(shard)
    fill(store, target_loop())


def test_a_whole_store_is_read_without_a_word(whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    read_everything(copy_of(whole, tmp_path / "copy"))
    assert contents(tmp_path / "copy") == before
    assert set(before) == set(FILES)
    assert open_store(whole, target_loop()).damaged(SAMPLES) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0, 0.25, 0.9, 1])
@pytest.mark.parametrize("name", [FILES[0], SHARDS[1]])
def test_a_file_that_was_cut_is_named_and_a_shard_captured_again(
    whole: Path, tmp_path: Path, name: str, share: float
) -> None:
    path = copy_of(whole, tmp_path / "copy") / name
    size = path.stat().st_size
    os.truncate(path, min(int(size * share), size - 2))
    assert str(path) in refusal(path.parent)
    if name in SHARDS:
        repaired(path.parent)
        assert contents(path.parent) == contents(whole)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_named(whole: Path, tmp_path: Path, name: str) -> None:
    path = copy_of(whole, tmp_path / "copy") / name
    path.unlink()
    assert f"{path} is missing" in refusal(path.parent)


@pytest.mark.parametrize("place", [0.002, 0.02, 0.1, 0.2, 0.3, 0.5, 0.8, 0.999])
def test_one_flipped_bit_anywhere_in_a_shard_is_found_and_repaired(whole: Path, tmp_path: Path, place: float) -> None:
    path = copy_of(whole, tmp_path / "copy") / SHARDS[2]
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)
    line = refusal(path.parent)
    assert str(path) in line
    assert "capture it again with `draftline capture --repair`" in line
    repaired(path.parent)
    assert contents(path.parent) == contents(whole)


def test_states_of_another_target_or_other_layers_do_not_pass(whole: Path, tmp_path: Path) -> None:
    for number, other in enumerate(
        (
            TargetForwardLoop(tiny_target(seed=1), TARGET_LAYER_IDS, "target_ids", 4096),
            TargetForwardLoop(tiny_target(), (1, 2), "target_ids", 4096),
        )
    ):
        fill(open_store(tmp_path / f"other {number}", other), other)
        for names in (SHARDS[:1], FILES):
            folder = copy_of(whole, tmp_path / f"copy {number} {len(names)}")
            for name in names:
                shutil.copy(tmp_path / f"other {number}" / name, folder / name)
            assert str(folder) in refusal(folder)


def test_states_of_two_samples_or_shards_that_were_exchanged_are_found(whole: Path, tmp_path: Path) -> None:
    folder = copy_of(whole, tmp_path / "copy")
    (folder / SHARDS[0]).write_bytes((whole / SHARDS[1]).read_bytes())
    assert "does not belong to these states" in refusal(folder)
    changed = [*SAMPLES]
    changed[3] = replace(changed[3], input_ids=changed[3].input_ids.flip(0))
    with pytest.raises(CheckpointError, match="sample 3 is not what was captured"):
        open_store(whole, target_loop()).capture(changed)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b'{"format": 3, "tar', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[1]", "does not say what the states are"),
        (b"{}", "does not say what the states are"),
        (b'{"format": 2}', "has format 2, known here is 3"),
        (b'{"format": 3}', "does not say target"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_one_line(whole: Path, tmp_path: Path, content: bytes, words: str) -> None:
    path = copy_of(whole, tmp_path / "copy") / "manifest.json"
    path.write_bytes(content)
    line = refusal(path.parent)
    assert f"{path} {words}" in line
    assert "delete the folder" in line


@pytest.mark.parametrize(
    "key",
    [
        *("target", "target_layer_ids", "hidden_size", "dtype", "send", "data", "kept"),
        *("tokens", "samples", "per_shard", "complete"),
    ],
)
def test_a_manifest_without_a_key_is_named(whole: Path, tmp_path: Path, key: str) -> None:
    path = copy_of(whole, tmp_path / "copy") / "manifest.json"
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    assert f"{path} does not say {key}" in refusal(path.parent)


def test_states_are_kept_in_the_dtype_that_they_have(tmp_path: Path) -> None:
    captured, store = target_loop().capture(SAMPLES[:1]), open_store(tmp_path, target_loop(), SAMPLES[:1])
    with pytest.raises(AssertionError, match="bfloat16"):
        store.write(0, [replace(captured[0], hidden_states_SLD=captured[0].hidden_states_SLD.bfloat16())])


def test_states_of_something_else_are_refused_by_name(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="with send target_ids, this run wants last_hidden"):
        open_store(whole, target_loop("last_hidden"))
    with pytest.raises(CheckpointError, match="with samples "):
        open_store(whole, target_loop(), SAMPLES[:-1])
    with pytest.raises(CheckpointError, match="with kept float32, this run wants fp8"):
        open_store(whole, target_loop(), kept="fp8")


def test_what_was_never_written_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"shard-000000\.safetensors is missing"):
        open_store(tmp_path, target_loop()).capture([SAMPLES[2]])


def test_one_process_at_a_time_fills_a_store(whole: Path) -> None:
    """The lock goes with the process that holds it, however it ends."""
    lock = "import fcntl,sys,time; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); f.write('process 1'); "
    words = [
        sys.executable,
        "-c",
        lock + "f.flush(); print('locked', flush=True); time.sleep(600)",
        str(whole / "lock"),
    ]
    store = open_store(whole, target_loop())
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(StorageError, match=r"is being filled by .*process 1: wait for it"), store.lock():
            pass
        other.kill()
    with store.lock():
        pass
