"""What `draftline evaluate` refuses in one line, before a target is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from draftline import cli
from draftline.commands.evaluate import evaluate_drafter
from draftline.errors import ConfigError
from draftline.options import parse_template_options


@pytest.fixture(autouse=True)
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.targets.model.load_target", lambda _config: pytest.fail("loaded"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--temperature", "-1"], "temperature -1.0 is not a temperature"),
        (["--top-p", "0"], "top_p 0.0 is not a probability"),
        (["--top-p", "1.5"], "top_p 1.5 is not a probability"),
        (["--top-k", "-2"], "top_k -2 is negative"),
        (["--task", "gms8k"], "did you mean gsm8k"),
        (["--template-option", "thinking"], "write KEY=VALUE"),
        ([], "2 of 3 prompts have no text in a user turn, the first is"),
        (["--prompts", "x.jsonl", "--prompts", "x.jsonl"], "x.jsonl is named twice"),
        (["--task", "gsm8k", "--task", "gsm8k"], "gsm8k is named twice"),
        (["--concurrency", "4"], "--concurrency is for a server"),
        (["--model", "m"], "--model is for a server"),
        (["--fast", "--temperature", "1"], "--fast counts along greedy answers"),
        (["--batch-size", "4"], "--batch-size is of --fast"),
    ],
)
def test_bad_words_are_one_line_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    rows = ['{"turns": ["Hi"]}', '{"turns": ["Hi", "  "]}', '{"prompt": ""}']
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    given = ["evaluate", "--target", "tiny", "--draft", "d", "--prompts", str(tmp_path / "prompts.jsonl")]
    assert cli.run([*given, *words]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--draft", "d"], "give --prompts FILE or --task NAME"),
        (["--base-url", "http://x", "--temperature", "1"], "a server is measured greedily"),
        (["--base-url", "http://x", "--fast"], "--fast is for measuring in process"),
    ],
)
def test_words_that_do_not_go_together(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert cli.run(["evaluate", "--target", "tiny", *words]) == 2
    assert line in capsys.readouterr().err


def test_template_options_are_yaml_values() -> None:
    assert parse_template_options(["enable_thinking=false", "n=3", "style=a b"]) == {
        "enable_thinking": False,
        "n": 3,
        "style": "a b",
    }
    for word in ("tokenize=false", "=1", "a b=1"):
        with pytest.raises(ConfigError, match="KEY=VALUE"):
            parse_template_options([word])


@dataclass(frozen=True)
class Measured:
    """As much of a result as `evaluate_drafter` looks at."""

    drafter: str | None = None
    warnings: tuple[str, ...] = ()


def test_a_result_names_the_checkpoint_that_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.evaluate.benchmark.evaluate_prompts", lambda *_, **__: Measured())
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    (tmp_path / "run" / "best").symlink_to("checkpoints/step-000002")
    given: list[tuple[Path | None, str | None]] = [
        (Path("run"), "run/checkpoints/step-000002"),
        (Path("run/best"), "run/checkpoints/step-000002"),
        (tmp_path / "run", str(step)),
        (Path("exported"), "exported"),
        (None, None),
    ]
    for folder, expected in given:
        found: Any = evaluate_drafter(*cast(Any, (None, None, [], None, None)), folder)
        assert found.drafter == expected
