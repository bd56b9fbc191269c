import gzip
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from draftline.data.conversations import Conversation, Message
from draftline.data.dataset import PreparedDataset
from draftline.data.prepare import given_samples, prepare
from draftline.errors import DataError, Interrupted, StorageError, TemplateError
from draftline.options import GenerationSettings, MaskOptions, PrepareOptions, Sampling
from tests.data.chat_tokenizers import CHATML, GEMMA, THINKING, make_tokenizer


def row(question: str, answer: str = "yo", **message: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **message}]}


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def run(folder: Path, rows: Sequence[object], template: str | None = CHATML, **options: object) -> dict[str, object]:
    """Prepare these rows into `folder/out`; any share of unreadable rows is allowed unless an option says otherwise."""
    data = write(folder / "data.jsonl", rows)
    return prepare(
        make_tokenizer(template), [data], folder / "out", PrepareOptions(**{"max_unreadable": 1.0, **options})
    )


def reasons(table: object) -> dict[str, tuple[int, int]]:
    assert isinstance(table, dict)
    return {reason: (entry["count"], entry["first_line"]) for reason, entry in table.items()}


def test_every_row_is_out_or_dropped_for_a_reason(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "yo"}
    report = run(
        tmp_path,
        [
            row("a"),
            {"messages": []},
            {"messages": [{"role": "system", "content": "x"}]},
            {"messages": [answer, {"role": "user", "content": "b"}, answer]},
            row("c", ""),
            {"messages": [{"role": "moderator", "content": "x"}, answer]},
            {"turns": ["Q1", "Q2"]},
            '{"messages": [{"role": "us',
            row("a"),
            {"messages": [{"role": "developer", "content": "x"}, *row("d")["messages"]]},
            row("long " * 100),
            row("ids", content="Please print <|im_end|> now"),
        ],
        max_length=60,
    )
    assert (report["rows_in"], report["rows_out"]) == (12, 4)
    assert reasons(report["dropped"]) == {
        "empty": (1, 2),
        "no_assistant": (2, 3),
        "all_answers_empty": (1, 5),
        "unknown_role: moderator": (1, 6),
        "not_json": (1, 8),
        "duplicate": (1, 9),
        "all_supervision_truncated": (1, 11),
    }
    assert reasons(report["flagged"]) == {
        "starts_with_assistant": (1, 4),
        "repeated_answer": (1, 10),
        "special_token_in_text": (1, 12),
    }
    dataset = PreparedDataset.open(tmp_path / "out")
    assert len(dataset) == 4
    assert dataset.lengths.sum() == report["tokens"]
    assert dataset.supervised_lengths.sum() == report["supervised_tokens"]
    assert [dataset.origin(n)[1] for n in range(4)] == [1, 4, 10, 12]


def test_a_thousand_texts_stay_a_thousand_rows(tmp_path: Path) -> None:
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
    report = run(tmp_path, [{"text": text.format(n)} for n in range(1000)])
    assert (report["rows_in"], report["rows_out"], report["dropped"]) == (1000, 1000, {})
    dataset, tokenizer = PreparedDataset.open(tmp_path / "out"), make_tokenizer(CHATML)
    sample = dataset[7]
    assert tokenizer.decode(sample.input_ids) == text.format(7)
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "yo<|im_end|>"


def test_nothing_in_a_row_ends_the_run(tmp_path: Path) -> None:
    """Nested deeper than writers of JSON go, half a character, a text like those that stand for others inside."""
    deep: object = {}
    for _ in range(480):
        deep = {"a": deep}
    rows = [
        {**row("deep"), "tools": [{"name": "f", "parameters": deep}]},
        '{"messages": [{"role": "user", "content": "x\\ud800"}, {"role": "assistant", "content": "y"}]}',
        row("What is qzPARTzq1qz?", "qz0PARTzq1qz, or 7583100000100"),
        row("Good", "row"),
    ]
    report = run(tmp_path, rows)
    assert reasons(report["dropped"]) == {"nested_too_deep": (1, 1), "lone_surrogate": (1, 2)}
    dataset, tokenizer = PreparedDataset.open(tmp_path / "out"), make_tokenizer(CHATML)
    said = [tokenizer.decode(dataset[n].input_ids[dataset[n].loss_mask]) for n in range(2)]
    assert said == ["qz0PARTzq1qz, or 7583100000100<|im_end|>", "row<|im_end|>"]


