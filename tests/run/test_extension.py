"""A finished run that goes on: the same as a longer one in one go, bit for bit, also where it is killed meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from draftline.errors import ConfigError, StorageError
from draftline.report.document import report_page
from draftline.train.run_folder import RunFolder
from tests.run.small_run import assert_same_run, read_lines, small_run
from tests.run.test_interruption import die_at_step, exit_status, start

TWO = ("train.extensions=[2]",)


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    assert exit_status(start(out, TWO)) == 0
    return out


@pytest.mark.parametrize("moment", [18, 20, 24])  # before its first checkpoint, right after it, later
def test_killed_in_an_extension_and_continued_it_is_the_longer_run(
    in_one_go: Path, tmp_path: Path, moment: int
) -> None:
    out = tmp_path / "run"
    assert exit_status(start(out)) == 0
    assert exit_status(start(out, TWO, resume=True, prepare=die_at_step, moment=moment)) == -signal.SIGKILL
    assert exit_status(start(out, TWO, resume=True)) == 0
    assert_same_run(in_one_go, out)


def test_the_lines_of_the_finished_run_stay_and_the_seam_shows(in_one_go: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    small_run(alone)
    before, lines = read_lines(alone), read_lines(in_one_go)
    assert lines[: len(before)] == before
    assert [line.get("extension") for line in lines] == [None] * len(before) + [1] * (len(lines) - len(before))
    folder = RunFolder(in_one_go)
    assert folder.seams == (18,)
    assert folder.total_steps == lines[-1]["step"] == 29
    rates = {line["step"]: line["learning_rate"] for line in lines}
    assert rates[18] == 0.0
    assert max(rates[step] for step in rates if step > 18) > 0.004  # a cosine rises again
    page = report_page(in_one_go)
    assert "extended after 18" in page
    assert "The run was extended after step 18." in page


def test_extended_twice_it_has_two_seams(tmp_path: Path) -> None:
    words = ("train.epochs=1", "optim.schedule=wsd")
    for extensions in ("[]", "[1]", "[1,1]"):
        small_run(tmp_path / "run", *words, f"train.extensions={extensions}", resume=True)
    small_run(tmp_path / "whole", *words, "train.extensions=[1,1]")
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    assert len(RunFolder(tmp_path / "run").seams) == 2


def test_what_cannot_be_extended_is_refused_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert exit_status(start(out, prepare=die_at_step, moment=12)) == -signal.SIGKILL
    with pytest.raises(ConfigError, match=r"has done 10 of 18 steps: finish it with --resume, then --extend"):
        small_run(out, *TWO, resume=True)
    with pytest.raises(StorageError, match=r"is not empty: add --resume"):
        small_run(out, *TWO)
    finished = tmp_path / "finished"
    small_run(finished, *TWO)
    with pytest.raises(ConfigError, match=r"optim.learning_rate is 0.01 in the run of"):
        small_run(finished, "train.extensions=[2,1]", "optim.learning_rate=0.1", resume=True)
    with pytest.raises(ConfigError, match=r"train.extensions is \[2\] in the run of .* and \[1\] now"):
        small_run(finished, "train.extensions=[1]", resume=True)
