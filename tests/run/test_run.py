"""Whole runs: the same whatever the engine, one folder each, one line for what is wrong."""

from __future__ import annotations

import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftline.audit.life import MemoryConversations
from draftline.config import RunConfig, load_run_config
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, ConfigError, DataError, DraftlineError, PipelineError, StorageError
from draftline.records import Sample
from draftline.run import Examination
from draftline.targets.model import build_target
from draftline.train.checkpoint import load_draft_model
from draftline.train.run_folder import RunFolder
from tests.engine.tiny_target import tiny_samples, tiny_target
from tests.run.small_run import SETTINGS, assert_same_run, read_lines, small_data, small_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted inline run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    small_run(out)
    return out


@pytest.mark.parametrize("loops", [1, 2, 4])
@pytest.mark.parametrize("send", ["target_ids", "last_hidden"])
def test_threads_equal_inline_bit_for_bit(whole: Path, tmp_path: Path, loops: int, send: str) -> None:
    words = ["pipeline.mode=threads", f"pipeline.target_loops={loops}", f"pipeline.send={send}"]
    small_run(tmp_path / "run", *words, "pipeline.queue_bytes=10000")
    assert_same_run(whole, tmp_path / "run")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("target-loop")]


@pytest.mark.parametrize("loops", [1, 2])
def test_processes_equal_inline_bit_for_bit(whole: Path, tmp_path: Path, loops: int) -> None:
    words = ["pipeline.mode=processes", f"pipeline.target_loops={loops}", "pipeline.queue_bytes=10000"]
    small_run(tmp_path / "run", *words)
    assert_same_run(whole, tmp_path / "run")
    assert not multiprocessing.active_children()


def test_what_the_gate_found_is_kept_beside_the_run(tmp_path: Path) -> None:
    found = Examination(["DRF001"], {"findings": [{"code": "DRF001"}], "checks": []})
    small_run(tmp_path / "run", "train.max_steps=1", examination=found)
    small_run(tmp_path / "run", "train.max_steps=1", resume=True)
    assert json.loads((tmp_path / "run" / "audit.json").read_text()) == found.report
    sessions = json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]
    assert [session.get("allowed") for session in sessions] == [["DRF001"], None]


def test_what_a_run_folder_holds(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {
        "best",
        "checkpoints",
        "config.yaml",
        "last",
        "metrics.jsonl",
        "run.json",
        "speed.jsonl",
        "tensorboard",
    }
    identity = json.loads((whole / "run.json").read_text())
    assert identity["data"]["fingerprint"] == "memory"
    assert identity["drafter"]["target_layer_ids"] == [0, 2]
    assert identity["sessions"][0]["threads_per_loop"] >= 1
    assert set(identity["code"]) == {"commit", "diff_sha256"}
    threads = identity["sessions"][0]["threads_per_loop"]
    assert load_run_config(whole / "config.yaml") == load_run_config(
        None, [*SETTINGS, f"pipeline.threads_per_loop={threads}", "pipeline.mode=inline"]
    )
    assert isinstance(load_draft_model(whole), DFlashDraftModel)


def test_lines_are_where_they_should_be(whole: Path) -> None:
    lines = read_lines(whole)
    last = lines[-1]["step"]
    expected = sorted({*range(3, last, 3), *range(7, last, 7), last})
    assert [line["step"] for line in lines] == expected
    evaluated = [line["step"] for line in lines if "heldout_streak" in line]
    assert evaluated == sorted({*range(7, last, 7), last})
    assert all(
        1.0 <= line["heldout_teacher_forced_acceptance_length"] <= 4.0 for line in lines if "heldout_loss" in line
    )
    data = small_data()
    assert lines[-1]["tokens"] == 3 * data.training.lengths[data.training_ids].sum()
    assert lines[-1]["loss"] < lines[0]["loss"]
    speeds = [json.loads(line) for line in (whole / "speed.jsonl").read_text().splitlines()]
    assert [speed["step"] for speed in speeds] == expected
    assert all(speed["target_tokens_per_second"] > 0 and speed["drafter_tokens_per_second"] > 0 for speed in speeds)


def test_tensorboard_shows_the_lines(whole: Path) -> None:
    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    lines = read_lines(whole)
    scalars = events.Scalars("train/loss")
    assert [event.step for event in scalars] == [line["step"] for line in lines]
    assert [event.value for event in scalars] == pytest.approx([line["loss"] for line in lines])
    assert "train/accuracy_by_position/1" in events.Tags()["scalars"]


def test_a_run_without_heldout_data_has_no_best(tmp_path: Path) -> None:
    result = small_run(tmp_path / "run", "data.heldout_fraction=0", "train.max_steps=2")
    assert result.best_step is None
    assert result.heldout == {}
    assert not (tmp_path / "run" / "best").exists()


def test_a_bfloat16_target_trains_a_float32_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build_target("half", tiny_target().model.to(torch.bfloat16), None)
    monkeypatch.setattr("tests.run.small_run.tiny_target", lambda: target)
    small_run(tmp_path / "run", "train.max_steps=3")
    assert {p.dtype for p in load_draft_model(tmp_path / "run").parameters()} == {torch.float32}
    assert read_lines(tmp_path / "run")[-1]["heldout_loss"] > 0


def test_a_failing_target_loop_ends_the_run_with_its_cause_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = RuntimeError("out of memory")
    original = MemoryConversations.__getitem__
    reads = iter(range(1000))

    def fail_later(self: MemoryConversations, sample_id: int) -> Sample:
        if next(reads) > 30:
            raise cause
        return original(self, sample_id)

    monkeypatch.setattr(MemoryConversations, "__getitem__", fail_later)
    words = ["pipeline.mode=threads", "pipeline.target_loops=2", "train.save_every=99", "train.keep_last=1"]
    with pytest.raises(PipelineError, match="out of memory") as caught:
        small_run(tmp_path / "run", *words)
    assert caught.value.__cause__ is cause
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("target-loop")]
    saved = json.loads((tmp_path / "run" / "last" / "state.json").read_text())["progress"]["step"]
    assert saved >= 1
    monkeypatch.undo()
    small_run(tmp_path / "run", *words, resume=True)
    small_run(tmp_path / "straight", *words)
    assert_same_run(tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["data.max_length=10"], ConfigError, "data.max_length is 10"),
        (["drafter.target_layer_ids=[0,9]"], DraftlineError, "9"),
        (["train.attention=flex"], ConfigError, "flex"),
        (["train.device=nonsense"], DraftlineError, "nonsense"),
        (["pipeline.mode=threads", "pipeline.target_devices=[cpu,cpu]"], ConfigError, "names 2 devices for 1"),
        (["pipeline.mode=processes", "pipeline.states_path=x"], ConfigError, "has no target to run where states"),
    ],
)
def test_settings_that_cannot_be_met_are_one_line_and_leave_nothing(
    tmp_path: Path, words: list[str], error: type[DraftlineError], message: str
) -> None:
    with pytest.raises(error) as caught:
        small_run(tmp_path / "run", *words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_data_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    foreign = [replace(sample, input_ids=sample.input_ids + 40) for sample in tiny_samples(3)]
    with pytest.raises(DataError, match=r"knows 0\.\.39"):
        small_run(tmp_path / "run", samples=foreign)


def test_conversations_longer_than_the_target_reads_are_refused_before_training(tmp_path: Path) -> None:
    long = [*tiny_samples(3), Sample(3, torch.full((257,), 5), torch.ones(257, dtype=torch.bool))]
    with pytest.raises(DataError, match=r"has 257 tokens.*--max-length 256"):
        small_run(tmp_path / "run", samples=long)
    assert not (tmp_path / "run").exists()


def test_resume_takes_a_target_that_has_moved_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path / "run", "train.max_steps=1")
    small_run(tmp_path / "run", "train.max_steps=1", "target.name=elsewhere", resume=True)
    other = tiny_target(seed=1)
    monkeypatch.setattr("tests.run.small_run.tiny_target", lambda: other)
    with pytest.raises(CheckpointError, match="target with other weights"):
        small_run(tmp_path / "run", "train.max_steps=1", resume=True)


