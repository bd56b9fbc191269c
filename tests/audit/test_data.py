"""Data as people prepare it gives no finding about where answers begin; a mask that is out of place does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from draftline.audit import run_audit
from draftline.audit.subject import AuditSubject, subject_to_come
from draftline.config import load_run_config
from draftline.data.dataset import PreparedDataset
from draftline.data.prepare import prepare
from draftline.options import MaskOptions, PrepareOptions
from draftline.records import Sample
from draftline.targets.model import Target, build_target
from tests.data.chat_tokenizers import CHATML, TEMPLATES, THINKING, make_tokenizer, sentencepiece_tokenizer
from tests.engine.tiny_target import tiny_target
from tests.run.small_run import SETTINGS

EVERYTHING, NO_REASONING = MaskOptions(supervise="all"), MaskOptions(reasoning=False)


def asked(number: int, *answers: str, **more: str) -> dict[str, Any]:
    """A conversation with some answers of the assistant."""
    messages = []
    for turn, answer in enumerate(answers):
        messages.append({"role": "user", "content": f"What is {number} and {turn}?"})
        messages.append({"role": "assistant", "content": answer, **more})
    return {"messages": messages}


CHATS = [asked(number, f"It is {number}, the answer.", "Fine: I said so before.") for number in range(20)]
NEWLINES = [asked(number, "\n" * (1 + number % 3) + f"It is {number}.\n\nFine.") for number in range(20)]
THOUGHTS = [asked(number, f"<think>\nI count to {number}.\n</think>\n\nIt is {number}.") for number in range(20)]
LONG = [asked(number, f"The answer is {number}. " * (1 + number)) for number in range(20)]
TEXTS = [
    {"text": f"<|im_start|>user\nWhat is {n}?<|im_end|>\n<|im_start|>assistant\n\nIt is {n}<|im_end|>\n"}
    for n in range(20)
]
STORIES = [{"text": f"Story {number}: the city was fine, and the weather too."} for number in range(20)]
TOKENS = [{"input_ids": [30 + number, *range(40, 60)], "loss_mask": [0] * 9 + [1] * 12} for number in range(20)]


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def subject(
    folder: Path,
    *files: Sequence[object],
    template: str | None = CHATML,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **options: Any,
) -> AuditSubject:
    """A run to come on these rows, prepared with these options."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizer or make_tokenizer(template)
    names = [write(folder / f"{index}.jsonl", rows) for index, rows in enumerate(files)]
    prepare(tokenizer, names, folder / "out", PrepareOptions(**options))
    return opened(folder / "out", tokenizer)


def opened(folder: Path, tokenizer: PreTrainedTokenizerFast) -> AuditSubject:
    words = [f"data.path={folder}", f"drafter.mask_token_id={len(tokenizer)}"]
    return subject_to_come(load_run_config(None, [*SETTINGS, *words]), target_with(tokenizer))


def target_with(tokenizer: PreTrainedTokenizerFast) -> Target:
    small = tiny_target().model.config.to_dict()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(**{**small, "vocab_size": len(tokenizer) + 1, "max_position_embeddings": 4096})
    )
    return replace(build_target("prepared", model, None), tokenizer=tokenizer)


def found(given: AuditSubject, code: str = "DAT003") -> list[tuple[str, str]]:
    report = run_audit(given, (code,))
    assert not report.not_examined, report.checks
    return [(finding.code, finding.evidence) for finding in report.findings]


def examined(given: AuditSubject, code: str = "DAT003") -> bool:
    return [result.status for result in run_audit(given, (code,)).checks] != ["skipped"]


@dataclass(frozen=True)
class Kind:
    """A way to prepare data that people use.

    Attributes:
        files: rows of each file.
        options: of `prepare`.
        examined: whether there is anything that the template could say of where supervised spans begin.
    """

    files: tuple[Sequence[object], ...]
    options: dict[str, Any]
    examined: bool = True


KINDS = {
    "chats": Kind((CHATS,), {}),
    "only the last answer": Kind((CHATS,), {"mask": MaskOptions(supervise="last")}),
    "all of chats": Kind((CHATS,), {"mask": EVERYTHING}),
    "cut on the left": Kind((LONG,), {"truncation": "left", "max_length": 40}),
    "cut on the right": Kind((LONG,), {"max_length": 60}),
    "answers that begin with newlines": Kind((NEWLINES,), {}),
    "text that went through the template": Kind((TEXTS,), {}),
    "plain text": Kind((STORIES,), {"mask": EVERYTHING}),
    "token ids": Kind((TOKENS,), {}, examined=False),
    "all of token ids": Kind((TOKENS,), {"mask": EVERYTHING}),
    "token ids beside chats": Kind((CHATS, TOKENS), {}),
    "text beside chats": Kind((CHATS, TEXTS), {}),
}


