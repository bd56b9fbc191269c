"""Finished folders that were edited after their export, each under the code that must name it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from draftline.audit.report import AuditReport, audit_checkpoint
from draftline.cli import run
from draftline.config import DrafterConfig, TargetConfig
from draftline.draft.model import DFlashDraftModel
from draftline.formats.exporting import import_drafter
from draftline.formats.files import ExportDtype
from draftline.formats.write import export_zlab
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import Target, build_target, load_target
from tests.evaluate.pairs import random_target
from tests.formats.drafters import make_drafter, make_target
from tests.formats.proofs import (
    CONFIG_EDITS,
    TENSOR_EDITS,
    TWICE_ROUNDED,
    Edit,
    Tree,
    edit_folder,
    edit_proof,
    permute_ids,
    proven_folder,
    rounded_target,
    stored_as,
)


def _audit(folder: Path, target: Target | None = None) -> AuditReport:
    return audit_checkpoint(folder, target or random_target(), select=["PRF"])


def _found(report: AuditReport) -> dict[str, str]:
    assert report.not_examined == []
    return {finding.code: finding.evidence for finding in report.findings}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_as_it_was_exported_has_no_finding(tmp_path: Path, dtype: ExportDtype) -> None:
    report = _audit(proven_folder(tmp_path / "drafter", dtype))
    assert _found(report) == {}
    others = {result.code: result.status for result in report.checks if result.status != "ok"}
    assert others == {"PRF004": "skipped"}  # there is no data here whose prompts could be compared
    assert any("5 prompts decoded again" in note and "all the same" in note for note in report.notes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TENSOR_EDITS)
def test_edited_weights_are_named_by_tensor_and_by_block(tmp_path: Path, name: str, dtype: ExportDtype) -> None:
    edit, first = TENSOR_EDITS[name]
    found = _found(_audit(edit_folder(proven_folder(tmp_path / "drafter", dtype), edit)))
    assert found["PRF001"].startswith(first)
    assert "block" in found["PRF002"]
    assert "drafted" in found["PRF002"]


@pytest.mark.parametrize("name", CONFIG_EDITS)
def test_edited_settings_are_named_by_field_and_by_block(tmp_path: Path, name: str) -> None:
    edit, first = CONFIG_EDITS[name]
    found = _found(_audit(edit_folder(proven_folder(tmp_path / "drafter"), edit)))
    assert found["PRF001"].startswith(first)
    assert "drafted" in found["PRF002"]


def test_settings_that_no_reader_takes_are_named_as_such(tmp_path: Path) -> None:
    found = _found(_audit(edit_folder(proven_folder(tmp_path / "drafter"), permute_ids)))
    assert "[4, 3, 1]" in found["EXP013"]


def test_weights_that_were_rounded_twice_are_named(tmp_path: Path) -> None:
    found = _found(_audit(edit_folder(proven_folder(tmp_path / "drafter"), TWICE_ROUNDED)))
    assert found["PRF001"].startswith("fc.weight has other values")


def test_the_same_values_in_a_wider_format_are_a_note(tmp_path: Path) -> None:
    folder = edit_folder(proven_folder(tmp_path / "drafter", "bfloat16"), stored_as(torch.float32))
    report = _audit(folder)
    assert _found(report) == {}
    assert any("converted from bfloat16 to float32: its values are the same" in note for note in report.notes)


def test_a_wider_format_does_not_hide_an_edit(tmp_path: Path) -> None:
    edit = TENSOR_EDITS["q_norm and k_norm swapped"][0]
    folder = edit_folder(proven_folder(tmp_path / "drafter", "bfloat16"), edit, stored_as(torch.float32))
    assert (
        "layers.0.self_attn.k_norm.weight is float32, the proof has bfloat16, and has"
        in _found(_audit(folder))["PRF001"]
    )


def test_where_values_cannot_be_compared_the_decoding_decides(tmp_path: Path) -> None:
    report = _audit(edit_folder(proven_folder(tmp_path / "clean"), stored_as(torch.bfloat16)))
    assert _found(report) == {}
    assert any("converted from float32 to bfloat16: its values cannot be compared" in note for note in report.notes)


@pytest.mark.parametrize("name", TENSOR_EDITS)
def test_edits_before_a_conversion_are_found_by_the_blocks(tmp_path: Path, name: str) -> None:
    folder = edit_folder(proven_folder(tmp_path / "drafter"), TENSOR_EDITS[name][0], stored_as(torch.bfloat16))
    found = _found(_audit(folder))
    assert found.keys() == {"PRF002"}
    assert "drafted" in found["PRF002"]


def test_a_target_in_bfloat16_has_a_proof_of_its_own(tmp_path: Path) -> None:
    target = rounded_target()
    folder = proven_folder(tmp_path / "drafter", "bfloat16", rounded=True)
    assert _found(_audit(folder, target)) == {}
    found = _found(_audit(edit_folder(folder, TENSOR_EDITS["gate and up swapped"][0]), target))
    assert found.keys() == {"PRF001", "PRF002"}


def test_a_target_in_another_format_is_asked_up_to_its_rounding(tmp_path: Path) -> None:
    folder, target = proven_folder(tmp_path / "drafter"), rounded_target()
    assert _found(_audit(folder, target)) == {}
    found = _found(_audit(edit_folder(folder, TENSOR_EDITS["layers swapped"][0]), target))
    assert found.keys() == {"PRF001", "PRF002"}


def test_another_target_is_named_once(tmp_path: Path) -> None:
    folder = proven_folder(tmp_path / "drafter")
    model = copy.deepcopy(random_target().model)
    torch.nn.init.normal_(model.model.layers[2].mlp.up_proj.weight)
    report = _audit(folder, build_target("other", model, None))
    assert _found(report).keys() == {"PRF003"}
    assert "it is of a target with other weights (random, fingerprint" in report.findings[0].evidence
    assert {r.code for r in report.checks if r.reason == "the proof cannot be used, see PRF003"} == {"PRF001", "PRF002"}


def test_a_target_that_answers_otherwise_is_named_though_its_weights_are_the_same(tmp_path: Path) -> None:
    model = copy.deepcopy(random_target().model)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    found = _found(_audit(proven_folder(tmp_path / "drafter"), build_target("random", model, None)))
    assert found.keys() == {"PRF002"}
    assert "the target says" in found["PRF002"]


@pytest.mark.parametrize(
    ("change", "sign", "said"),
    [
        (lambda tree: tree["answers"].clear(), True, "has no prompts and proves nothing"),
        (lambda tree: tree["decoding"].update(max_new_tokens=40), False, "was changed after it was written"),
        (lambda tree: tree.update(version=2), True, "has version 2, this Draftline reads 1"),
        (lambda tree: tree.pop("tensors"), True, "is damaged (tensors: Field required)"),
        (lambda tree: tree["answers"][0].update(output_ids=[5]), True, "is damaged (answers.0: "),
    ],
)
def test_a_proof_that_cannot_be_used_is_one_line(
    tmp_path: Path, change: Callable[[Tree], None], sign: bool, said: str
) -> None:
    folder = proven_folder(tmp_path / "drafter")
    edit_proof(folder, change, sign=sign)
    found = _found(_audit(folder))
    assert found.keys() == {"PRF003"}
    assert said in found["PRF003"]
    assert "\n" not in found["PRF003"]


def test_a_folder_from_before_proofs_is_a_note(tmp_path: Path) -> None:
    folder = proven_folder(tmp_path / "drafter")
    (folder / "draftline_proof.json").unlink()
    report = _audit(folder)
    assert report.findings == []
    assert {result.status for result in report.checks} == {"skipped"}
    assert "the folder has no draftline_proof.json" in report.checks[0].reason


@pytest.fixture(scope="module")
def tiny() -> tuple[Target, DFlashDraftModel]:
    target = load_target(TargetConfig(name="tiny"))
    model = DFlashDraftModel(resolve_drafter_config(target, DrafterConfig(num_layers=1), None))
    model.init_weights(torch.Generator().manual_seed(0))
    return target, model


@pytest.fixture(scope="module")
def tiny_folder(tiny: tuple[Target, DFlashDraftModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    export_zlab(tiny[1], place / "foreign", "float32")
    import_drafter(source=place / "foreign", out=place / "drafter", target=tiny[0])
    return place / "drafter"


def test_another_tokenizer_is_named(tiny: tuple[Target, DFlashDraftModel], tiny_folder: Path) -> None:
    tokenizer = tiny[0].require_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.add_tokens(["<something new>"])
    found = _found(_audit(tiny_folder, build_target("tiny", tiny[0].model, other)))
    assert found.keys() == {"PRF003"}
    assert "it is of another tokenizer" in found["PRF003"]


def test_the_command_names_an_edit(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", str(tiny_folder), "--target", "tiny", "--select", "PRF"]
    assert run(words) == 0
    assert "prompts decoded again" in capsys.readouterr().out

    def shift(_tree: Tree, tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] += 1e-3

    edited = tmp_path / "edited"
    edited.mkdir()
    for path in tiny_folder.iterdir():
        (edited / path.name).write_bytes(path.read_bytes())
    edit: Edit = shift
    edit_folder(edited, edit)
    assert run([*words[:1], str(edited), *words[2:]]) == 1
    assert "PRF001" in capsys.readouterr().out


def test_a_finished_folder_is_decoded_without_data(tiny: tuple[Target, DFlashDraftModel], tiny_folder: Path) -> None:
    report = audit_checkpoint(tiny_folder, tiny[0], select=["EVL006"])
    assert [finding.severity for finding in report.findings] == ["warning"]  # it has not learned anything
    assert "4 prompts" in report.findings[0].evidence


def test_a_folder_of_another_program_is_decoded_too(tmp_path: Path) -> None:
    export_zlab(make_drafter(), tmp_path / "drafter", "float32")
    report = audit_checkpoint(tmp_path / "drafter", make_target(), select=["EVL006"])
    assert [result.status for result in report.checks] == ["ok"]
    assert any("acceptance length" in note for note in report.notes)
