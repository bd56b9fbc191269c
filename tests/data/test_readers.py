import bz2
import gzip
import io
import itertools
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftline.data import readers
from draftline.data.conversations import Chat
from draftline.data.readers import read_json_rows, read_rows, resolve_sources, total_bytes
from draftline.data.shapes import parse_row
from draftline.errors import DataError

ROWS = [{"messages": [{"role": "user", "content": f"é {n}"}]} for n in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def values(*names: object) -> list[object]:
    return [row.value for row in read_rows(resolve_sources([str(name) for name in names]))]


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


MANY = "".join(json.dumps({"text": f"{n * n} {n % 7}"}) + "\n" for n in range(20_000)).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.jsonl", LINES.encode()),
        ("bom_crlf_blank.jsonl", b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n\r\n").encode()),
        ("utf16.jsonl", LINES.encode("utf-16")),
        ("packed.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)),
        ("packed.jsonl.zst", zstd(LINES.encode())),
        ("packed.jsonl.bz2", bz2.compress(LINES.encode())),
        ("packed.jsonl.xz", lzma.compress(LINES.encode())),
        ("two_members.jsonl.gz", b"".join(gzip.compress(line.encode()) for line in LINES.splitlines(keepends=True))),
        ("array.json", json.dumps(ROWS, indent=2).encode()),
        ("array_line.json", json.dumps(ROWS).encode()),
        ("array_rows.json", ("[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n").encode()),
        ("array.json.gz", gzip.compress(json.dumps(ROWS, indent=1).encode(), mtime=0)),
    ],
)
def test_text_in_all_packings(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert values(tmp_path / name) == ROWS


CALL = {"function": {"name": "ls", "arguments": {"path": "/tmp"}}}
FILLED = [
    {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [CALL]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}]},
]
"""Rows of which a table makes one structure: every call gets all three arguments."""


def test_nulls_that_a_table_fills_in_are_no_arguments(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(FILLED), tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() != FILLED
    assert values(tmp_path / "rows.parquet") == FILLED
    datasets.Dataset.from_list(FILLED).save_to_disk(tmp_path / "saved")
    assert [row.value for row in read_rows([tmp_path / "saved"])] == FILLED


def test_nulls_in_a_json_column_stay(tmp_path: Path) -> None:
    tools = [{"name": "f", "parameters": {"default": None, "enum": ["mon", None]}}]
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None}]
    kind = pa.list_(pa.json_())
    columns = {
        name: pa.array([[json.dumps(item) for item in items]], pa.list_(pa.string())).cast(kind)
        for name, items in (("messages", messages), ("tools", tools))
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert values(tmp_path / "rows.parquet") == [{"messages": messages, "tools": tools}]
    assert isinstance(parse_row(values(tmp_path / "rows.parquet")[0]), Chat)


def test_parquet_and_saved_dataset(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    assert values(tmp_path / "rows.parquet") == ROWS
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert values(tmp_path / "saved") == ROWS


def test_folder_pattern_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(LINES, encoding="utf-8")
    (tmp_path / "notes.md").write_text("no data")
    assert values(tmp_path) == ROWS * 2
    assert values(tmp_path / "*.jsonl") == ROWS * 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(LINES.encode()))))
    assert values("-") == ROWS
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(gzip.compress(LINES.encode())))))
    assert values("-") == ROWS