def test_the_number_of_threads_is_kept_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path / "run", "train.max_steps=1", "pipeline.threads_per_loop=1")
    monkeypatch.setattr("draftline.run.available_cores", lambda: 8)
    small_run(tmp_path / "run", "train.max_steps=1", resume=True)
    sessions = json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]
    assert [session["threads_per_loop"] for session in sessions] == [1, 1]


def test_a_run_on_stored_states_is_the_same_run(whole: Path, tmp_path: Path) -> None:
    """Samples of a store share other forwards than those of a row: equal up to rounding, and equal to itself."""
    words = [f"pipeline.states_path={tmp_path / 'states'}"]
    small_run(tmp_path / "filled", *words)
    small_run(tmp_path / "read", *words)
    assert_same_run(tmp_path / "filled", tmp_path / "read")
    losses, stored = ([line["loss"] for line in read_lines(out)] for out in (whole, tmp_path / "read"))
    assert stored == pytest.approx(losses, rel=1e-3)


def test_a_folder_in_use_is_refused(whole: Path, tmp_path: Path) -> None:
    before = (whole / "metrics.jsonl").read_text()
    with pytest.raises(StorageError, match="add --resume"):
        small_run(whole)
    assert (whole / "metrics.jsonl").read_text() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="not a run"):
        small_run(tmp_path, resume=True)
    with pytest.raises(StorageError, match="is a file"):
        small_run(tmp_path / "notes.txt")


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda place, _mode: Path(place) != tmp_path)
    with pytest.raises(StorageError, match=r"run/of/mine cannot be written: name a folder of yours"):
        RunFolder(tmp_path / "run" / "of" / "mine").check_usable(RunConfig(), resume=False)


@pytest.mark.parametrize(
    "word", ["train.seed=1", "train.max_steps=100", "drafter.num_layers=2", "loss.decay_gamma=2.5"]
)
def test_resume_with_another_setting_names_it(whole: Path, word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{key} is ") as caught:
        small_run(whole, word, resume=True)
    assert "\n" not in str(caught.value)


def test_resume_may_change_where_and_how_often(whole: Path) -> None:
    before = read_lines(whole)
    result = small_run(whole, "pipeline.mode=threads", "train.log_every=1", "train.keep_last=5", resume=True)
    assert result.step == before[-1]["step"]
    assert read_lines(whole) == before
    assert yaml.safe_load((whole / "config.yaml").read_text())["train"]["keep_last"] == 5
    assert len(json.loads((whole / "run.json").read_text())["sessions"]) == 2
