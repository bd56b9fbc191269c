"""Drafters with a reduced vocabulary: written for speculators and vLLM, read back, and refused where nothing fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel as TheirModel
from speculators.models.dflash import DFlashSpeculatorConfig
from torch import Tensor

from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, ExportError
from draftline.formats import files as folder_module
from draftline.formats.exporting import export_drafter, import_drafter
from draftline.formats.load import load_drafter
from draftline.formats.write import export_speculators, export_zlab
from draftline.options import ExportSettings
from draftline.targets.model import save_target
from tests.formats.drafters import MIX, make_drafter, make_target

KEPT = torch.tensor([2, 3, 5, 8, 13, 21, 34])
TARGET = make_target()
Tensors = dict[str, Tensor]


def reduced_drafter(**changes: Any) -> DFlashDraftModel:
    model = make_drafter(draft_vocab_size=len(KEPT), **changes)
    model.keep_tokens(KEPT)
    return model


def export(folder: Path, model: DFlashDraftModel | None = None, dtype: Any = "float32") -> Path:
    export_speculators(model or reduced_drafter(), folder, dtype, verifier="a/target", target_head=TARGET.head)
    return folder


def test_speculators_loads_it_with_the_targets_rows_and_our_tokens(tmp_path: Path) -> None:
    save_target(TARGET, tmp_path / "target")
    export_speculators(
        reduced_drafter(), tmp_path / "drafter", "float32", verifier=str(tmp_path / "target"), target_head=TARGET.head
    )
    config = DFlashSpeculatorConfig.from_pretrained(tmp_path / "drafter")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = TheirModel.from_pretrained(tmp_path / "drafter", config=config).eval()
    rows = TARGET.head.lm_head.get_parameter("weight")[KEPT]
    assert torch.equal(theirs.lm_head.weight, rows)
    assert torch.equal(theirs.verifier_lm_head.weight, rows)  # chosen by t2d from the target's own file
    assert (torch.arange(len(KEPT)) + theirs.d2t).tolist() == KEPT.tolist()
    assert theirs.t2d.nonzero()[:, 0].tolist() == KEPT.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("anchor", [False, True])
def test_round_trip_is_bit_equal(tmp_path: Path, dtype: str, anchor: bool) -> None:
    model = reduced_drafter(sample_from_anchor=anchor)
    first = load_file(export(tmp_path / "first", model, dtype) / "model.safetensors")
    loaded = load_drafter(tmp_path / "first", target=TARGET)
    assert loaded.config == model.config
    assert loaded.export_dtype == dtype
    assert loaded.draft_model.kept_ids is not None
    assert loaded.draft_model.kept_ids.tolist() == KEPT.tolist()
    report = import_drafter(source=tmp_path / "first", out=tmp_path / "second", target=TARGET)
    assert report.format == "speculators"
    second = load_file(tmp_path / "second" / "model.safetensors")
    assert first.keys() == second.keys() >= {"d2t", "t2d", "lm_head.weight"}
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_vllm_gets_the_form_that_it_reads(tmp_path: Path) -> None:
    """Its rule: target id = row + d2t[row], logits of all others minus infinity, the head from the file."""
    source = export(tmp_path / "source")
    report = export_drafter(
        source=source,
        out=tmp_path / "out",
        target=TARGET,
        settings=ExportSettings(reader="vllm", dtype="float32", target_path="a/target"),
    )
    assert report.format == "speculators"
    assert "draft-model" in (tmp_path / "out" / "README.md").read_text()
    assert "7 tokens can be drafted" in (tmp_path / "out" / "README.md").read_text()
    assert any("Of 40 tokens 7" in note for note in report.notes)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tree["draft_vocab_size"] == len(tensors["d2t"]) == len(tensors["lm_head.weight"]) == 7
    states = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    whole = torch.full((4, 40), float("-inf"))
    whole[:, torch.arange(7) + tensors["d2t"]] = states @ tensors["lm_head.weight"].T
    torch.testing.assert_close(whole[:, KEPT], TARGET.head.logits(states)[:, KEPT])
    assert whole.isfinite().sum() == 4 * 7


@pytest.mark.parametrize("reader", ["zlab", "sglang", "llama.cpp"])
def test_formats_without_a_place_for_it_refuse_in_one_line(tmp_path: Path, reader: Any) -> None:
    source = export(tmp_path / "source")
    with pytest.raises(ExportError, match="z-lab's format has no place for a reduced vocabulary") as caught:
        export_drafter(source=source, out=tmp_path / "out", target=TARGET, settings=ExportSettings(reader=reader))
    assert "--for vllm" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ExportError, match="reduced vocabulary"):
        export_zlab(reduced_drafter(), tmp_path / "out", "bfloat16")
    with pytest.raises(ExportError, match=r"stores rows of the target's head.*--target"):
        import_drafter(source=source, out=tmp_path / "out")
    with pytest.raises(ExportError, match="train without drafter"):
        export(tmp_path / "out", reduced_drafter(**MIX))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str, str]] = {
    "absolute ids": (lambda t: {**t, "d2t": KEPT}, "d2t reads back", "where offsets id - row are wanted"),
    "unsorted": (lambda t: {**t, "d2t": t["d2t"].flip(0)}, "d2t reads back", "do not increase"),
    "t2d of others": (lambda t: {**t, "t2d": t["t2d"].roll(1)}, "t2d reads back", "t2d and d2t keep different tokens"),
    "no t2d": (lambda t: {n: v for n, v in t.items() if n != "t2d"}, "in name: t2d", "misses t2d"),
    "no d2t": (lambda t: {n: v for n, v in t.items() if n != "d2t"}, "in name: d2t", "misses 1 tensors, first d2t"),
    "head of others": (
        lambda t: {**t, "lm_head.weight": t["lm_head.weight"].roll(1, 0)},
        "lm_head.weight reads back",
        "lm_head.weight is not that of small-target",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_tensor_is_caught_by_the_export_and_by_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    edit, caught_by_export, caught_by_reader = FAULTS[fault]
    path = export(tmp_path / "drafter") / "model.safetensors"
    save_file(edit(load_file(path)), path)
    with pytest.raises(CheckpointError, match=caught_by_reader):
        load_drafter(tmp_path / "drafter", target=TARGET)
    monkeypatch.setattr(
        folder_module, "save_file", lambda tensors, path, metadata: save_file(edit(tensors), path, metadata)
    )
    with pytest.raises(ExportError, match=caught_by_export):
        export(tmp_path / "other")


def test_a_mapping_beside_a_whole_vocabulary_is_refused(tmp_path: Path) -> None:
    path = export(tmp_path / "drafter") / "config.json"
    path.write_text(path.read_text().replace('"draft_vocab_size": 7', '"draft_vocab_size": 40'))
    with pytest.raises(CheckpointError, match="knows of none"):
        load_drafter(tmp_path / "drafter", target=TARGET)
