"""Prompts for evaluation: the files and shapes that `prepare` reads, and the usual task sets; every line counts.

The wording around a row of a task set is that of z-lab's benchmark of DFlash drafters, so that acceptance lengths can
be compared with published ones. Acceptance does not look at whether an answer is right, so solutions and tests are not
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any

from draftline.data.conversations import Chat, Conversation, Message
from draftline.data.readers import RawRow, read_rows, resolve_sources
from draftline.data.shapes import parse_row
from draftline.errors import ConfigError, DataError

_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Prompt:
    """What a user says, in one turn or several, and where it was found.

    Attributes:
        file: file, data set or task that it comes from.
        number: line of a text file, row of a table, from 1.
        conversation: the turns; answers that it carries are not used.
    """

    file: str
    number: int
    conversation: Conversation

    @property
    def place(self) -> str:
        """Where it was found, for messages."""
        return f"{self.file} line {self.number}"


def read_prompts(names: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """All conversations of files, folders or patterns, in order; answers that they carry stay in them.

    With a `limit` only the first ones of each file are read.

    A prompt that cannot be used is an error and not a dropped row: an evaluation over fewer prompts than its file has
    would be compared with others as if it were the same.

    Raises:
        DataError: a row is unreadable, is not a prompt, has a user turn without text, or nothing is there.
    """
    prompts = [_prompt(row) for source in resolve_sources(names) for row in islice(read_rows([source]), limit)]
    if not prompts:
        raise DataError(f'{", ".join(names)} has no prompt: give lines such as {{"turns": ["..."]}}')
    _refuse_empty(prompts)
    return prompts


def _refuse_empty(prompts: Sequence[Prompt]) -> None:
    """Refuse prompts in which a user says nothing, or of which no user is part; the first is named."""
    empty = [prompt for prompt in prompts if not _says_something(prompt.conversation)]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(prompts)} prompts have no text in a user turn, the first is {empty[0].place}: "
            "fix or delete such lines"
        )


def _prompt(row: RawRow) -> Prompt:
    parsed = parse_row(_readable(row))
    if not isinstance(parsed, Chat):
        raise DataError(f'{row.place} is not a prompt: write it as {{"turns": ["..."]}} or as messages')
    return Prompt(row.source, row.line, parsed.conversation)


def _readable(row: RawRow) -> Any:
    if row.fault is not None:
        raise DataError(f"{row.place} cannot be read ({row.fault}): fix or delete the line")
    return row.value


def _says_something(conversation: Conversation) -> bool:
    said = [message.content.strip() for message in conversation.messages if message.role == "user"]
    return bool(said) and all(said)


@dataclass(frozen=True)
class TaskSet:
    """Where a set lies and how its rows are asked.

    Attributes:
        name: as `--task` takes it; case, hyphens and underscores do not matter.
        hub: name on the Hugging Face hub.
        subset: configuration of that data set; None if it has one only.
        split: of that data set.
        columns: those that hold the question, one alternative per copy of the set that people have.
        ask: turns of the user from the values of these columns.
    """

    name: str
    hub: str
    subset: str | None
    split: str
    columns: tuple[tuple[str, ...], ...]
    ask: Callable[..., list[str]]


def _reasoned(question: str) -> list[str]:
    return [question + _STEP_BY_STEP]


def _program(signature: str) -> list[str]:
    return [
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{signature}\n```"
    ]


def _alpaca(instruction: str, given: str) -> list[str]:
    return [f"{instruction}\n\nInput:\n{given}" if given else instruction]


def _as_it_is(text: str) -> list[str]:
    return [text]


def _turns(turns: list[str]) -> list[str]:
    return list(turns)


_AIME_COLUMNS = (("problem",), ("Problem",), ("question",))
_SETS = (
    TaskSet("gsm8k", "openai/gsm8k", "main", "test", (("question",),), _reasoned),
    TaskSet("math-500", "HuggingFaceH4/MATH-500", None, "test", (("problem",),), _reasoned),
    TaskSet("aime", "HuggingFaceH4/aime_2024", None, "train", _AIME_COLUMNS, _reasoned),
    TaskSet("aime24", "HuggingFaceH4/aime_2024", None, "train", _AIME_COLUMNS, _reasoned),
    TaskSet("aime25", "MathArena/aime_2025", None, "train", _AIME_COLUMNS, _reasoned),
    TaskSet("humaneval", "openai/openai_humaneval", None, "test", (("prompt",),), _program),
    TaskSet("mbpp", "google-research-datasets/mbpp", "sanitized", "test", (("prompt",), ("text",)), _as_it_is),
    TaskSet("mt-bench", "HuggingFaceH4/mt_bench_prompts", None, "train", (("prompt",), ("turns",)), _turns),
    TaskSet("alpaca", "tatsu-lab/alpaca", None, "train", (("instruction", "input"),), _alpaca),
)
_BY_NAME = {_set.name.replace("-", ""): _set for _set in _SETS}


def find_task(word: str) -> tuple[TaskSet, str | None]:
    """The set that `NAME` or `NAME=PATH` means, and the path.

    Raises:
        ConfigError: no set has this name.
    """
    name, _, path = word.partition("=")
    found = _BY_NAME.get(_plain(name))
    if found is None:
        close = get_close_matches(_plain(name), _BY_NAME, n=1, cutoff=0.5)
        nearest = f"did you mean {_BY_NAME[close[0]].name}? " if close else ""
        names = ", ".join(task.name for task in _SETS)
        raise ConfigError(f"{name!r} is not a task set: {nearest}known are {names}; other prompts go to --prompts")
    if "=" in word and not path:
        raise ConfigError(f"--task {word} names no file: write {name}=FILE, or {name} alone for the hub")
    return found, path or None


def read_task(word: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of `NAME` (from the hub) or `NAME=PATH` (file, folder or pattern), the first `limit` of them.

    Raises:
        ConfigError: no set has this name.
        DataError: the hub or the file cannot be read, or a row has not the columns of the set.
    """
    task, path = find_task(word)
    rows = read_rows([task.hub], task.split, task.subset) if path is None else read_rows(resolve_sources([path]))
    try:
        prompts = [Prompt(task.name, row.line, _conversation(task, row)) for row in islice(rows, limit)]
    except DataError as error:
        if path is not None:
            raise
        raise DataError(f"{error}; without a hub, give a local copy: --task {task.name}=FILE") from error
    if not prompts:
        raise DataError(f"{path or task.hub} has no row: give a copy of {task.name} with at least one")
    _refuse_empty(prompts)
    return prompts


