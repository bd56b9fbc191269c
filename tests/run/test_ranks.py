"""Whole runs on several ranks: the same run on any number of them, continued on any other, and ended together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftline.engine import torchrun
from draftline.engine.torchrun import device_share
from draftline.errors import AuditRefusal, ConfigError, DataError
from draftline.records import PackedBatch
from draftline.run import RunResult
from draftline.train.ranks import Ranks
from draftline.train.run_folder import RunFolder
from draftline.train.step import Drafter, StepResult
from tests.run.small_run import assert_same_run, read_lines
from tests.run.world import Ended, World, on_ranks, train_small

FSDP = ("train.sharding=fsdp",)
MUON = ("optim.name=muon", "train.max_steps=8")
AT = 9
"""Step in which something happens; the last checkpoint before it is of step 7, the best so far."""


@contextmanager
def at_step(step: int, act: Any) -> Iterator[None]:
    """Do something when a step has moved the weights, in this process."""
    clean = Drafter.step

    def acting(drafter: Drafter, batches: Sequence[PackedBatch]) -> StepResult:
        result = clean(drafter, batches)
        if batches[0].step == step:
            act()
        return result

    Drafter.step = acting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Drafter.step = clean  # type: ignore[method-assign]


def train_and(
    ranks: Ranks, who: int, act: Any, out: Path, words: Sequence[str] = (), resume: bool = False
) -> RunResult:
    """Body: train, and let something happen on one rank."""
    if ranks.rank != who:
        return train_small(ranks, out, words, resume)
    with at_step(AT, act):
        return train_small(ranks, out, words, resume)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def find_bad_data() -> None:
    raise DataError("row 7 has no tokens: prepare the data again")


def break_down() -> None:
    raise ZeroDivisionError("a bug")


def lines_of(ended: Sequence[Ended]) -> list[str]:
    """What all ranks said that is not progress."""
    known = ("draftline", "rank ", "stopped after", "stopping")
    return [line for one in ended for line in one.said.splitlines() if line.startswith(known)]


def difference(left: Path, right: Path) -> float:
    """Of the last weights, in the maximum of each tensor."""
    ours, theirs = (load_file(out / "last" / "drafter.safetensors") for out in (left, right))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Unbroken runs."""
    place = tmp_path_factory.mktemp("ranks")
    for name, count, words in (("1", 1, ()), ("2", 2, ()), ("4", 4, ()), ("fsdp", 2, FSDP)):
        results = on_ranks(place / f"{name}.world", count, train_small, place / name, words)
        assert {(one.step, one.tokens, one.best_step) for one in results} == {
            (20, results[0].tokens, results[0].best_step)
        }
    return {name: place / name for name in ("1", "2", "4", "fsdp")}


@pytest.mark.parametrize("name", ["2", "4", "fsdp"])
def test_the_same_configuration_is_the_same_run(whole: dict[str, Path], name: str) -> None:
    assert difference(whole[name], whole["1"]) < 2e-5
    ours, theirs = read_lines(whole[name]), read_lines(whole["1"])
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        assert line["tokens"] == other["tokens"]
        assert line["learning_rate"] == other["learning_rate"]
        for key in ("loss", "grad_norm", "accuracy", "streak", "heldout_loss", "heldout_streak"):
            assert line.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-5)
        for ours_P, theirs_P in zip(line["accuracy_by_position"], other["accuracy_by_position"], strict=True):
            assert (ours_P or 0.0) == pytest.approx(theirs_P or 0.0)


@pytest.mark.parametrize("name", ["2", "4", "fsdp"])
def test_a_checkpoint_is_the_same_files(whole: dict[str, Path], name: str) -> None:
    for file in ("drafter", "optimizer", "random"):
        ours, theirs = (load_file(whole[key] / "last" / f"{file}.safetensors") for key in (name, "1"))
        assert {key: (t.shape, t.dtype) for key, t in ours.items()} == {
            key: (t.shape, t.dtype) for key, t in theirs.items()
        }
    states = [json.loads((whole[key] / "last" / "state.json").read_text()) for key in (name, "1")]
    for of_rows in ("step", "next_row", "tokens", "best_step", "logged_step"):
        assert states[0]["progress"][of_rows] == states[1]["progress"][of_rows]
    kept = [sorted(path.name for path in (whole[key] / "checkpoints").iterdir()) for key in (name, "1")]
    assert kept[0] == kept[1]
    names = [sorted(path.name for path in whole[key].iterdir()) for key in (name, "1")]
    assert names[0] == names[1]
    assert json.loads((whole[name] / "run.json").read_text())["sessions"][0]["ranks"] in (2, 4)


