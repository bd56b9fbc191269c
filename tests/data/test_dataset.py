"""A data set that was stopped anywhere, and then prepared by the same command, is the one of an undisturbed run."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.data.dataset import FORMAT, PreparedDataset
from draftline.data.prepare import prepare
from draftline.errors import DataError, StorageError
from draftline.options import PrepareOptions
from tests.data.chat_tokenizers import CHATML, make_tokenizer
from tests.data.test_prepare import row, write

ROWS = [row(f"question {n % 9}", f"answer {n}") for n in range(24)]
OPTIONS = PrepareOptions(heldout=3)
_CHANGING = frozenset({"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"})


class Killed(BaseException):
    """Stands for a process that is gone: nothing catches it."""


class FileFaults:
    """Counts the operations that change files below a folder, and fails one of them, and all after it.

    Python reports these operations to audit hooks, which cannot be removed, so there is one hook for all tests.
    """

    def __init__(self) -> None:
        self.folder, self.count, self.fail_at, self.fault = "", 0, 0, Killed
        self.failed = False

    def watch(self, folder: Path, fail_at: int, fault: type[BaseException]) -> None:
        self.folder, self.count, self.fail_at, self.fault, self.failed = str(folder), 0, fail_at, fault, False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.folder or not arguments or not str(arguments[0]).startswith(self.folder):
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event not in _CHANGING and not writes:
            return
        self.count += 1
        if self.fail_at and self.count >= self.fail_at:
            self.failed = True
            raise self.fault(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def faults() -> FileFaults:
    import sys

    found = FileFaults()
    sys.addaudithook(found)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize(("fault", "raised"), [(Killed, Killed), (OSError, StorageError)])
def test_failure_at_any_file_operation_and_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: FileFaults,
    fault: type[BaseException],
    raised: type[BaseException],
) -> None:
    # Whoever edits the sources while this runs would change the key of the data.
    monkeypatch.setattr("draftline.data.prepare._code_hash", lambda: "code")
    data, tokenizer = write(tmp_path / "data.jsonl", ROWS), make_tokenizer(CHATML)

    def attempt(name: str) -> dict[str, object]:
        return prepare(tokenizer, [data], tmp_path / name, OPTIONS)

    report, number = attempt("whole"), 0
    expected = contents(tmp_path / "whole")
    while True:
        number += 1
        out = tmp_path / f"out{number}"
        faults.watch(out, number, fault)
        try:
            attempt(out.name)
        except raised:
            pass
        finally:
            faults.folder = ""
        if not faults.failed:
            break
        assert attempt(out.name) == report, number
        assert contents(out) == expected, number
    assert number > 40


def test_a_state_of_files_that_are_gone_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, tokenizer = write(tmp_path / "data.jsonl", ROWS), make_tokenizer(CHATML)
    prepare(tokenizer, [data], tmp_path / "whole", OPTIONS)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftline.data.dataset.DatasetWriter.complete", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(tokenizer, [data], tmp_path / "out", OPTIONS)
    monkeypatch.undo()
    (tmp_path / "out/partial/input_ids.bin").unlink()
    prepare(tokenizer, [data], tmp_path / "out", OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_refusal_leaves_no_trace(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", [row("a"), {"messages": []}])
    with pytest.raises(DataError, match="rows are dropped"):
        prepare(make_tokenizer(CHATML), [data], tmp_path / "out", PrepareOptions(strict=True))
    assert not (tmp_path / "out").exists()


def test_other_data_in_the_folder_is_kept_and_another_format_replaced(tmp_path: Path) -> None:
    data, tokenizer, out = write(tmp_path / "data.jsonl", ROWS), make_tokenizer(CHATML), tmp_path / "out"
    prepare(tokenizer, [data], out, OPTIONS)
    before = contents(out)
    with pytest.raises(DataError, match="with other options"):
        prepare(tokenizer, [data], out, PrepareOptions())
    assert contents(out) == before
    meta = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps({**meta, "format": FORMAT + 1}))
    prepare(tokenizer, [data], out, PrepareOptions())
    assert len(PreparedDataset.open(out)) == len(ROWS)
    assert not (out / "heldout").exists()


def test_out_that_cannot_be_a_folder_is_one_line(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", ROWS)
    (tmp_path / "file").write_text("mine")
    errors: list[tuple[str, type[Exception], Callable[[str], bool]]] = [
        ("file", DataError, lambda line: "is a file" in line),
        ("file/below", StorageError, lambda line: "cannot be written" in line),
    ]
    for name, kind, fits in errors:
        with pytest.raises(kind) as caught:
            prepare(make_tokenizer(CHATML), [data], tmp_path / name, OPTIONS)
        assert fits(str(caught.value))
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