def test_splits_of_a_saved_dataset(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_list(rows) for name, rows in (("train", ROWS), ("test", ROWS[:1]))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    saved = resolve_sources([str(tmp_path / "saved")])
    assert saved == [tmp_path / "saved"]
    assert [row.value for row in read_rows(saved)] == ROWS
    assert [row.value for row in read_rows(saved, "test")] == ROWS[:1]
    with pytest.raises(DataError, match="has the splits train, test: name one with --split"):
        list(read_rows(saved, "dev"))


def test_files_in_a_folder_that_are_no_data(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "._rows.jsonl", ".cache/old.jsonl", "dataset_infos.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES, encoding="utf-8")
    assert resolve_sources([str(tmp_path)]) == [tmp_path / "rows.jsonl"]


def test_a_folder_with_several_splits_is_not_mixed(tmp_path: Path) -> None:
    for name in ("train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"):
        (tmp_path / name).write_text(LINES, encoding="utf-8")
    with pytest.raises(DataError, match="holds the splits test, train: name the files of one"):
        resolve_sources([str(tmp_path)])
    assert values(tmp_path / "train*") == ROWS


def test_list_of_messages_is_one_row(tmp_path: Path) -> None:
    line = json.dumps(ROWS[0]["messages"])
    (tmp_path / "lists.jsonl").write_text(f"{line}\n{line}\n")
    assert values(tmp_path / "lists.jsonl") == [ROWS[0]["messages"]] * 2


def test_faults_are_rows_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": \n{"text": "\xff"}\n{"text": "\0"}\n{"messages":[{"role":"us')
    assert [(row.line, row.fault) for row in read_rows([path])] == [
        (1, None),
        (3, "not_json"),
        (4, "not_utf8"),
        (5, "nul_character"),
        (6, "not_json"),
    ]


@pytest.mark.parametrize(
    "cut",
    [gzip.compress(MANY, mtime=0)[:-9000], gzip.compress(MANY)[:-8] + b"wrongsum", zstd(MANY)[:-9000]],
)
def test_damaged_archive_keeps_what_was_read(tmp_path: Path, cut: bytes) -> None:
    (tmp_path / "cut").write_bytes(cut)
    rows = list(read_rows([tmp_path / "cut"]))
    assert len(rows) > 1000
    assert (rows[-1].fault, rows[-1].line) == ("damaged_file", rows[-2].line + 1)
    assert all(row.fault is None for row in rows[:-1])


def test_damage_behind_the_last_row_costs_no_row(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(gzip.compress(MANY) + b"garbage")
    assert [row.fault for row in read_rows([tmp_path / "rows"])] == [None] * 20_000 + ["damaged_file"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.zip", "data.arrow"])
def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a,b")
    with pytest.raises(DataError, match="files are not read; write it as JSONL"):
        resolve_sources([str(tmp_path / name)])


def test_array_with_a_fault_keeps_the_elements_before(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('[\n{"text": "a"},\n{"text": b},\n{"text": "c"}\n]')
    assert [(row.value, row.fault) for row in read_rows([tmp_path / "bad.json"])] == [
        ({"text": "a"}, None),
        (None, "damaged_file"),
    ]


def test_progress_counts_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES, encoding="utf-8")
    rows = list(read_rows([path, path]))
    assert total_bytes([path, path]) == rows[-1].bytes_read == 2 * path.stat().st_size


@pytest.mark.parametrize(
    ("name", "message"), [("/no/such/file.jsonl", "does not exist"), ("/no/*.jsonl", "no file matches")]
)
def test_missing_sources(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        resolve_sources([name])


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data file"):
        resolve_sources([str(tmp_path)])


TEXTS = st.text('aé😀\u2028\n"\\[]{}, ', max_size=6)
RANDOM_ROWS = st.lists(st.builds(lambda text, n: {"text": text, "n": n}, TEXTS, st.integers()), min_size=1, max_size=4)


def read_text(content: bytes) -> list[tuple[int, Any, str | None]]:
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
@given(RANDOM_ROWS, st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]), st.integers(8, 60))
def test_every_layout_gives_the_rows_however_it_is_cut(rows: list[Any], encoding: str, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_CHUNK", chunk)
        for name, text in layouts(rows).items():
            assert [value for _, value, _ in read_text(text.encode(encoding))] == rows, name


def test_lines_are_those_where_the_values_begin() -> None:
    rows = [{"text": f"a{n}"} for n in range(4)]
    assert [line for line, _, _ in read_text(layouts(rows)["pretty"].encode())] == [2, 5, 8, 11]
    assert [line for line, _, _ in read_text(layouts(rows)["objects over lines"].encode())] == [1, 4, 7, 10]
    assert [line for line, _, _ in read_text(layouts(rows)["lines"].encode())] == [1, 3, 5, 7]


def test_an_endless_array_on_one_line_is_not_read_whole() -> None:
    pieces = itertools.chain([b"["], itertools.repeat(b'{"text": "' + b"x" * 10_000 + b'"},'))
    rows = read_json_rows(lambda _: next(pieces), "x", lambda: 0)
    assert [row.value["text"][0] for row in itertools.islice(rows, 2000)] == ["x"] * 2000


def test_a_row_longer_than_a_block_is_read() -> None:
    rows = [{"text": "y" * 3_000_000}, {"text": "z"}]
    for text in layouts(rows).values():
        assert [value for _, value, _ in read_text(text.encode())] == rows


@pytest.mark.parametrize("chat", [[{"role": "user", "content": "q"}], [{"from": "human", "value": "q"}], ["q", "a"]])
def test_a_list_of_messages_or_texts_is_one_row(chat: list[Any]) -> None:
    assert read_text(json.dumps(chat).encode()) == [(1, chat, None)]
    assert read_text(f"{json.dumps(chat)}\n{json.dumps(chat)}\n".encode()) == [(1, chat, None), (2, chat, None)]
    assert read_text(json.dumps(chat, indent=1).encode()) == [(1, chat, None)]
    assert read_text(json.dumps([[chat], [chat]]).encode()) == [(1, [chat], None), (1, [chat], None)]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ('[{"text": "a"}, {"text": b}, {"text": "c"}]', [None, "damaged_file"]),
        ('[\n{"text": "a"},\n{"text": "b', [None, "damaged_file"]),
        ('[{"text": "a"}]\nxxx', [None, "not_json"]),
        ('[{"text": "a"}', [None, "damaged_file"]),
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
    assert [fault for _, _, fault in read_text(text.encode())] == faults


def test_another_encoding_costs_its_lines_only() -> None:
    assert [fault for _, _, fault in read_text('{"text": "é"}\n'.encode("latin-1") + b'{"text": "a"}\n')] == [
        "not_utf8",
        None,
    ]


def test_a_data_set_may_be_named_with_its_subset_and_split(tmp_path: Path) -> None:
    """A folder as on the hub, with its card; and one that `datasets` saved."""
    parts = {(subset, split): f"{subset}/{split}.jsonl" for subset in ("one", "two") for split in ("train", "test")}
    for (subset, split), name in parts.items():
        (tmp_path / "cards" / subset).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cards" / name).write_text(json.dumps({"prompt": f"{subset} {split}"}) + "\n")
    configs = [
        {
            "config_name": subset,
            "data_files": [{"split": split, "path": parts[subset, split]} for split in ("train", "test")],
        }
        for subset in ("one", "two")
    ]
    (tmp_path / "cards" / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")})
    saved.save_to_disk(tmp_path / "saved")

    def read(name: str, split: str | None = None) -> list[str]:
        return [row.value["prompt"] for row in read_rows(resolve_sources([f"{tmp_path}/{name}"]), split)]

    assert read("cards:two:test") == ["two test"]
    assert read("cards:one") == ["one train"]
    assert read("cards:one", "test") == ["one test"]
    assert read("cards:two:train", "test") == ["two train"]
    assert (read("saved::test"), read("saved")) == (["test"], ["train"])
    for name, words in (("cards:three:test", "three"), ("cards:one:valid", "valid"), ("saved::valid", "train, test")):
        with pytest.raises(DataError, match=words) as refused:
            read(name)
        assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match="NAME:SUBSET:SPLIT"):
        resolve_sources(["a:b:c:d"])


def test_a_hub_without_a_net_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match="cannot read the data set 'someone/nothing:main:test', split 'test'"
    ) as refused:
        list(read_rows(resolve_sources(["someone/nothing:main:test"])))
    assert "\n" not in str(refused.value)
