"""From fields to options and back: names, defaults, bounds, help, and records inside a record."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from pydantic import Field

from draftline import cli
from draftline.commands.options import from_words
from draftline.config import Flag, RunConfig, Settings, flatten, load_run_config
from draftline.errors import ConfigError, DraftlineError
from draftline.options import RunFlags, Sets, TrainFlags, Word


class Inner(Settings):
    depth: int = Field(3, ge=1, le=9)
    """How deep."""
    careful: bool = True
    """Do not look twice."""
    rate: float = Field(0.5, gt=0)
    """How fast."""
    unseen: Annotated[int, Flag(None)] = 4
    """Of no command."""


class Outer(Settings):
    place: Annotated[Path, Word("PLACE")]
    """Where."""
    name: Annotated[str, Flag("--called")]
    """What it is called."""
    inner: Inner
    ways: tuple[str, ...] = ()
    """How; may be
    repeated."""
    sure: bool | None = None
    """If it is known."""
    loud: bool = False
    """Say more."""


def called(*words: str) -> Outer:
    """The record that a command gets for words."""
    seen: list[Outer] = []

    def command(options: Outer) -> None:
        """Do it."""
        seen.append(options)

    command.__annotations__["options"] = Outer
    app = typer.Typer(add_completion=False)
    app.command()(from_words(command))
    app(list(words), standalone_mode=False)
    return seen[0]


def test_what_is_not_given_is_left_to_the_record() -> None:
    assert called("here", "--called", "x") == Outer(place=Path("here"), name="x", inner=Inner())


def test_every_word_reaches_its_field() -> None:
    words = [
        "here",
        "--called",
        "x",
        "--depth",
        "5",
        "--no-careful",
        "--ways",
        "a",
        "--ways",
        "b",
        "--no-sure",
        "--loud",
    ]
    expected = Outer(
        place=Path("here"), name="x", inner=Inner(depth=5, careful=False), ways=("a", "b"), sure=False, loud=True
    )
    assert called(*words, "--loud") == expected
    assert called("here", "--called", "x", "--sure").sure is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["here"], "--called"),
        (["--called", "x"], "PLACE"),
        (["here", "--called", "x", "--depth", "10"], "--depth': Input should be less than or equal to 9"),
        (["here", "--called", "x", "--unseen", "1"], "No such option: --unseen"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(typer.TyperException) as refused:
        called(*words)
    assert said in str(refused.value) + refused.value.format_message()


def test_what_the_command_line_cannot_check_the_record_refuses() -> None:
    with pytest.raises(ConfigError, match=r"rate = -1\.0: Input should be greater than 0"):
        called("here", "--called", "x", "--rate", "-1")


def test_the_help_is_made_of_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    called_help = re.sub(r"\s+", " ", _help(capsys))
    for text in (
        "--called <str> What it is called. [required]",
        "--depth <int range> [1<=x<=9] How deep. [default: 3]",
        "--ways <list[str]> How; may be repeated.",
        "--loud <bool> Say more. ",
    ):
        assert text in called_help
    assert "unseen" not in called_help
    assert "--careful" not in called_help


def _help(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "160")
        with pytest.raises(IndexError):
            called("--help")
    return capsys.readouterr().out


def records() -> dict[str, type[Settings]]:
    """The record of options of every command."""
    return {name: get_type_hints(cli.command(name))["options"] for name in cli.COMMANDS}


def options_of(record: type[Settings]) -> list[tuple[str, Any]]:
    """All fields, those of records inside the record among them."""
    found = []
    for name, field in record.model_fields.items():
        kind: Any = field.annotation
        inner = isinstance(kind, type) and issubclass(kind, Settings)
        found += options_of(kind) if inner else [(name, field)]
    return found


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_option_says_what_it_is_and_has_a_name_of_its_own(name: str) -> None:
    options = [(key, field) for key, field in options_of(records()[name]) if Flag(None) not in field.metadata]
    assert [key for key, field in options if not field.description] == []
    names = [key for key, _ in options]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("flags", [RunFlags, TrainFlags])
def test_an_option_of_a_run_sets_a_setting_that_exists(flags: type[RunFlags]) -> None:
    known = flatten(RunConfig().model_dump(mode="json"))
    for field in flags.model_fields.values():
        (mark,) = (mark for mark in field.metadata if isinstance(mark, Sets))
        assert set(mark.keys) <= known.keys()
    given = TrainFlags(target="nö", data=Path("d"), device="cuda:1", trust_remote_code=True, init_from=Path("i"))
    config = load_run_config(None, given.words())
    assert (config.target.name, config.data.path, config.drafter.init_from) == ("nö", Path("d"), Path("i"))
    assert (config.target.device, config.train.device, config.target.trust_remote_code) == ("cuda:1", "cuda:1", True)
    assert RunFlags().words() == []


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_shows_every_option_whole_and_grouped(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    app = typer.Typer(add_completion=False)
    app.command(name)(from_words(cli.command(name)))
    for parameter in typer.main.get_command(app).params:
        assert all(f"{word} " in shown for word in parameter.opts if word.startswith("--")), parameter.opts
    assert sum(group in shown for group in (f"{title}:" for title in ("What", "How", "Where results go"))) >= 1


def test_faults_of_a_record_are_errors_of_ours() -> None:
    """What a validator of a record raises on purpose is not wrapped by the library."""
    with pytest.raises(DraftlineError, match="is not a temperature"):
        from_words(cli.command("generate"))(
            **{name: None for name, _ in options_of(records()["generate"])}
            | {"name": "tiny", "draft": "d", "words": ["x"], "temperature": -1.0}
        )
