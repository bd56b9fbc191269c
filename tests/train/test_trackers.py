"""What reaches trackers, with stand-ins and, where it is installed, with the library itself offline; and that none of
their failures reaches a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftline.train.trackers import TRACKERS, Trackers
from tests.run.small_run import read_lines, small_run

ALL = tuple(TRACKERS)


class Library(ModuleType):
    """A library with the functions of all three; remembers what is called, and fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("library")
        self.calls: list[tuple[str, Any]] = []
        for name in ("init", "log", "finish", "set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
            setattr(self, name, self._function(name, fails))

    def _function(self, name: str, fails: str) -> Any:
        def call(*args: Any, **named: Any) -> Library:
            self.calls.append((name, (args, named)))
            if name == fails:
                raise RuntimeError(f"no\n{name}")
            return self

        return call


def with_library(monkeypatch: pytest.MonkeyPatch, name: str, fails: str = "") -> Library:
    library = Library(fails)
    monkeypatch.setitem(sys.modules, name, library)
    return library


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_every_line_reaches_the_library(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, said = with_library(monkeypatch, name), list[str]()
    trackers = Trackers((name,), tmp_path / "run", 3, {"train.seed": 7}, said.append)
    trackers.log({"train/loss": 0.5}, 3)
    trackers.close()
    sent = [given for call, given in library.calls if call in ("log", "log_metrics")]
    assert sent == [(({"train/loss": 0.5},), {"step": 3})]
    assert library.calls[-1][0] in ("finish", "end_run")
    assert "train.seed" in str(library.calls)
    assert said == []


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_one_line(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, said = with_library(monkeypatch, "wandb", fails), list[str]()
    trackers = Trackers(("wandb",), tmp_path, 1, {}, said.append)
    for step in (1, 2):
        trackers.log({"train/loss": 0.5}, step)
    trackers.close()
    assert said == [f"warning: wandb failed, the run goes on without it: no {fails}"]
    assert [call for call, _ in library.calls].count(fails) == 1


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    said: list[str] = []
    Trackers(("mlflow",), tmp_path, 1, {}, said.append).log({}, 1)
    assert said == ["warning: mlflow is not installed, the run goes on without it: pip install 'draftline[mlflow]'"]


def test_a_run_is_the_same_with_trackers_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, fails in (("wandb", "log"), ("mlflow", "set_experiment"), ("trackio", "finish")):
        with_library(monkeypatch, name, fails)
    small_run(tmp_path / "plain", "train.trackers=[]", "train.epochs=1")
    small_run(tmp_path / "tracked", f"train.trackers={json.dumps(ALL)}", "train.epochs=1")
    assert read_lines(tmp_path / "plain") == read_lines(tmp_path / "tracked")
    assert capsys.readouterr().err.count("failed, the run goes on without it") == 3
    assert not (tmp_path / "plain" / "tensorboard").exists()
    assert (tmp_path / "tracked" / "tensorboard").exists()


def offline(name: Any, folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Two lines by the library itself; what was warned of."""
    pytest.importorskip(name, reason=f"pip install 'draftline[{name}]' to test it")
    said: list[str] = []
    folder.mkdir()
    trackers = Trackers((name,), folder, 1, settings, said.append)
    for step in (1, 2):
        trackers.log({"train/loss": 1.0 / step}, step)
    trackers.close()
    return said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert offline("wandb", tmp_path / "run", {"train.seed": 1}) == []
    assert list((tmp_path / "run").rglob("run-*.wandb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert offline("mlflow", tmp_path / "run", {"train.seed": 1}) == []
    assert (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert offline("trackio", tmp_path / "run", {"train.seed": 1}) == []
    assert list((tmp_path / "trackio").rglob("*.db"))
