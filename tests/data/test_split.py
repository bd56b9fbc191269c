"""Training and held-out conversations: disjoint by prompt, complete, never empty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.data.answers import answer_slots
from draftline.data.prepare import prepare
from draftline.data.prompts import read_prompts
from draftline.data.split import split_heldout
from draftline.errors import DataError
from draftline.options import PrepareOptions
from tests.data.chat_tokenizers import THINKING, make_tokenizer
from tests.data.test_prepare import row, write


def test_heldout_split_is_disjoint_complete_and_not_empty() -> None:
    for count, fraction in [(1, 0.5), (2, 0.01), (10, 0.25), (100, 0.99), (7, 0.0)]:
        train, heldout = split_heldout(np.arange(count, dtype=np.uint64), fraction)
        assert sorted([*train, *heldout]) == list(range(count))
        assert len(train) >= 1
        assert len(heldout) >= (1 if fraction and count > 1 else 0)
    assert len(split_heldout(np.arange(100, dtype=np.uint64), 0.25)[1]) == 25


def test_no_prompt_is_on_both_sides_of_the_heldout_split() -> None:
    hashes = np.random.default_rng(0).integers(0, 20, size=200).astype(np.uint64)
    train, heldout = split_heldout(hashes, 0.3)
    assert len(set(hashes[heldout])) == 6
    assert not set(hashes[train]) & set(hashes[heldout])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def test_system_prompt_tools_and_options_are_kept(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "with system"}
    yo = {"role": "assistant", "content": "yo"}
    dialogue = [
        {"role": "user", "content": "with a call"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        yo,
    ]
    rows: list[dict[str, Any]] = [
        row("plain"),
        {"messages": [system, user, yo]},
        {"messages": [{"role": "user", "content": "with tools"}, yo], "tools": [TOOL]},
        {"messages": dialogue, "tools": [TOOL]},
        {**row("with option"), "chat_template_kwargs": {"enable_thinking": False}},
    ]
    data = write(tmp_path / "data.jsonl", [*rows, row("for training")])
    prepare(make_tokenizer(THINKING), [data], tmp_path / "out", PrepareOptions(heldout=5))
    path = tmp_path / "out/heldout/prompts.jsonl"
    written = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    expected = [
        {"turns": ["plain"]},
        {"messages": [system, user]},
        {"messages": [{"role": "user", "content": "with tools"}], "tools": [TOOL]},
        {"messages": dialogue, "tools": [TOOL]},
        {"messages": rows[4]["messages"][:1], "chat_template_kwargs": {"enable_thinking": False}},
    ]
    expected.append({"turns": ["for training"]})
    assert len(written) == 5
    assert set(map(json.dumps, written)) < set(map(json.dumps, expected))

    given = {prompt.conversation.prompt_hash(): prompt.conversation for prompt in read_prompts([data])}
    again = [prompt.conversation for prompt in read_prompts([str(path)])]
    assert len(again) == 5
    for chat in again:
        original = given[chat.prompt_hash()]
        assert (chat.tools, chat.template_options) == (original.tools, original.template_options)
        assert answer_slots(chat) == answer_slots(original)


def test_holding_everything_back_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", [row("a"), row("b")])
    with pytest.raises(DataError, match="--heldout keeps all 2 conversations out of training"):
        prepare(make_tokenizer(THINKING), [data], tmp_path / "out", PrepareOptions(heldout=3))
    assert not (tmp_path / "out" / "meta.json").exists()
    assert not (tmp_path / "out" / "partial").exists()