def test_text_without_markers_has_to_be_supervised_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no_answer_markers_in_text 1"):
        run(tmp_path, [{"text": "Once upon a time"}])
    report = run(tmp_path, [{"text": "Once upon a time"}], mask=MaskOptions(supervise="all"))
    assert report["tokens"] == report["supervised_tokens"]


def test_token_rows_are_checked(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        [
            {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
            {"input_ids": [5, 6, 7], "loss_mask": [0, 1]},
            {"input_ids": [5, 6, 9999], "loss_mask": [0, 1, 1]},
            {"input_ids": [5, 6, 7], "loss_mask": [0, 2, 1]},
            {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
            {"input_ids": [5, 6, "x"], "loss_mask": [0, 0, 1]},
            {"input_ids": [], "loss_mask": []},
        ],
        template=None,
    )
    assert set(report["dropped"]) == {
        "mask_length_differs",
        "id_outside_vocabulary",
        "mask_not_0_or_1",
        "nothing_supervised",
        "bad_input_ids",
        "empty",
    }
    sample = PreparedDataset.open(tmp_path / "out")[0]
    assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == ([5, 6, 7], [False, True, True])


def test_the_folder_says_how_it_was_made_and_what_rows_each_file_has(tmp_path: Path) -> None:
    shown = {"text": "<|im_start|>assistant\nyo<|im_end|>"}
    files = [[row("a"), shown], [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}]]
    names = [write(tmp_path / f"{index}.jsonl", rows) for index, rows in enumerate(files)]
    options = PrepareOptions(truncation="left", mask=MaskOptions(reasoning=False))
    prepare(make_tokenizer(CHATML), names, tmp_path / "out", options)
    data = PreparedDataset.open(tmp_path / "out")
    assert data.meta["forms"] == [["chat", "text"], ["tokens"]]
    assert (data.meta["supervise"], data.meta["truncation"], data.meta["reasoning"]) == ("answers", "left", False)
    assert [data.has_own_mask(index) for index in range(len(data))] == [False, False, True]


def test_cut_on_either_side(tmp_path: Path) -> None:
    rows = [row("long " * 50, "a short answer")]
    with pytest.raises(DataError, match="all_supervision_truncated"):
        run(tmp_path, rows, max_length=30)
    report = run(tmp_path, rows, max_length=30, truncation="left")
    assert report["tokens"] == 30
    assert reasons(report["flagged"]) == {"truncated": (1, 1)}


def test_strict_and_unreadable_limits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 of 2 rows are dropped.*--strict"):
        run(tmp_path, [row("a"), {"messages": []}], strict=True)
    with pytest.raises(DataError, match=r"1 of 2 rows are unreadable, more than 1\.0%"):
        run(tmp_path, [row("a"), "{"], max_unreadable=0.01)
    with pytest.raises(DataError, match="add --regenerate"):
        run(tmp_path, [{"prompt": "Q"}])
    assert not (tmp_path / "out" / "meta.json").exists()


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the columns answer, id are not read .*rename .* or .* --regenerate"):
        run(tmp_path, [{"question": "Q", "answer": "A", "id": 1}])
    with pytest.raises(DataError, match=r"unknown_shape: id, b 1.*known are messages"):
        run(tmp_path, [{"id": 1, "b": 2}])
    report = run(tmp_path, [{**row("a"), "score": 1}, row("b")])
    assert report["columns_not_read"] == {"score": 0.5}


def test_heldout_prompts_never_occur_in_training(tmp_path: Path) -> None:
    rows = [row(f"question {n % 50}", f"answer {n}") for n in range(200)]
    random.Random(0).shuffle(rows)
    report = run(tmp_path, rows, heldout=10)
    train, heldout = (PreparedDataset.open(tmp_path / "out" / name) for name in ("", "heldout"))
    assert (len(train), len(heldout), report["rows_out"]) == (160, 40, 200)
    prompts = [json.loads(line)["turns"] for line in (tmp_path / "out/heldout/prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == 10
    tokenizer = make_tokenizer(CHATML)
    asked = {tokenizer.decode(train[n].input_ids).split("\n")[1].removesuffix("<|im_end|>") for n in range(160)}
    held = {tokenizer.decode(heldout[n].input_ids).split("\n")[1].removesuffix("<|im_end|>") for n in range(40)}
    assert held == {prompt[0] for prompt in prompts}
    assert not asked & held
    assert np.intersect1d(train.rows["prompt_hash"], heldout.rows["prompt_hash"]).size == 0


def test_choice_of_heldout_prompts_does_not_depend_on_order(tmp_path: Path) -> None:
    rows = [row(f"question {n}") for n in range(30)]
    chosen = []
    for order in (rows, rows[::-1]):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        run(tmp_path, order, heldout=5)
        chosen.append((tmp_path / "out/heldout/prompts.jsonl").read_text())
    assert chosen[0] == chosen[1]


def test_same_call_is_a_hit_and_any_change_a_miss(tmp_path: Path) -> None:
    rows = [row("one", "two")]
    run(tmp_path, rows)
    written = (tmp_path / "out/input_ids.bin").stat().st_mtime_ns
    run(tmp_path, rows)
    assert (tmp_path / "out/input_ids.bin").stat().st_mtime_ns == written
    prints = {PreparedDataset.open(tmp_path / "out").fingerprint}
    for change in (
        {"rows": [row("one", "twp")]},  # the size of the file stays
        {"template": CHATML.replace("\\n", "\\t")},
        {"max_length": 99},
        {"mask": MaskOptions(supervise="last")},
        {"template_options": {"enable_thinking": False}},
    ):
        with pytest.raises(DataError, match="prepared from other files, with other options"):
            run(tmp_path, **{"rows": rows, **change})
        shutil.rmtree(tmp_path / "out")
        run(tmp_path, **{"rows": rows, **change})
        prints.add(PreparedDataset.open(tmp_path / "out").fingerprint)
    assert len(prints) == 6


def test_interrupted_run_goes_on_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.data.prepare._CHUNK_ROWS", 16)
    monkeypatch.setattr("draftline.data.prepare._SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    rows = [row(f"question {n % 70}", f"answer {n % 90}") for n in range(100)]
    data = write(tmp_path / "data.jsonl", rows)
    tokenizer, options = make_tokenizer(CHATML), PrepareOptions(heldout=7)
    whole = prepare(tokenizer, [data], tmp_path / "whole", options)

    def interrupt(_bytes: int, _total: int | None, rows_in: int, _tokens: int) -> None:
        if rows_in == 48:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="48 prepared rows"):
        prepare(tokenizer, [data], tmp_path / "out", options, progress=interrupt)
    with pytest.raises(DataError, match="is not a complete prepared data set"):
        PreparedDataset.open(tmp_path / "out")
    seen: list[int] = []
    report = prepare(
        tokenizer, [data], tmp_path / "out", options, progress=lambda _b, _t, rows_in, _k: seen.append(rows_in)
    )
    assert seen[0] == 64
    assert report == whole
    for name in ("input_ids.bin", "loss_mask.bin", "rows.npy", "heldout/input_ids.bin", "heldout/prompts.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out" / "partial").exists()


def test_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="holds no prepared data"):
        run(tmp_path, [row("a")])


def test_hidden_answers_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="loss mask cannot be found"):
        run(tmp_path, [row("a")], template="{% for m in messages %}{{ m['role'] }}{% endfor %}")


def test_answerer_replaces_the_answers(tmp_path: Path) -> None:
    class Parrot:
        settings = GenerationSettings()

        def identity(self) -> dict[str, object]:
            return {"who": "parrot"}

        def __call__(self, conversations: Sequence[Conversation]) -> list[Conversation]:
            return [
                Conversation(messages=(c.messages[0], Message(role="assistant", content=c.messages[0].content)))
                for c in conversations
            ]

    data = write(tmp_path / "data.jsonl", [{"turns": ["Q1"]}, row("Q2", "not this"), {"messages": []}])
    report = prepare(make_tokenizer(CHATML), [data], tmp_path / "out", PrepareOptions(), Parrot())
    dataset, tokenizer = PreparedDataset.open(tmp_path / "out"), make_tokenizer(CHATML)
    assert [tokenizer.decode(dataset[n].input_ids[dataset[n].loss_mask]) for n in range(2)] == [
        "Q1<|im_end|>",
        "Q2<|im_end|>",
    ]
    assert reasons(report["dropped"]) == {"empty": (1, 3)}


class Counting:
    """Answers everything with one letter, and keeps what it was asked, with the number of the sample."""

    def __init__(self, settings: GenerationSettings | None = None) -> None:
        self.settings = settings or GenerationSettings()
        self.asked: list[tuple[str, int]] = []

    def identity(self) -> dict[str, object]:
        return {}

    def __call__(self, conversations: Sequence[Conversation]) -> list[Conversation]:
        self.asked += [(c.messages[0].content, c.sample) for c in conversations]
        answer = Message(role="assistant", content="a")
        return [Conversation(messages=(c.messages[0], answer), sample=c.sample) for c in conversations]


def test_rows_that_ask_the_same_are_one_prompt(tmp_path: Path) -> None:
    counting = Counting()
    data = write(tmp_path / "data.jsonl", [row("same", f"old {n}") for n in range(10)])
    report = prepare(make_tokenizer(CHATML), [data], tmp_path / "out", PrepareOptions(), counting)
    assert (len(counting.asked), report["rows_out"], reasons(report["dropped"])) == (1, 1, {"duplicate": (9, 2)})


def test_a_prompt_is_asked_once_for_each_sample(tmp_path: Path) -> None:
    sampled = GenerationSettings(answers_per_prompt=3, sampling=Sampling(temperature=1.0))
    counting = Counting(sampled)
    data = write(tmp_path / "data.jsonl", [*(row("same", f"old {n}") for n in range(10)), row("other")])
    report = prepare(make_tokenizer(CHATML), [data], tmp_path / "out", PrepareOptions(heldout=1), counting)
    assert counting.asked == [("same", 0), ("same", 1), ("same", 2), ("other", 0), ("other", 1), ("other", 2)]
    assert (report["rows_in"], report["rows_out"], reasons(report["dropped"])) == (33, 6, {"duplicate": (27, 2)})
    # all samples of a prompt fall on one side
    assert len(PreparedDataset.open(tmp_path / "out")) == len(PreparedDataset.open(tmp_path / "out/heldout")) == 3
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert (meta["answers_per_prompt"], meta["sampling"]) == (3, {"temperature": 1.0, "top_p": 1.0, "top_k": 0})


def test_a_system_prompt_is_for_conversations_without_one(tmp_path: Path) -> None:
    own = {"messages": [{"role": "system", "content": "Mine."}, *row("b")["messages"]]}
    data = write(tmp_path / "data.jsonl", [row("a"), own])
    prepare(make_tokenizer(CHATML), [data], tmp_path / "out", PrepareOptions(system_prompt="Be brief."))
    dataset, tokenizer = PreparedDataset.open(tmp_path / "out"), make_tokenizer(CHATML)
    texts = [tokenizer.decode(dataset[n].input_ids) for n in range(2)]
    assert ["Be brief." in text for text in texts] == [True, False]
    assert "Mine." in texts[1]


def test_a_dialogue_that_ends_because_no_call_was_read_is_noted(tmp_path: Path) -> None:
    class Talker:
        settings = GenerationSettings()

        def identity(self) -> dict[str, object]:
            return {}

        def __call__(self, conversations: Sequence[Conversation]) -> list[Conversation]:
            return [
                Conversation(messages=(c.messages[0], Message(role="assistant", content="a"))) for c in conversations
            ]

    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [{"messages": [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "7"}]}, row("other")]
    report = prepare(
        make_tokenizer(CHATML), [write(tmp_path / "data.jsonl", rows)], tmp_path / "out", PrepareOptions(), Talker()
    )
    assert reasons(report["flagged"])["ended_before_a_result_without_a_call"] == (1, 1)


