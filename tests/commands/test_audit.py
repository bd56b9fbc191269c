"""What `draftline audit` takes its words for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from draftline.audit.report import AuditReport
from draftline.commands.audit import audit_words
from draftline.errors import ConfigError
from draftline.options import AuditCommand, RunFlags, SlotLayout


def _audit_words(*words: str, recipe: str | None = None, **flags: Any) -> AuditReport:
    given = AuditCommand(words=words, flags=RunFlags(**flags), recipe=recipe, select=("LOS003",), layout=SlotLayout())
    return audit_words(given)


def test_words_are_settings_of_a_run_to_come() -> None:
    report = _audit_words("loss.weights=decay", "loss.decay_gamma=7", target="tiny", recipe="quickstart")
    assert [finding.code for finding in report.findings] == ["LOS003"]


@pytest.mark.parametrize(
    ("words", "flags", "said"),
    [
        (["{folder}", "loss.decay_gamma=7"], {}, "leave out loss.decay_gamma=7, or the folder"),
        (["{folder}", "other"], {}, "leave out other"),
        (["{folder}"], {"data": "d"}, 'leave out data.path="d"'),
        (["{folder}"], {}, "does not say where its target is: give --target"),
        (["loss.decay_gamma=7"], {}, "nothing says what to train for"),
    ],
)
def test_words_that_do_not_belong_together_are_refused(
    tmp_path: Path, words: list[str], flags: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(said)):
        _audit_words(*(word.format(folder=tmp_path) for word in words), **flags)


def test_a_run_is_audited_on_its_own_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("draftline.audit.report.audit_run_folder", lambda _place, target, *_: asked.append(target))
    (tmp_path / "state.json").write_text("{}")
    _audit_words(str(tmp_path))
    assert asked == [None]
