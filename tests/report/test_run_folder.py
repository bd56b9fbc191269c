"""What the folder of a run says, as rows of tables."""

from __future__ import annotations

import json
from pathlib import Path

from draftline.report.run_folder import configuration, duration, environment, sessions
from draftline.train.run_folder import RunFolder
from tests.report.synthetic_run import write_run


def test_settings_that_differ_from_the_published_recipe_are_shown_beside_it(tmp_path: Path) -> None:
    changed, settings = configuration(RunFolder.open(write_run(tmp_path / "run", lines=1)))
    assert ["optim.clip_norm", "0.5", "1.0"] in changed
    assert ["optim.clip_norm", "0.5"] in settings
    assert not {"optim.learning_rate", "target.name"} & {row[0] for row in changed}


def test_environment_names_code_versions_and_machine(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    rows = dict(environment(RunFolder.open(folder)))
    assert rows["code"] == "0123abcd, with changes ffeeddccbbaa"
    assert rows["versions"] == "draftline 0.1.0\ntorch 2.13.0"
    assert sessions(RunFolder.open(folder)) == [["2026-01-01T00:00:00+00:00", "0", "? / ?", "draftline train"]]
    (folder / "run.json").write_text(json.dumps({}))
    assert environment(RunFolder.open(folder)) == []


def test_durations_have_two_units() -> None:
    assert [duration(s) for s in (0.5, 59.7, 61, 3600, 93784)] == [
        "0.5 s",
        "1 min 0 s",
        "1 min 1 s",
        "1 h 0 min",
        "1 d 2 h",
    ]
