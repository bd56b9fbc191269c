"""One object opens a run folder: its state, its damage, what it refuses."""

from __future__ import annotations

import ast
import json
import os
import shutil
import time
from pathlib import Path

import pytest

import draftline
from draftline import cli
from draftline.data.dataset import PreparedDataset
from draftline.data.prepare import prepare
from draftline.errors import CheckpointError, DataError
from draftline.options import PrepareOptions
from draftline.train import run_folder
from draftline.train.run_folder import RunFolder
from tests.data.chat_tokenizers import CHATML, make_tokenizer
from tests.data.test_prepare import row, write
from tests.report.synthetic_run import write_run


@pytest.mark.parametrize(
    ("lines", "total", "age", "state"),
    [
        (20, 20, 0, "finished"),
        (20, 20, 1e6, "finished"),
        (20, 40, 0, "running"),
        (20, 40, 63, "running"),  # lines come every 1.5 s: a minute and three pauses have not passed
        (20, 40, 66, "stopped"),
        (0, 40, 0, "started"),
        (0, 40, 61, "stopped"),
    ],
)
def test_a_run_is_going_on_as_long_as_it_writes(tmp_path: Path, lines: int, total: int, age: float, state: str) -> None:
    folder = write_run(tmp_path / "run", lines=lines, total=total)
    then = time.time() - age
    os.utime(folder / "metrics.jsonl", (then, then))
    assert RunFolder.open(folder).state == state


def test_torn_lines_are_counted_and_end_what_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=10)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:6]) + lines[6][:40] + "\n" + "".join(lines[7:]))
    (folder / "speed.jsonl").write_text("")
    run = RunFolder.open(folder)
    assert run.step == 6
    assert run.metrics["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6]
    torn, empty = run.damage
    assert torn.startswith("6 of the 10 lines of metrics.jsonl are whole; line 7 is torn, and the 3 behind it")
    assert empty.startswith("speed.jsonl is missing or empty")


def test_a_whole_run_has_no_damage_and_the_sizes_of_its_last_line(tmp_path: Path) -> None:
    run = RunFolder.open(write_run(tmp_path / "run", lines=10, every=5))
    assert (run.damage, run.step, run.total_steps, run.seconds) == ([], 50, 50, 75.0)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            CheckpointError, match=r"is not a run .*: give the folder that `draftline train --out` wrote"
        ):
            RunFolder.open(folder)


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b'{"data": 3, "target": "x"}', b'{"data": null}'])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as error:
        RunFolder.open(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("words", [["report"], ["compare", "--metric", "loss"]])
@pytest.mark.parametrize("name", ["config.yaml", "run.json", "audit.json", "metrics.jsonl", "speed.jsonl"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, None])
def test_a_command_names_the_damaged_file_or_says_what_is_left_out(
    tmp_path: Path, words: list[str], name: str, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """None: a folder where a file should be."""
    whole, folder = write_run(tmp_path / "whole", lines=20), write_run(tmp_path / "run", lines=20)
    RunFolder(folder).write_audit({"findings": [], "checks": []})
    (folder / name).unlink()
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(content)
    status = cli.run([*words[:1], str(folder), *([str(whole)] if words[0] == "compare" else []), *words[1:]])
    out, err = capsys.readouterr()
    unread = ["config.yaml", "audit.json", "speed.jsonl"] if words[0] == "compare" else []
    if name in unread:
        assert status == 0
    elif name.endswith(".jsonl") and content is not None and words[0] == "report":
        assert status == 0
        assert name in (folder / "report.html").read_text(encoding="utf-8")
    else:
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert str(folder / name) in err


def test_the_data_of_a_run_are_those_it_was_trained_on(tmp_path: Path) -> None:
    rows = write(tmp_path / "data.jsonl", [row(f"question {n}", f"answer {n}") for n in range(12)])
    tokenizer, place = make_tokenizer(CHATML), tmp_path / "data"
    prepare(tokenizer, [rows], place, PrepareOptions(heldout=3))
    folder = write_run(tmp_path / "run", lines=1)
    identity = json.loads((folder / "run.json").read_text())
    with pytest.raises(DataError, match="holds other data now"):
        RunFolder(folder).data()
    prints = [PreparedDataset.open(each).fingerprint for each in (place, place / "heldout")]
    identity["data"]["fingerprint"] = "+".join(prints)
    (folder / "run.json").write_text(json.dumps(identity))
    data = RunFolder(folder).data()
    assert (len(data.training_ids), len(data.heldout_ids), data.fingerprint) == (9, 3, "+".join(prints))
    shutil.rmtree(place / "heldout")  # then training data would be held out
    with pytest.raises(DataError, match="holds other data now"):
        RunFolder(folder).data()
    (place / "meta.json").unlink()
    with pytest.raises(DataError, match="not a complete prepared data set"):
        RunFolder(folder).data()
    with pytest.raises(CheckpointError, match="is not a run"):
        RunFolder(tmp_path / "nowhere").data()


PACKAGE = Path(draftline.__file__).parent
NAMES = {"config.yaml", "run.json", "audit.json", "metrics.jsonl", "speed.jsonl", "tensorboard", "checkpoints"}
"""Names in a run folder that mean nothing elsewhere: no other file may hold one as a text of its own."""
SHARED_NAMES = {"best", "last", "state.json"}
"""Words of other things too: no other file may make a path of one. Prepared data has a state.json of its own."""
CONSTANTS = {name for name in vars(run_folder) if name.endswith(("_FILE", "_FOLDER"))}


def spelled(source: str) -> set[str]:
    """Names of a run folder that a source writes by hand, and constants for them of which it makes a path."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    joined = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
    parts = {str(node.value) for node in joined if isinstance(node, ast.Constant)}
    constants = {node.id for node in joined if isinstance(node, ast.Name)} & CONSTANTS
    return {text for text in texts if NAMES & set(text.split("/"))} | (parts & SHARED_NAMES) | constants


@pytest.mark.parametrize(
    "source", ['x / "best"', '(a / "run.json").read_text()', 'x.glob("checkpoints/*")', "folder / METRICS_FILE"]
)
def test_a_name_that_is_written_by_hand_is_seen(source: str) -> None:
    assert spelled(source)
    assert not spelled('"what run.json says", run.checkpoint("best"), f"no {METRICS_FILE} yet", x / "config.json"')


def test_one_file_opens_a_run_folder() -> None:
    sources = {path.relative_to(PACKAGE.parent): path for path in PACKAGE.rglob("*.py")}
    sources |= {path.relative_to(PACKAGE.parent): path for path in (PACKAGE.parent / "benchmarks").glob("*.py")}
    found = {str(name): spelled(path.read_text(encoding="utf-8")) for name, path in sources.items()}
    assert found.pop("draftline/train/run_folder.py") >= NAMES
    assert found.pop("draftline/train/checkpoint.py") == {"STATE_FILE"}, "one of the four files of a checkpoint"
    for name in ("draftline/config.py", "draftline/train/trackers.py"):
        assert found.pop(name) == {"tensorboard"}, "the name of a tracker"
    for name in ("draftline/audit/life.py", "draftline/audit/whole.py"):
        assert found.pop(name) == {"tensorboard", "SPEED_FILE"}, "the audit plants lines in the records of a life"
    assert found.pop("benchmarks/plan.py") == {"last"}
    assert {name: names for name, names in found.items() if names} == {}