@pytest.mark.parametrize("name", KINDS)
def test_data_that_is_prepared_as_asked_gives_no_finding(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    given = subject(tmp_path, *kind.files, **kind.options)
    assert found(given) == []
    assert examined(given) == kind.examined


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("rows", [CHATS, NEWLINES, THOUGHTS], ids=["plain", "newlines", "thoughts"])
def test_every_style_of_template_gives_no_finding(name: str, rows: Sequence[object], tmp_path: Path) -> None:
    given = subject(tmp_path, rows, template=TEMPLATES[name][0])
    assert found(given) == []
    assert examined(given)
    assert found(subject(tmp_path / "cut", rows, template=TEMPLATES[name][0], truncation="left", max_length=24)) == []


def test_a_tokenizer_that_writes_spaces_as_marks_gives_no_finding(tmp_path: Path) -> None:
    assert found(subject(tmp_path, NEWLINES, tokenizer=sentencepiece_tokenizer(CHATML))) == []


@pytest.mark.parametrize("template", [CHATML, THINKING], ids=["kept as text", "split off"])
def test_reasoning_that_is_not_learned_gives_no_finding(template: str, tmp_path: Path) -> None:
    given = subject(tmp_path, [*THOUGHTS, *CHATS], template=template, mask=NO_REASONING)
    assert examined(given)
    assert found(given) == []


def test_options_of_the_template_are_those_of_the_data(tmp_path: Path) -> None:
    switched = CHATML.replace(
        "assistant\\n' }}{% endif", "assistant\\n' }}{% if quick %}{{ '[quick]' }}{% endif %}{% endif"
    )
    switched = switched.replace(
        "+ m['content'] +", "+ ('[quick]' if quick and m['role'] == 'assistant' else '') + m['content'] +"
    )
    rows = [{**row, "chat_template_kwargs": {"quick": True}} for row in CHATS]
    assert found(subject(tmp_path / "rows", rows, template=switched)) == []
    assert found(subject(tmp_path / "all", CHATS, template=switched, template_options={"quick": True})) == []


def shifted(folder: Path, by: int, tokenizer: PreTrainedTokenizerFast) -> AuditSubject:
    """The same prepared folder with masks that begin so many tokens earlier."""
    data = PreparedDataset.open(folder)
    mask = np.fromfile(folder / "loss_mask.bin", np.uint8)
    for row in data.rows:
        part = mask[int(row["start"]) : int(row["start"]) + int(row["length"])]
        part[:-by] |= part[by:].copy()
    mask.tofile(folder / "loss_mask.bin")
    return opened(folder, tokenizer)


@pytest.mark.parametrize("by", [1, 2])
@pytest.mark.parametrize(
    "name", ["chats", "cut on the left", "answers that begin with newlines", "token ids beside chats"]
)
def test_a_mask_that_begins_early_is_found(name: str, by: int, tmp_path: Path) -> None:
    kind = KINDS[name]
    subject(tmp_path, *kind.files, **kind.options)
    [(code, _)] = found(shifted(tmp_path / "out", by, make_tokenizer(CHATML)))
    assert code == "DAT003"


def test_a_part_that_is_not_learned_is_found_where_all_should_be(tmp_path: Path) -> None:
    given = subject(tmp_path, CHATS, mask=EVERYTHING)
    assert given.data is not None

    def without_the_last(sample: Sample) -> Sample:
        return replace(sample, loss_mask=torch.arange(len(sample)) < len(sample) - 1)

    data = replace(given.data, samples=[without_the_last(sample) for sample in given.data.samples])
    [(_, evidence)] = found(replace(given, data=data))
    assert "--supervise all" in evidence


def test_data_of_an_older_version_that_may_hold_token_ids_is_not_judged(tmp_path: Path) -> None:
    older = subject(tmp_path / "older", TOKENS, CHATS)
    assert older.data is not None
    meta = {key: value for key, value in older.data.meta.items() if key not in ("forms", "truncation", "reasoning")}
    assert not examined(replace(older, data=replace(older.data, meta=meta, own_masks=frozenset())))


def test_short_answers_to_long_prompts_are_no_error(tmp_path: Path) -> None:
    rows = [asked(number, "Yes.") for number in range(20)]
    for row in rows:
        row["messages"][0]["content"] *= 60
    [finding] = run_audit(subject(tmp_path, rows), ("DAT002",)).findings
    assert finding.severity == "warning"


@pytest.mark.parametrize("code", ["DAT004", "DAT005"])
def test_ends_and_own_answers_are_not_looked_for_in_whole_texts(code: str, tmp_path: Path) -> None:
    given = subject(tmp_path, STORIES, mask=EVERYTHING)
    assert found(given, code) == []
    assert not examined(given, code)


def test_sampled_answers_are_named_with_what_they_mean(tmp_path: Path) -> None:
    """Whatever share of them is the target's own, and equal samples of one prompt are no copies to be removed."""
    subject(tmp_path, CHATS)
    meta = tmp_path / "out/meta.json"
    assert json.loads(meta.read_text())["sampling"] is None
    sampled = {"sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 0}, "answers_per_prompt": 4}
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **sampled}))
    given = opened(tmp_path / "out", make_tokenizer(CHATML))
    (finding,) = run_audit(given, ("DAT005",)).findings
    assert finding.severity == "warning"
    assert finding.evidence.startswith(
        "the answers were sampled (temperature 0.7, top-p 0.9): its greedy token is that of"
    )
    assert "--temperature" in finding.fix
    assert found(given, "DAT007") == []
