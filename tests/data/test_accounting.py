"""What is counted of a data set: lengths, scripts, modes, and reasons with their places."""

from __future__ import annotations

import json

import pytest

from draftline.data.accounting import (
    MOST_LABELS,
    NO_SYSTEM_PROMPT,
    OTHERS,
    Accounting,
    ChatMode,
    length_bucket,
    refuse_bad_data,
    script_of,
    system_label,
)
from draftline.data.conversations import Conversation, Message
from draftline.errors import DataError

SYSTEM = "You are a pirate."


def chat(answer: str, system: str | None = None, **options: object) -> Conversation:
    messages = [Message(role="user", content="Hi"), Message(role="assistant", content=answer)]
    if system is not None:
        messages.insert(0, Message(role="system", content=system))
    return Conversation(messages=tuple(messages), template_options=options)


PLAIN = chat("yes")


def counted() -> Accounting:
    accounting = Accounting(rows_in=5)
    for number, each in enumerate(
        (PLAIN, chat("<think>hm</think>Да, это четыре, как и было", SYSTEM), chat("no", enable_thinking=False))
    ):
        accounting.keep(100 * (number + 1), 5, each)
    accounting.dropped.add("not_json", 4, "a.jsonl")
    accounting.dropped.add("not_json", 5, "a.jsonl")
    accounting.flagged.add("truncated", 2, "a.jsonl")
    return accounting


def test_an_interrupted_count_goes_on_where_it_was() -> None:
    whole = counted()
    again = Accounting.from_state(json.loads(json.dumps(whole.as_state())))
    assert again == whole
    for each in (whole, again):
        each.rows_in += 2
        each.keep(10, 5, PLAIN)
        each.dropped.add("not_json", 9, "b.jsonl")
        each.check()
    assert again.as_state() == whole.as_state()
    assert again.dropped["not_json"] == {"count": 3, "first_line": 4, "first_file": "a.jsonl"}
    assert (again.lengths["<= 128"], again.scripts["cyrillic"], again.thinking["with_reasoning"]) == (2, 1, 1)


def test_a_row_that_went_missing_is_seen() -> None:
    accounting = counted()
    accounting.rows_in += 1
    with pytest.raises(AssertionError):
        accounting.check()


def test_what_is_not_fit_to_be_trained_on_is_refused_with_its_places() -> None:
    refuse_bad_data(counted(), strict=False, max_unreadable=0.4)
    with pytest.raises(DataError, match=r"2 of 5 rows are dropped \(not_json 2, first in a.jsonl line 4\)"):
        refuse_bad_data(counted(), strict=True, max_unreadable=1)
    with pytest.raises(DataError, match=r"2 of 5 rows are unreadable, more than 39.0%"):
        refuse_bad_data(counted(), strict=False, max_unreadable=0.39)
    with pytest.raises(DataError, match="the data holds no row"):
        refuse_bad_data(Accounting(), strict=False, max_unreadable=1)


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, "<= 128"), (128, "<= 128"), (129, "<= 256"), (32768, "<= 32768"), (32769, "> 32768")]
)
def test_lengths_are_counted_by_their_upper_end(length: int, bucket: str) -> None:
    assert length_bucket(length) == bucket


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hi!", "latin"),
        ("12 + 3", "none"),
        ("naïve", "latin"),
        ("Привет OK", "cyrillic"),
        ("数学です", "han"),
        ("🙂", "none"),
    ],
)
def test_a_text_has_the_script_of_most_of_its_letters(text: str, script: str) -> None:
    assert script_of(text) == script


def test_options_of_rows_and_of_the_whole_count_together() -> None:
    mode = ChatMode.of_prepared({"template_options": {"a": 1, "enable_thinking": True}}, counted().as_state())
    assert mode is not None
    assert mode.template_options == {
        '{"a": 1, "enable_thinking": true}': 2,
        '{"a": 1, "enable_thinking": false}': 1,
    }
    assert mode == ChatMode.from_json(json.loads(json.dumps(vars(mode))))


def test_more_labels_than_can_be_listed_are_counted_as_others() -> None:
    accounting = Accounting()
    for number in range(MOST_LABELS + 7):
        accounting.keep(10, 5, chat("yes", f"System {number}"))
    assert len(accounting.system_prompts) == MOST_LABELS + 1
    assert accounting.system_prompts[OTHERS] == 7


def test_system_prompts_are_recorded_as_hashes_only() -> None:
    label = system_label(chat("yes", SYSTEM))
    assert "pirate" not in label
    assert label == system_label(chat("no", "You are a  pirate.")) != system_label(chat("yes", "You are a parrot."))
    assert system_label(PLAIN) == NO_SYSTEM_PROMPT


def test_data_that_was_not_counted_has_no_mode() -> None:
    assert ChatMode.of_prepared({"template_options": {}}, Accounting().as_state()) is None
    assert ChatMode.of_prepared({"template_options": {}}, {"thinking": {"with_reasoning": 3}}) is None