def test_a_run_goes_on_on_any_number_of_ranks(whole: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    for session, (count, words) in enumerate([(2, ()), (1, FSDP), (2, FSDP), (4, ())]):
        body, step = (partial(stop_after, 5 * (session + 1)), 5 * (session + 1)) if session < 3 else (train_small, 20)
        ended = World(tmp_path / str(session), count, body, out, words, session > 0).ended()
        assert {one.status for one in ended} == {130 if session < 3 else 0}, [one.said for one in ended]
        assert json.loads((out / "last" / "state.json").read_text())["progress"]["step"] == step
    assert difference(out, whole["1"]) < 2e-5
    assert [line["step"] for line in read_lines(out)] == [line["step"] for line in read_lines(whole["1"])]
    assert [one["ranks"] for one in json.loads((out / "run.json").read_text())["sessions"]] == [2, 1, 2, 4]


def stop_after(step: int, ranks: Ranks, out: Path, words: Sequence[str], resume: bool) -> RunResult:
    """Body: the last rank alone is asked to stop in a step."""
    if ranks.rank != ranks.count - 1:
        return train_small(ranks, out, words, resume)
    with at_step(step - 1, ask_to_stop):
        return train_small(ranks, out, words, resume)


@pytest.mark.slow
def test_muon_moves_whole_matrices_of_which_ranks_keep_shares(tmp_path: Path) -> None:
    on_ranks(tmp_path / "a", 1, train_small, tmp_path / "one", MUON)
    on_ranks(tmp_path / "b", 2, train_small, tmp_path / "two", (*MUON, *FSDP))
    assert difference(tmp_path / "two", tmp_path / "one") < 1e-3
    ours, theirs = (load_file(tmp_path / name / "last" / "optimizer.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_ends_the_others_and_costs_no_bit(
    whole: dict[str, Path], tmp_path: Path, who: int
) -> None:
    out = tmp_path / "run"
    ended = World(tmp_path / "world", 2, train_and, who, die, out).ended()
    assert ended[who].status == -signal.SIGKILL
    assert ended[1 - who].status == 1
    assert [line.partition(" (")[0] for line in lines_of(ended)] == [f"rank {who} died without a word"]
    step = json.loads((out / "last" / "state.json").read_text())["progress"]["step"]
    assert step == (7 if who == 0 else AT + 1)  # the first rank saves what it has
    on_ranks(tmp_path / "again", 2, train_small, out, (), True)
    assert_same_run(whole["2"], out)


@pytest.mark.slow
def test_a_rank_that_hangs_is_found(tmp_path: Path) -> None:
    world = World(tmp_path / "world", 2, impatient, 1, freeze, tmp_path / "run")
    world.processes[0].join(60)
    os.kill(world.processes[1].pid or 0, signal.SIGKILL)
    ended = world.ended()
    assert ended[0].status == 1
    assert [line.removeprefix("draftline: ")[:30] for line in lines_of(ended[:1])] == ["rank 1 died without a word (ki"]


def impatient(ranks: Ranks, *given: Any) -> RunResult:
    """Body: with little patience."""
    torchrun.PATIENCE, torchrun.GRACE = 6.0, 0.5
    return train_and(ranks, *given)


@pytest.mark.parametrize(
    ("act", "status", "line"),
    [
        (find_bad_data, 2, "rank 1: row 7 has no tokens: prepare the data again"),
        (break_down, 1, "rank 1: unexpected ZeroDivisionError: a bug (add --debug for the traceback)"),
    ],
)
def test_an_error_on_one_rank_is_one_line_and_one_status(tmp_path: Path, act: Any, status: int, line: str) -> None:
    out = tmp_path / "run"
    ended = World(tmp_path / "world", 2, train_and, 1, act, out).ended()
    assert [one.status for one in ended] == [status, status]
    assert lines_of(ended) == [line]
    assert (out / "last").resolve().name in ("step-000009", "step-000010")


def test_a_stop_asked_of_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    ended = World(tmp_path / "world", 2, train_and, 1, ask_to_stop, tmp_path / "run").ended()
    assert [one.status for one in ended] == [130, 130]
    assert lines_of(ended) == ["stopped after step 10 of 20, saved: continue with --resume"]


def refused(ranks: Ranks, error: Exception) -> None:
    """Body: an error in what the first rank does for all."""

    def work() -> None:
        raise error

    ranks.first(work)


def unlike(ranks: Ranks, out: Path, words: Sequence[str], others: Sequence[str]) -> RunResult:
    """Body: other words on the last rank."""
    return train_small(ranks, out, others if ranks.rank == ranks.count - 1 else words)


@pytest.mark.parametrize(
    ("others", "line"),
    [
        (("train.seed=1",), "rank 1 has train.seed 1, rank 0 has 0: start all ranks with the same command, code, ..."),
        (("train.tokens_per_row=0",), "rank 1: train.tokens_per_row = 0: Input should be greater than or equal to 2"),
    ],
)
def test_ranks_that_would_not_train_one_run_write_nothing(tmp_path: Path, others: Sequence[str], line: str) -> None:
    ended = World(tmp_path / "world", 2, unlike, tmp_path / "run", (), others).ended()
    assert [one.status for one in ended] == [2, 2]
    assert [said.startswith(line.removesuffix(" ...")) for said in lines_of(ended)] == [True]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "status"),
    [(AuditRefusal("the audit found LOS002: fix it"), 1), (ConfigError("no such word: drop it"), 2)],
)
def test_what_the_first_rank_refuses_ends_all_alike(tmp_path: Path, error: Exception, status: int) -> None:
    ended = World(tmp_path / "world", 2, refused, error).ended()
    assert [one.status for one in ended] == [status, status]
    assert lines_of(ended) == [f"rank 0: {error}"]


