"""The examples do what they say, on the embedded target."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.cli import run
from draftline.config import DrafterConfig, TargetConfig
from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from draftline.formats.write import export_zlab
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import load_target

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


def test_there_is_a_test_for_each() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"probe_layers.py", "decode.py", "test_my_drafter.py"}


def test_the_probe_of_a_later_layer_knows_more() -> None:
    shares = example("probe_layers.py")["main"]("tiny", [0, 6], steps=25)
    assert shares[6] > shares[0] + 0.1


def test_decoding_with_a_drafter_gives_the_same_answer(tmp_path: Path) -> None:
    target = load_target(TargetConfig(name="tiny"))
    drafter = DFlashDraftModel(resolve_drafter_config(target, DrafterConfig(), frozenset()))
    drafter.init_weights(torch.Generator().manual_seed(0))
    export_zlab(drafter, tmp_path / "drafter", "float32")
    main = example("decode.py")["main"]
    drafted, plain, text = main("tiny", str(tmp_path / "drafter"), "How many apples are left?", max_new_tokens=12)
    assert drafted.output_ids == plain.output_ids
    assert len(drafted.output_ids) == 12
    assert text


def test_the_audit_in_a_suite_passes_and_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {n}."},
                {"role": "assistant", "content": "one, two, three"},
            ]
        }
        for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["prepare", "--target", "tiny", "--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "data")]
    assert run(words) == 0
    monkeypatch.setenv("MY_TARGET", "tiny")
    monkeypatch.setenv("MY_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("MY_CHECKS", "TGT001 DRF006")
    check = example("test_my_drafter.py")["test_my_run_trains_what_will_be_served"]
    check()
    clean = BlockLayout.position_ids_Q.fget
    monkeypatch.setattr(BlockLayout, "position_ids_Q", property(lambda layout: clean(layout) + 1))
    with pytest.raises(AssertionError, match="DRF006"):
        check()
