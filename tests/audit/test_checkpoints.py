"""Finished folders of other trainers: what the audit says about each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftline.audit.report import AuditReport, audit_checkpoint
from draftline.config import ExportDtype
from draftline.formats.write import export_zlab
from draftline.options import Given
from draftline.targets.layers import default_target_layer_ids
from tests.formats.checkpoints import CONTRACTS, Tree, modelopt_sliding, tensors_of, write
from tests.formats.drafters import make_drafter, make_target

AREAS = ("EXP", "DRF009", "DRF012")
GIVEN = Given(sample_from_anchor=None, num_target_layers=7)


def _audit(tmp_path: Path, form: str, tree: Tree, given: Given | None = None) -> AuditReport:
    target = make_target()
    table = target.embedding.get_parameter("weight").detach().clone()
    tensors = tensors_of(form, make_drafter(), table)
    return audit_checkpoint(write(tmp_path / "drafter", tree, tensors), target, given, select=AREAS)


def _codes(report: AuditReport, severity: str) -> set[str]:
    return {finding.code for finding in report.findings if finding.severity == severity}


def _said(report: AuditReport) -> str:
    return "\n".join([*report.notes, *(f"{f.code} {f.evidence}" for f in report.findings)])


def test_a_folder_of_ours_has_no_error(tmp_path: Path) -> None:
    report = _audit(tmp_path, "zlab", CONTRACTS["zlab"]())
    assert _codes(report, "error") == set()
    assert "vLLM: layers [1, 3, 4], blocks of 4, bidirectional; never reads block_size" in _said(report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_export_passes_the_whole_audit(tmp_path: Path, dtype: ExportDtype) -> None:
    export_zlab(make_drafter(), tmp_path / "drafter", dtype)
    report = audit_checkpoint(tmp_path / "drafter", make_target())
    assert _codes(report, "error") == set(), _said(report)
    assert {result.status for result in report.checks if result.code == "EVL004"} == {"ok"}


def test_specforge_works_but_points_at_a_missing_file(tmp_path: Path) -> None:
    report = _audit(tmp_path, "specforge", CONTRACTS["specforge"]())
    assert _codes(report, "error") == set()
    assert "EXP010" in _codes(report, "warning")
    assert "auto_map" in _said(report)
    assert "trained on the tokens of the data" in _said(report)


def test_nemo_has_an_architecture_that_readers_do_not_know(tmp_path: Path) -> None:
    report = _audit(tmp_path, "nemo", CONTRACTS["nemo"]())
    assert "EXP011" in _codes(report, "error")
    assert "Qwen3DFlashDraftModel" in _said(report)


def test_modelopts_window_is_lost(tmp_path: Path) -> None:
    report = _audit(tmp_path, "modelopt", modelopt_sliding())
    assert "EXP005" in _codes(report, "error")
    assert "ignores dflash_config.use_swa" in _said(report)


def test_a_window_that_is_not_switched_on_is_lost(tmp_path: Path) -> None:
    """transformers, through which programs read, forgets `sliding_window` without `use_sliding_window`."""
    tree = CONTRACTS["zlab"]() | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    del tree["use_sliding_window"], tree["is_causal"]
    report = _audit(tmp_path, "zlab", tree)
    assert "EXP005" in _codes(report, "error")
    assert "z-lab reads windows [None, None], trained with [6, None]" in _said(report)


def test_torchspecs_tensors_have_other_names(tmp_path: Path) -> None:
    report = _audit(tmp_path, "torchspec", CONTRACTS["torchspec"]())
    assert "EXP001" in _codes(report, "error")
    assert "context_proj.weight" in _said(report)
    assert "draftline import" in _said(report)


def test_vllm_runs_a_speculators_folder_causally(tmp_path: Path) -> None:
    report = _audit(tmp_path, "speculators", CONTRACTS["speculators"]())
    assert "EXP004" in _codes(report, "error")
    assert "count from the embedding: outputs of layers [1, 3, 4]" in _said(report)
    assert "vLLM reads causal [True, True], trained with [False, False]" in _said(report)


def test_a_bidirectional_flag_fixes_it(tmp_path: Path) -> None:
    report = _audit(tmp_path, "speculators", {**CONTRACTS["speculators"](), "sliding_window_non_causal": True})
    assert _codes(report, "error") == set()


def test_a_flag_that_is_not_written_is_bidirectional_in_vllm_and_worth_a_warning(tmp_path: Path) -> None:
    tree = CONTRACTS["speculators"]()
    del tree["sliding_window_non_causal"]
    report = _audit(tmp_path, "speculators", tree)
    assert "EXP004" not in _codes(report, "error")
    assert "EXP004" in _codes(report, "warning")


def test_layer_types_that_are_not_written_are_read_as_transformers_fills_them_in(tmp_path: Path) -> None:
    tree = CONTRACTS["zlab"]() | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    del tree["layer_types"], tree["is_causal"]
    report = _audit(tmp_path, "zlab", tree)
    assert _codes(report, "error") == set(), _said(report)
    assert "assumes a window in 1 of 2 layers" in _said(report)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 32}, "do not belong together"),
        ({"num_target_layers": 12}, "layers 12, small-target has 7"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 adds"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(tmp_path: Path, change: Tree, words: str) -> None:
    report = _audit(tmp_path, "zlab", {**CONTRACTS["zlab"](), **change})
    assert [finding.code for finding in report.findings] == ["EXP013"]
    assert words in report.findings[0].evidence
    assert report.exit_status == 1


def test_weights_that_are_not_finite_end_the_audit(tmp_path: Path) -> None:
    tensors = tensors_of("zlab", make_drafter(), torch.zeros(0))
    tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], torch.nan)
    report = audit_checkpoint(write(tmp_path / "drafter", CONTRACTS["zlab"](), tensors), make_target())
    assert [(f.code, f.severity) for f in report.findings] == [("EXP013", "error")]
    assert "not finite, first norm.weight" in report.findings[0].evidence


def test_a_dtype_that_is_not_the_weights_is_a_finding(tmp_path: Path) -> None:
    report = _audit(tmp_path, "zlab", CONTRACTS["zlab"]() | {"dtype": "float16"})
    assert [(f.code, f.severity) for f in report.findings] == [("EXP013", "error")]
    assert "dtype is 'float16'" in report.findings[0].evidence


def test_a_depth_that_is_missing_is_asked_of_the_target(tmp_path: Path) -> None:
    tree = CONTRACTS["zlab"]()
    del tree["num_target_layers"]
    report = _audit(tmp_path, "zlab", tree)
    assert "EXP002" in _codes(report, "error")
    assert "num_target_layers" in _said(report)


@pytest.mark.parametrize(("shift", "codes"), [(0, set()), (1, {"EXP003"})])
def test_the_usual_layers_but_for_a_shift_are_suspected(tmp_path: Path, shift: int, codes: set[str]) -> None:
    tree, target = CONTRACTS["zlab"](), make_target()
    usual = default_target_layer_ids(target.num_layers, 3)
    tree["dflash_config"]["target_layer_ids"] = [i + shift for i in usual]
    assert _codes(_audit(tmp_path, "zlab", tree), "warning") & {"EXP003"} == codes
