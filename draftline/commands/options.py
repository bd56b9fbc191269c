"""From a record of options to the parameters that typer reads, and from what typer read back to the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand, TyperOption

from draftline.config import Flag, Settings, TargetConfig, target_folder
from draftline.errors import ConfigError
from draftline.options import Read, RunFlags, ServerOptions, Word, Written
from draftline.storage import new_json, new_page, new_pictures, unused_folder


def new_result(path: Path | None) -> Path | None:
    """A place for a JSON file, which is not that of a run."""
    from draftline.train.run_folder import IDENTITY_FILE  # slow to load, and needed late

    return new_json(path, {IDENTITY_FILE})


PLACES: dict[str, Callable[[Any], Any]] = {
    "folder": unused_folder,
    "json": new_result,
    "page": new_page,
    "pictures": new_pictures,
}
"""How each kind of place that is written is checked."""


def check_read(kind: str, place: Any) -> None:
    """Refuse what is to be read if it cannot be what it should be, before torch is loaded; none is none."""
    from draftline.data.accounting import read_descriptions
    from draftline.formats.folder import check_drafter, check_proof

    checks: dict[str, Callable[[Any], object]] = {
        "target": target_folder,
        "prepared": read_descriptions,
        "drafter": check_drafter,
        "proof": check_proof,
    }
    if place is not None:
        checks[kind](place)


WHAT, HOW, WHERE = "What", "How", "Where results go"
"""Under which the help lists options, in this order."""
_SAYS_WHAT = (TargetConfig, RunFlags, ServerOptions)


class GroupedHelp(TyperCommand):
    """A command whose help shows every option's name whole, however narrow the terminal, group by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], WHAT: [], HOW: [], WHERE: [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            panel = parameter.rich_help_panel if isinstance(parameter, TyperOption) else "Arguments"
            if record is not None:
                groups[panel or "Options"].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


Options = TypeVar("Options", bound=Settings)
Mark = TypeVar("Mark")


def from_words(command: Callable[[Options], int | None]) -> Callable[..., int | None]:
    """A command whose parameters are the fields of its record, which it gets filled.

    Args:
        command: takes one record of `draftline.options`; its docstring is the help of the command.
    """
    record = get_type_hints(command)["options"]

    def called(**values: Any) -> int | None:
        try:
            options = _filled(record, values)
        except ValidationError as error:  # what typer cannot check
            fault = error.errors()[0]
            raise ConfigError(f"{'.'.join(map(str, fault['loc']))} = {fault['input']!r}: {fault['msg']}") from error
        for name, field, _ in _leaves(record):
            if read := _mark(field, Read):
                check_read(read.kind, values[name])
        return command(options)

    called.__doc__ = command.__doc__
    called.__signature__ = Signature([_parameter(*leaf) for leaf in _leaves(record)])  # type: ignore[attr-defined]
    return called


def _leaves(record: type[Settings], group: str = WHAT) -> Iterator[tuple[str, FieldInfo, str]]:
    """Fields that are options, with their group; those of a record inside the record stand in its place."""
    for name, field in record.model_fields.items():
        if inner := _record(field):
            yield from _leaves(inner, group if issubclass(inner, _SAYS_WHAT) else HOW)
        elif Flag(None) not in field.metadata:
            yield name, field, WHERE if name == "out" or _mark(field, Written) is not None else group


def _filled(record: type[Options], values: dict[str, Any]) -> Options:
    """The record with what was given; what was not is left to its defaults."""
    given: dict[str, Any] = {}
    for name, field in record.model_fields.items():
        if inner := _record(field):
            given[name] = _filled(inner, values)
        elif Flag(None) not in field.metadata and values[name] is not None:
            given[name] = values[name]
    return record.model_validate(given)


def _record(field: FieldInfo) -> type[Settings] | None:
    """The record that a field is, if it is one."""
    kind: Any = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None


def _parameter(name: str, field: FieldInfo, group: str) -> Parameter:
    kind: Any = field.annotation
    default = Parameter.empty if field.is_required() else field.default
    if get_origin(kind) is dict:  # KEY=VALUE words, which the record reads
        kind, default = list[str] | None, None
    elif (
        get_origin(kind) is tuple
    ):  # typer repeats lists; none given is none, so that no empty list is shown as default
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        kind, default = (kind, default) if field.is_required() else (kind | None, None)
    help_text = " ".join((field.description or "").split())
    word, least, most = _mark(field, Word), _mark(field, Ge), _mark(field, Le)
    written = _mark(field, Written)
    callback = PLACES[written.kind] if written else None
    info: Any
    if word is not None:
        info = typer.Argument(help=help_text, metavar=word.metavar)
    else:
        further: dict[str, Any] = {
            "min": least and least.ge,
            "max": most and most.le,
            "callback": callback,
            "rich_help_panel": group,
        }
        info = typer.Option(_name(name, field), help=help_text, show_default=default is not True, **further)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _name(name: str, field: FieldInfo) -> str:
    """`--its-name` unless marked otherwise; a switch has one word, for what is not the default, or both if none is."""
    flag, words = _mark(field, Flag), name.replace("_", "-")
    if flag is not None and flag.name is not None:
        return flag.name
    if field.annotation == bool | None:
        return f"--{words}/--no-{words}"
    return f" /--no-{words}" if field.default is True else f"--{words}"


def _mark(field: FieldInfo, kind: type[Mark]) -> Mark | None:
    """The mark of one kind that a field carries."""
    return next((mark for mark in field.metadata if isinstance(mark, kind)), None)