def test_more_ranks_than_rows_of_a_step_are_refused(tmp_path: Path) -> None:
    ended = World(tmp_path / "world", 2, train_small, tmp_path / "run", ("train.rows_per_step=1",)).ended()
    assert [one.status for one in ended] == [2, 2]
    assert ["leaves 1 of 2 ranks without a row" in line for line in lines_of(ended)] == [True]
    assert not (tmp_path / "run").exists()


def drifting(ranks: Ranks, out: Path) -> RunResult:
    """Body: the last rank computes something else."""

    def drift() -> None:
        torch.manual_seed(0)

    if ranks.rank == 1:
        clean = Drafter.checksum
        Drafter.checksum = lambda drafter: "another" + clean(drafter)  # type: ignore[method-assign]
    with at_step(AT, drift):
        return train_small(ranks, out)


def test_weights_that_drift_apart_stop_the_run_before_they_are_saved(tmp_path: Path) -> None:
    ended = World(tmp_path / "world", 2, drifting, tmp_path / "run").ended()
    assert [one.status for one in ended] == [1, 1]
    assert [line[:52] for line in lines_of(ended)] == ["rank 1 has computed other weights than rank 0: leave"]
    assert not RunFolder(tmp_path / "run").checkpoint_steps()


def test_devices_of_a_machine_are_dealt() -> None:
    assert [list(device_share("01234567", rank, 2)) for rank in (0, 1)] == [list("0123"), list("4567")]
    assert [list(device_share(["3", "5"], rank, 2)) for rank in (0, 1)] == [["3"], ["5"]]
    assert [list(device_share(["3"], rank, 2)) for rank in (0, 1)] == [[], []]


def test_ranks_end_before_torchrun_kills_them() -> None:
    assert torchrun.GRACE < 30