def _conversation(task: TaskSet, row: RawRow) -> Conversation:
    turns, where = _turns_of(task, _readable(row)), row.place
    if turns is None:
        has = ", ".join(row.value) if isinstance(row.value, dict) else type(row.value).__name__
        held = [c for c in task.columns if isinstance(row.value, dict) and all(column in row.value for column in c)]
        if held:
            raise DataError(f"{where}: {' and '.join(held[0])} of {task.name} holds no text: fix or delete the line")
        wanted = " or ".join(" and ".join(columns) for columns in task.columns)
        raise DataError(f"{where} is not a row of {task.name}: it has {has}, not {wanted}; give a copy of that set")
    return Conversation(messages=tuple(Message(role="user", content=turn) for turn in turns))


def _turns_of(task: TaskSet, value: Any) -> list[str] | None:
    """What the user says; a row that holds finished `turns` is taken as it is. None if it has not the columns."""
    if not isinstance(value, dict):
        return None
    if _is_texts(value.get("turns")):
        return list(value["turns"])
    for columns in task.columns:
        if all(column in value for column in columns):
            values = [value[column] for column in columns]
            right = all(_is_texts(each) if task.ask is _turns else isinstance(each, str) for each in values)
            if right and isinstance(values[0], str) and not values[0].strip():
                return [""]  # without the wording around it, so that it is seen to be empty
            return task.ask(*values) if right else None
    return None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")
