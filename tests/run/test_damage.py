"""Damaged files of a run folder: each is named in one line, with what to do, by whatever needs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.errors import CheckpointError, DraftlineError, PipelineError, StorageError
from draftline.formats.card import trained_mode
from draftline.formats.exporting import export_drafter
from draftline.train.checkpoint import read_checkpoint, read_record, run_of
from draftline.train.run_folder import RunFolder
from tests.engine.tiny_target import tiny_target
from tests.run.small_run import assert_same_run, small_run

CHECKPOINT_FILES = ("state.json", "drafter.safetensors", "optimizer.safetensors", "random.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 18 steps, with lines at 3, 6, 7, 9, 12, 14, 15 and 18, and the audit of its start."""
    out = tmp_path_factory.mktemp("whole") / "run"
    small_run(out)
    RunFolder(out).write_audit({"findings": [], "checks": []})
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """The same, and it died before its last checkpoint was written."""
    out = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    shutil.rmtree(out / "checkpoints" / "step-000018")
    RunFolder(out).point("last", 15)
    return out


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def other_type(path: Path) -> None:
    path.write_text("[1, 2]\n")


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = (cut, empty, zeroed, other_type, deep, folder)


def line_of(call: Callable[[], object]) -> str:
    with pytest.raises(DraftlineError) as caught:
        call()
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def says_what_to_do(line: str) -> bool:
    return any(word in line.partition(": ")[2] for word in ("restore", "delete", "copy the checkpoint", "give "))


def test_the_run_continues_from_where_it_died(whole: Path, run: Path) -> None:
    small_run(run, resume=True)
    assert_same_run(whole, run)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["config.yaml", "run.json", "metrics.jsonl"])
def test_a_resume_names_the_damaged_file(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(run / name)
    line = line_of(lambda: small_run(run, resume=True))
    assert str(run / name) in line
    assert says_what_to_do(line)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_damaged_checkpoint_is_named(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    path = run / "checkpoints" / "step-000015" / name
    damage(path)
    line = line_of(lambda: small_run(run, resume=True))
    assert str(path) in line or "is not a checkpoint (state.json is missing)" in line
    assert says_what_to_do(line)


@pytest.mark.parametrize("key", ["step", "next_row", "window", "best_step"])
def test_a_checkpoint_without_a_part_of_its_progress_is_named(run: Path, key: str) -> None:
    path = run / "checkpoints" / "step-000015" / "state.json"
    path.write_text(path.read_text().replace(f'"{key}"', '"other"'))
    for read in (read_checkpoint, read_record):
        assert str(path) in line_of(lambda read=read: read(path.parent))


@pytest.mark.parametrize("name", ["metrics.jsonl", "speed.jsonl"])
def test_a_line_that_is_torn_before_others_is_named(run: Path, name: str) -> None:
    lines = (run / name).read_bytes().splitlines(keepends=True)
    (run / name).write_bytes(b"".join([*lines[:2], lines[2][:-9] + b"\n", *lines[3:]]))
    line = line_of(lambda: small_run(run, resume=True))
    assert f"{run / name} line 3 is torn" in line
    assert says_what_to_do(line)


def test_lines_that_are_gone_are_named_and_a_deleted_file_begins_anew(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    line = line_of(lambda: small_run(run, resume=True))
    assert "is whole up to step 7, and the run has written lines up to step 15" in line
    path.unlink()
    small_run(run, resume=True)
    assert RunFolder(run).metrics.steps.tolist() == [18]


def test_what_a_crash_tears_is_no_damage(whole: Path, run: Path) -> None:
    """Lines after the checkpoint, torn in any way, are made again."""
    for name in ("metrics.jsonl", "speed.jsonl"):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).write_bytes(b"".join([*lines[:7], bytes(50), b"\n", lines[7][:20]]))
    small_run(run, resume=True)
    assert_same_run(whole, run)


def test_settings_of_another_version_name_their_file(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("eval_every", "evaluate_every"))
    line = line_of(lambda: small_run(run, resume=True))
    assert line.startswith(f"{path}: train.evaluate_every is not a setting")


def test_a_copy_that_has_folders_for_links_is_named(whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(StorageError, match=r"run/last is a folder and not a link into checkpoints/: delete it"):
        small_run(out, resume=True)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["run.json", "audit.json", "state.json", "drafter.safetensors"])
def test_an_export_names_the_damaged_file(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    path = (run / "best").resolve() / name if name in CHECKPOINT_FILES else run / name
    damage(path)
    out = run.parent / "out"
    line = line_of(lambda: export_drafter(source=run, out=out, target=tiny_target()))
    assert name in line
    assert not out.exists()


def test_a_checkpoint_knows_its_run(whole: Path, tmp_path: Path) -> None:
    for place in (whole, whole / "best", whole / "checkpoints" / "step-000018"):
        found = run_of(place)
        assert found is not None
        assert found.path.resolve() == whole.resolve()
    assert run_of(tmp_path) is None
    alone = shutil.copytree(whole / "best", tmp_path / "alone")
    assert run_of(alone) is None
    assert trained_mode(alone) is None
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        read_record(tmp_path)


@pytest.mark.parametrize("mode", ["inline", "threads"])
def test_damaged_states_stop_a_run_with_their_file(tmp_path: Path, mode: str) -> None:
    words = [f"pipeline.states_path={tmp_path / 'states'}", f"pipeline.mode={mode}"]
    small_run(tmp_path / "filled", "train.max_steps=1", *words)
    (states,) = (tmp_path / "states").glob("*/shard-*.safetensors")
    content = bytearray(states.read_bytes())
    content[len(content) // 2] ^= 1
    states.write_bytes(content)
    with pytest.raises((CheckpointError, PipelineError)) as caught:
        small_run(tmp_path / "read", *words)
    assert f"{states}: sample " in str(caught.value)
    assert "capture it again with `draftline capture --repair`" in str(caught.value)
    assert "\n" not in str(caught.value)
    states.write_bytes(content[:-1])
    assert f"{states} cannot be read" in line_of(lambda: small_run(tmp_path / "again", *words))
