"""The whole job, interrupted and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.commands import quickstart
from draftline.config import load_run_config, quickstart_recipe
from draftline.errors import ExportError, StorageError
from draftline.formats import exporting
from tests.commands.test_prepare import PROMPTS


def test_an_interrupted_quickstart_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_run_config(None, ["train.max_steps=2"], quickstart_recipe())
    prompts = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(prompts)
    monkeypatch.setattr("draftline.config.quickstart_recipe", lambda: recipe)
    monkeypatch.setattr(quickstart, "embedded_prompts", lambda: tmp_path / "prompts.jsonl")
    monkeypatch.setattr(quickstart, "HELDOUT_PROMPTS", 2)
    monkeypatch.setattr(quickstart, "LONGEST_ANSWER", 6)
    original, out = exporting.export_drafter, tmp_path / "out"

    def fail(**words: Any) -> Any:
        if words["out"] != out / "drafter":  # the audit exports, too
            return original(**words)
        raise ExportError("interrupted")

    monkeypatch.setattr(exporting, "export_drafter", fail)
    with pytest.raises(ExportError):
        quickstart.run_quickstart(out)
    monkeypatch.setattr(exporting, "export_drafter", original)
    done = [out / "target" / "config.json", out / "data" / "answers.jsonl", out / "run" / "last" / "state.json"]
    before = [path.stat().st_mtime_ns for path in done]
    for _ in range(2):
        assert quickstart.run_quickstart(out)[1].prompts == 2
    assert [path.stat().st_mtime_ns for path in done] == before
    (out / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="is not a quickstart"):
        quickstart.run_quickstart(out)
