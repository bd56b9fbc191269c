"""Writes a prepared data set so that nothing done is lost and nothing half done is taken for complete.

Samples are appended to flat files in `OUT/partial`; every few thousand rows the files are synced and a state is written
beside them. Going on after an interruption means to cut the files back to that state. At the end the files move into
OUT, and `meta.json`, without which OUT counts as incomplete, is written last.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from draftline.data.dataset import (
    FORMAT,
    IDS_FILE,
    MASK_FILE,
    META_FILE,
    REPORT_FILE,
    ROW,
    ROWS_FILE,
    TOKENIZER_KEY,
)
from draftline.data.heldout import HeldoutPrompts
from draftline.errors import DataError, StorageError

PROMPTS_FILE = "prompts.jsonl"
_ROWS_BIN, _STATE = "rows.bin", "state.json"
SEEN_ROWS, SEEN_ANSWERS = "seen_rows.bin", "seen_answers.bin"
"""Hashes that recognise a row, or an answer, that occurred before."""
_FILES = (IDS_FILE, MASK_FILE, _ROWS_BIN, SEEN_ROWS, SEEN_ANSWERS)
OWN_FILES = frozenset(
    {IDS_FILE, MASK_FILE, ROWS_FILE, REPORT_FILE, META_FILE, "partial", "heldout", "answers.jsonl", "tokenizer"}
)
"""What a folder may hold without being somebody else's."""


class DatasetWriter:
    """Appends samples to `out/partial`, and completes `out` from them."""

    def __init__(self, out: Path, key: str) -> None:
        """Begin, or go on where a run with the same `key` stopped; the state of that run is `self.state`."""
        self.out, self.key, self._partial = out, key, out / "partial"
        if out.exists() and not out.is_dir():
            raise DataError(f"{out} is a file; give a folder with --out")
        self._partial.mkdir(parents=True, exist_ok=True)
        self.state = self._load_state()
        self._length = 0
        self._files: dict[str, BinaryIO] = {}
        for name in _FILES:
            path = self._partial / name
            path.touch()
            os.truncate(path, self.state["sizes"][name] if self.state else 0)
            self._files[name] = path.open("ab")
        self._length = (self._partial / MASK_FILE).stat().st_size

    def _load_state(self) -> dict[str, Any] | None:
        path = self._partial / _STATE
        state: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return state if state is not None and state["key"] == self.key else None

    def seen(self, name: str) -> set[int]:
        """The hashes (`SEEN_ROWS` or `SEEN_ANSWERS`) that an interrupted run saw."""
        return set(np.fromfile(self._partial / name, dtype=np.uint64).tolist())

    def add_seen(self, name: str, content_hash: int) -> None:
        """Keep a hash for going on after an interruption."""
        self._write(name, np.uint64(content_hash).tobytes())

    def add(
        self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], source: int, line: int, prompt_hash: int
    ) -> None:
        """Append one sample."""
        row = np.array(
            (self._length, len(input_ids), int(loss_mask.sum()), source, line, prompt_hash),
            dtype=ROW,
        )
        self._write(IDS_FILE, input_ids.tobytes())
        self._write(MASK_FILE, loss_mask.astype(np.uint8).tobytes())
        self._write(_ROWS_BIN, row.tobytes())
        self._length += len(input_ids)

    def _write(self, name: str, content: bytes) -> None:
        try:
            self._files[name].write(content)
        except OSError as error:
            raise StorageError(
                f"cannot write to {self._partial}: {error.strerror}; free some space and go on"
            ) from error

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Make everything so far survive; `state` is what the caller needs to go on."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: (self._partial / name).stat().st_size for name in _FILES}
        write_json(self._partial / _STATE, {**state, "key": self.key, "sizes": sizes})

    def complete(self, heldout: HeldoutPrompts, meta: dict[str, Any], report: dict[str, Any]) -> None:
        """Turn the appended files into a data set at `out`, and one of the held-out rows at `out/heldout`.

        The files of `meta["tokenizer"]` must be in `out` already.
        """
        for file in self._files.values():
            file.close()
        rows = np.fromfile(self._partial / _ROWS_BIN, dtype=ROW)
        held = np.isin(rows["prompt_hash"], np.array(heldout.hashes, dtype=np.uint64))
        (self.out / META_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.out / "heldout", ignore_errors=True)
        if held.any():
            subset = {**meta, TOKENIZER_KEY: f"../{meta[TOKENIZER_KEY]}", "fingerprint": f"{self.key}-heldout"}
            self._write_subset(rows[held], self.out / "heldout", subset, report)
            (self.out / "heldout" / PROMPTS_FILE).write_text(heldout.as_jsonl(), encoding="utf-8")
        for name in (IDS_FILE, MASK_FILE):
            os.replace(self._partial / name, self.out / name)
        _finish(self.out, rows[~held], {**meta, "fingerprint": f"{self.key}-train"}, report)
        shutil.rmtree(self._partial)

    def _write_subset(self, rows: NDArray[np.void], folder: Path, meta: dict[str, Any], report: dict[str, Any]) -> None:
        folder.mkdir()
        ids = np.memmap(self._partial / IDS_FILE, dtype=np.int32, mode="r")
        mask = np.memmap(self._partial / MASK_FILE, dtype=np.uint8, mode="r")
        where = np.concatenate([np.arange(r["start"], r["start"] + r["length"]) for r in rows])
        ids[where].tofile(folder / IDS_FILE)
        mask[where].tofile(folder / MASK_FILE)
        moved = rows.copy()
        moved["start"] = np.concatenate([[0], np.cumsum(rows["length"].astype(np.int64))[:-1]])
        _finish(folder, moved, meta, report)

    def close(self) -> None:
        """Close the files of an interrupted run; its last checkpoint stays."""
        for file in self._files.values():
            file.close()


def _finish(folder: Path, rows: NDArray[np.void], meta: dict[str, Any], report: dict[str, Any]) -> None:
    np.save(folder / ROWS_FILE, rows)
    write_json(folder / REPORT_FILE, report)
    write_json(folder / META_FILE, {"format": FORMAT, **meta})


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a crash leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
