import io
import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftline.data import json_rows
from draftline.data.json_rows import read_json_rows

TEXTS = st.text('aé😀\u2028\n"\\[]{}, ', max_size=6)
ROWS = st.lists(st.builds(lambda text, n: {"text": text, "n": n}, TEXTS, st.integers()), min_size=1, max_size=4)


def read(content: bytes) -> list[tuple[int, Any, str | None]]:
    return [(row.line, row.value, row.fault) for row in read_json_rows(io.BytesIO(content).read, "x", lambda: 0)]


def layouts(rows: list[Any]) -> dict[str, str]:
    return {
        "lines": "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in rows),
        "one line": json.dumps(rows),
        "pretty": json.dumps(rows, indent=2, ensure_ascii=False),
        "objects over lines": "\n".join(json.dumps(row, indent=1) for row in rows),
        "an array a line": "".join(json.dumps([row]) + "\n" for row in rows),
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ROWS, st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]), st.integers(8, 60))
def test_every_layout_gives_the_rows_however_it_is_cut(rows: list[Any], encoding: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "_CHUNK", chunk)
        for name, text in layouts(rows).items():
            assert [value for _, value, _ in read(text.encode(encoding))] == rows, name


def test_lines_are_those_where_the_values_begin() -> None:
    rows = [{"text": f"a{n}"} for n in range(4)]
    assert [line for line, _, _ in read(layouts(rows)["pretty"].encode())] == [2, 5, 8, 11]
    assert [line for line, _, _ in read(layouts(rows)["objects over lines"].encode())] == [1, 4, 7, 10]
    assert [line for line, _, _ in read(layouts(rows)["lines"].encode())] == [1, 3, 5, 7]


def test_an_endless_array_on_one_line_is_not_read_whole() -> None:
    pieces = itertools.chain([b"["], itertools.repeat(b'{"text": "' + b"x" * 10_000 + b'"},'))
    rows = read_json_rows(lambda _: next(pieces), "x", lambda: 0)
    assert [row.value["text"][0] for row in itertools.islice(rows, 2000)] == ["x"] * 2000


def test_a_row_longer_than_a_block_is_read() -> None:
    rows = [{"text": "y" * 3_000_000}, {"text": "z"}]
    for text in layouts(rows).values():
        assert [value for _, value, _ in read(text.encode())] == rows


@pytest.mark.parametrize("chat", [[{"role": "user", "content": "q"}], [{"from": "human", "value": "q"}], ["q", "a"]])
def test_a_list_of_messages_or_texts_is_one_row(chat: list[Any]) -> None:
    assert read(json.dumps(chat).encode()) == [(1, chat, None)]
    assert read(f"{json.dumps(chat)}\n{json.dumps(chat)}\n".encode()) == [(1, chat, None), (2, chat, None)]
    assert read(json.dumps(chat, indent=1).encode()) == [(1, chat, None)]
    assert read(json.dumps([[chat], [chat]]).encode()) == [(1, [chat], None), (1, [chat], None)]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ('[{"text": "a"}, {"text": b}, {"text": "c"}]', [None, "damaged_file"]),
        ('[\n{"text": "a"},\n{"text": "b', [None, "not_json"]),
        ('[{"text": "a"}]\nxxx', [None, "not_json"]),
        ('[{"text": "a"}', [None, "not_json"]),
        ('[{"text": b\n{"text": "a"}', ["not_json", None]),
        ('{"messages": [{"role": "us\n{"text": "a"}\n', ["not_json", None]),
        ('{"text": "a"} {"text": "b"}\n{"text": "c"}\n', ["not_json", None]),
        ("[" * 100_000 + '\n{"text": "a"}', ["not_json", None]),
        ("[]", [None]),
        (" \n\n", []),
        ("", []),
    ],
)
def test_faults_cost_a_line_where_there_are_lines_and_the_rest_where_there_are_none(
    text: str, faults: list[str | None]
) -> None:
    assert [fault for _, _, fault in read(text.encode())] == faults


def test_another_encoding_costs_its_lines_only() -> None:
    assert [fault for _, _, fault in read('{"text": "é"}\n'.encode("latin-1") + b'{"text": "a"}\n')] == [
        "not_utf8",
        None,
    ]
