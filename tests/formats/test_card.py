"""What the card says of a drafter, and what programs of Draftline read from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from draftline.data.accounting import ChatMode
from draftline.data.dataset import PreparedDataset
from draftline.formats.card import trained_mode
from draftline.formats.exporting import export_drafter
from draftline.formats.proof import ProofPrompts
from draftline.options import ExportSettings, Results
from tests.formats.drafters import (
    ALL_SLIDING,
    make_run,
    make_target,
)


def test_the_card_says_what_the_drafter_is_and_how_it_was_made(tmp_path: Path) -> None:
    evaluation, audit = tmp_path / "evaluation.json", tmp_path / "audit.json"
    rates = {"acceptance_rate_by_position": [0.8, 0.5], "conditional_acceptance_rate_by_position": [0.8, 0.625]}
    best = {"best_num_speculative_tokens": 3}
    evaluation.write_text(json.dumps({"acceptance_length": 2.3, "greedy_equal": 1.0, "speedup": None, **rates, **best}))
    finding = {"code": "LOS030", "severity": "warning", "title": "gamma | block", "evidence": "x", "fix": "y"}
    audit.write_text(json.dumps({"findings": [finding], "checks": [{"code": "LOS030"}, {"code": "DRF010"}]}))
    report = export_drafter(
        source=make_run(tmp_path / "run", **ALL_SLIDING),
        out=tmp_path / "out",
        target=make_target(),
        settings=ExportSettings(
            reader="vllm", target_path="a/target", results=Results(evaluation=evaluation, audit=audit)
        ),
    )
    assert sum("--num-speculative-tokens 3" in note for note in report.notes) == 1
    _, front, card = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["base_model"] == "a/target"
    assert fields["model-index"][0]["results"][0]["metrics"][0]["value"] == 2.3
    for words in (
        "| data | talks, fingerprint f1n9er |",
        "| steps | 12 |",
        "| tokens seen | 3456 |",
        "| weights | bfloat16 |",
        ": safe in float16",
        "with a window of 6 tokens, causal inside a block",
        "| acceptance length (with bonus) | 2.300 |",
        "| 2 | 0.500 | 0.625 |",
        "fastest on the machine of the evaluation | 3",
        "ran 2 checks and reported 1 findings",
        "| LOS030 | warning | gamma \\| block | allowed |",
        "Trained although the audit had found LOS030",
        "forward",
        "### vllm",
        "### llama.cpp",
    ):
        assert words in card, words
    assert str(tmp_path) not in card.replace(str(tmp_path / "out"), "")


def test_the_card_tells_what_the_audit_of_the_run_had_found(tmp_path: Path) -> None:
    source = make_run(tmp_path / "run")
    (source / "audit.json").write_text(json.dumps({"findings": [], "checks": [{"code": "LOS030"}]}))
    export_drafter(source=source, out=tmp_path / "out", target=make_target())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Before the first step `draftline audit` ran 1 checks and reported 0 findings" in card
    assert f"`draftline audit {tmp_path / 'out'} --target small-target`" in card


def test_the_modes_of_the_training_data_go_with_the_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, target = make_run(tmp_path / "run"), make_target()
    assert trained_mode(run) is None  # its data is gone
    meta = {"template_options": {"enable_thinking": True}}
    report = {"thinking": {"with_reasoning": 9}, "system_prompts": {"none": 9}, "template_options": {"{}": 9}}
    data = SimpleNamespace(meta=meta, report=report, fingerprint="f1n9er")
    monkeypatch.setattr(PreparedDataset, "open", lambda _path: data)
    prompts = ProofPrompts("random", [[1, 2, 3]])  # of data that is there only in name
    monkeypatch.setattr("draftline.formats.exporting.choose_prompts", lambda _source, _target: prompts)
    known = trained_mode(run)
    assert known == ChatMode({"with_reasoning": 9}, {"none": 9}, {'{"enable_thinking": true}': 9})
    export_drafter(source=run, out=tmp_path / "out", target=target, settings=ExportSettings(dtype="float32"))
    export_drafter(
        source=tmp_path / "out", out=tmp_path / "again", target=target, settings=ExportSettings(dtype="float32")
    )
    data.fingerprint = "other"
    assert trained_mode(run) is None
    assert trained_mode(tmp_path / "out") == trained_mode(tmp_path / "again") == known
    card = (tmp_path / "again" / "README.md").read_text()
    assert "| answers | 100% with_reasoning |" in card
    for text in ("# my own card\n", "---\ntags: [x]\n---\n", "---\ndraftline: 3\n---\n"):
        (tmp_path / "out" / "README.md").write_text(text)
        assert trained_mode(tmp_path / "out") is None
