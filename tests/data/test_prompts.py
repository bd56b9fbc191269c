"""Rows in the columns that the task sets really have, from local copies; invented contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftline.data.prompts import find_task, read_prompts, read_task
from draftline.errors import ConfigError, DataError

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
SIGNATURE = 'def add(a: int, b: int) -> int:\n    """Add."""\n'

COPIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gsm8k": ("gsm8k", {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}, ["2 + 3?" + STEPS]),
    "math-500": (
        "math-500",
        {
            "problem": "Find $x$.",
            "solution": "So $x=1$.",
            "answer": "1",
            "subject": "Algebra",
            "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        ["Find $x$." + STEPS],
    ),
    "humaneval": (
        "humaneval",
        {
            "task_id": "HumanEval/0",
            "prompt": SIGNATURE,
            "canonical_solution": "    return a + b\n",
            "test": "def check(candidate): ...",
            "entry_point": "add",
        },
        [PROGRAM + SIGNATURE + "\n```"],
    ),
    "mbpp, sanitized": (
        "mbpp",
        {
            "source_file": "b.ipynb",
            "task_id": 2,
            "prompt": "Write a function to add.",
            "code": "def add(a, b): ...",
            "test_imports": [],
            "test_list": ["assert add(1, 2) == 3"],
        },
        ["Write a function to add."],
    ),
    "mbpp, full": (
        "mbpp",
        {
            "task_id": 2,
            "text": "Write a function to add.",
            "code": "def add(a, b): ...",
            "test_list": ["assert add(1, 2) == 3"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        ["Write a function to add."],
    ),
    "mt-bench of the hub": (
        "mt-bench",
        {"prompt": ["Write a post.", "Now shorter."], "reference": [], "category": "writing", "prompt_id": 1},
        ["Write a post.", "Now shorter."],
    ),
    "mt-bench of FastChat": (
        "mt-bench",
        {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Now shorter."]},
        ["Write a post.", "Now shorter."],
    ),
    "alpaca": (
        "alpaca",
        {"instruction": "Sort.", "input": "3 1", "output": "1 3", "text": "Below is ..."},
        ["Sort.\n\nInput:\n3 1"],
    ),
    "alpaca without input": (
        "alpaca",
        {"instruction": "Say hello.", "input": "", "output": "Hello", "text": "Below is ..."},
        ["Say hello."],
    ),
    "aime 2024": (
        "aime",
        {"id": 60, "problem": "Find $n$.", "solution": "...", "answer": "204", "url": "u", "year": "2024"},
        ["Find $n$." + STEPS],
    ),
    "aime with capitals": (
        "aime24",
        {"ID": "2024-I-1", "Problem": "Find $n$.", "Solution": "...", "Answer": 204},
        ["Find $n$." + STEPS],
    ),
    "aime 2025": (
        "aime25",
        {"problem_idx": 1, "problem": "Find $n$.", "answer": 70, "problem_type": ["Number Theory"]},
        ["Find $n$." + STEPS],
    ),
    "finished prompts": ("gsm8k", {"turns": ["2 + 3? Think."]}, ["2 + 3? Think."]),
}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
@pytest.mark.parametrize("copy", COPIES)
def test_rows_of_every_set_become_what_a_user_says(tmp_path: Path, copy: str, kind: str) -> None:
    name, row, turns = COPIES[copy]
    path = tmp_path / f"rows{kind}"
    if kind == ".jsonl":
        write(path, [row, row])
    else:
        pq.write_table(pa.Table.from_pylist([row, row]), path)
    prompts = read_task(f"{name}={path}")
    assert [prompt.number for prompt in prompts] == [1, 2]
    for prompt in prompts:
        assert prompt.file == find_task(name)[0].name
        assert [(m.role, m.content) for m in prompt.conversation.messages] == [("user", turn) for turn in turns]


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}, "no row"])
    assert len(read_task(f"gsm8k={path}", limit=1)) == 1


@pytest.mark.parametrize("word", ["MATH500", "math-500", "Math_500=somewhere"])
def test_names_are_known_however_they_are_written(word: str) -> None:
    assert find_task(word)[0].name == "math-500"


@pytest.mark.parametrize(("word", "words"), [("gms8k", "did you mean gsm8k"), ("x", "known are"), ("aime=", "no file")])
def test_an_unknown_name_is_refused_with_the_nearest(word: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        find_task(word)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "of another set"}, "line 2 is not a row of gsm8k: it has problem, not question"),
        ({"question": 5}, "line 2: question of gsm8k holds no text"),
        ({"question": None}, "line 2: question of gsm8k holds no text"),
        ({"question": " "}, "1 of 2 prompts have no text"),
        (["question"], "it has list"),
    ],
)
def test_rows_of_something_else_are_named(tmp_path: Path, row: Any, words: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "2 + 3?"}, row])
    with pytest.raises(DataError, match=words):
        read_task(f"gsm8k={path}")


def test_without_a_hub_the_fix_is_a_local_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def unreachable(*words: Any, **names: Any) -> None:
        asked.append((words, names["split"]))
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="--task gsm8k=FILE") as refused:
        read_task("gsm8k")
    assert asked == [(("openai/gsm8k", "main"), "test")]
    assert "\n" not in str(refused.value)


def test_prompts_come_in_order_with_their_places(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [{"turns": ["a", "b"]}, {"prompt": "c"}])
    two = write(tmp_path / "two.jsonl", [{"messages": [{"role": "user", "content": "d"}]}, {"turns": ["e"]}])
    prompts = read_prompts([str(one), str(two)])
    assert [prompt.place for prompt in prompts] == [f"{path} line {n}" for path in (one, two) for n in (1, 2)]
    assert [[message.content for message in prompt.conversation.messages] for prompt in prompts] == [
        ["a", "b"], ["c"], ["d"], ["e"],
    ]  # fmt: skip
    assert [prompt.place for prompt in read_prompts([str(one), str(two)], limit=1)] == [
        f"{one} line 1",
        f"{two} line 1",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", "line 2 cannot be read"),
        ('{"text": "formatted"}', "line 2 is not a prompt"),
        ('{"turns": ["a", " "]}', "1 of 2 prompts have no text in a user turn, the first is .* line 2"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "1 of 2 prompts have no text in a user turn"),
    ],
)
def test_every_line_of_a_file_of_prompts_counts(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(DataError, match=words):
        read_prompts([str(tmp_path / "prompts.jsonl")])


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no prompt"):
        read_prompts([str(tmp_path / "empty.jsonl")])