def test_shares_are_reported(tmp_path: Path) -> None:
    thinking = row("b", "так", reasoning_content="hm")
    report = run(tmp_path, [row("a"), thinking, row("a")], template=THINKING)
    assert report["thinking"] == {"without_reasoning": 1, "with_reasoning": 1}
    assert report["scripts"] == {"latin": 1, "cyrillic": 1}
    assert report["lengths"] == {"<= 128": 2}
    assert report["duplicate_share"] == pytest.approx(1 / 3)
    assert report["supervised_share"] == report["supervised_tokens"] / report["tokens"]


def test_ten_thousand_mutated_lines_never_raise(tmp_path: Path) -> None:
    """Characters of good rows of every shape are changed, removed, doubled; each row is still out or counted."""
    chooser = random.Random(7)
    good = [
        json.dumps(value)
        for value in (
            row("a", "b", reasoning_content="c", weight=1),
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant"}]},
            {"messages": row("a")["messages"], "tools": [{"name": "f", "parameters": {}}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
            {"instruction": "a", "input": "b", "output": "c"},
            {"text": "<|im_start|>assistant\nyo<|im_end|>"},
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        )
    ]
    lines = []
    for _ in range(10_000):
        line = list(chooser.choice(good))
        for _ in range(chooser.randint(1, 4)):
            at = chooser.randrange(len(line))
            change = chooser.choice(
                ['"', "{", "}", "[", "]", ",", ":", "0", "-1", "null", "true", "\\u0000", "\\ud800", "é"]
            )
            line[at : at + chooser.randint(0, 2)] = [change] * chooser.randint(0, 2)
            line = line or ["x"]
        lines.append("".join(line))
    report = run(tmp_path, lines, template=THINKING, deduplicate=False)
    assert report["rows_in"] == sum(bool(line.strip()) for line in lines)
    assert report["rows_in"] == report["rows_out"] + sum(entry["count"] for entry in report["dropped"].values())
    assert report["rows_out"] > 500


def test_rows_that_need_no_template_need_no_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    data = write(tmp_path / "ids.jsonl", [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"turns": ["hi"]}])
    report = prepare(tokenizer, [data], tmp_path / "ids", PrepareOptions())
    assert (report["rows_out"], list(report["dropped"])) == (1, ["no_chat_template"])
    texts = write(tmp_path / "texts.jsonl", [{"text": "The answer."}])
    with pytest.raises(DataError, match="learn all text with --supervise all"):
        prepare(tokenizer, [texts], tmp_path / "texts", PrepareOptions())
    whole = PrepareOptions(mask=MaskOptions(supervise="all"))
    prepare(tokenizer, [texts], tmp_path / "texts", whole)
    assert PreparedDataset.open(tmp_path / "texts").arrays(0)[1].all()
    chats = write(tmp_path / "chats.jsonl", [{"prompt": "hi", "completion": "yo"}])
    with pytest.raises(DataError, match="instruction-tuned version"):
        prepare(tokenizer, [chats], tmp_path / "chats", PrepareOptions())


def test_given_answers_are_those_of_the_data(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]} for n in range(5)
    ]
    rows = [{"prompt": "no answer"}, *chats]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    tokenizer = make_tokenizer(CHATML)
    samples = given_samples(tokenizer, [str(tmp_path / "data.jsonl")], PrepareOptions(), 3)
    assert ["q0" in tokenizer.decode(samples[0].input_ids), len(samples)] == [True, 3]
    assert tokenizer.decode(samples[2].input_ids[samples[2].loss_mask]) == "a<|im_end|>"


def test_full_disk_says_that_the_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(GEMMA)
    data = write(tmp_path / "data.jsonl", [{"prompt": "hi", "completion": "yo"}])

    def refuse(_: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match=r"No space left.*is kept in .*partial, and the same command goes on"):
            prepare(tokenizer, [data], tmp_path / "out", PrepareOptions())
    assert prepare(tokenizer, [data], tmp_path / "out", PrepareOptions())["rows_out"] == 1


def test_a_damaged_archive_is_an_error_unless_allowed(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{n * n} {n % 7}", "completion": "yo"}) + "\n" for n in range(3000))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(rows.encode())[:-2000])
    data, tokenizer = [str(tmp_path / "cut.gz")], make_tokenizer(GEMMA)
    with pytest.raises(DataError, match=r"cut.gz is damaged from line \d+ on.*--max-unreadable 1"):
        prepare(tokenizer, data, tmp_path / "out", PrepareOptions(max_unreadable=0.5))
    report = prepare(tokenizer, data, tmp_path / "out", PrepareOptions(max_unreadable=1))
    assert report["dropped"]["damaged_file"]["first_line"] == report["rows_in"]
