"""The file itself: what it says, what is refused, what a folder may be that still is what it says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftline.data.conversations import hash_json
from draftline.errors import CheckpointError
from draftline.evaluate.generate import generate
from draftline.formats.exporting import export_drafter, import_drafter
from draftline.formats.files import ExportDtype
from draftline.formats.folder import PROOF_FILE
from draftline.formats.load import load_drafter
from draftline.formats.proof import ProofPrompts, other_target, read_proof, write_proof
from draftline.formats.proof_prompts import choose_prompts
from draftline.formats.write import export_speculators, export_zlab
from draftline.options import ExportSettings
from tests.evaluate.pairs import prompts, random_target, trained_pair
from tests.formats.drafters import make_drafter, make_run, make_target
from tests.formats.proofs import (
    CONFIG_EDITS,
    PROMPTS,
    TENSOR_EDITS,
    Tree,
    differences,
    edit_folder,
    edit_proof,
    proven_folder,
    rounded_target,
    stored_as,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_says_what_the_written_folder_decodes(tmp_path: Path, dtype: ExportDtype) -> None:
    folder, target = proven_folder(tmp_path / "drafter", dtype), random_target()
    proof = read_proof(folder)
    assert proof is not None
    written = load_drafter(folder).draft_model
    for answer, prompt in zip(proof.answers, PROMPTS.ids, strict=True):
        again = generate(target, written, torch.tensor([prompt]), max_new_tokens=proof.decoding.max_new_tokens)
        assert list(answer.input_ids) == prompt
        assert list(answer.output_ids) == again.output_ids
        assert [list(block) for block in answer.drafted_blocks] == again.drafted_blocks
        assert answer.target_forwards == again.target_forwards
    assert (proof.precision.target_dtype, proof.precision.drafter_dtype) == ("float32", dtype)
    assert (proof.precision.device, proof.precision.torch) == ("cpu", torch.__version__)
    assert differences(folder, target) == []


def test_gaps_are_those_of_one_forward_over_the_whole_answer(tmp_path: Path) -> None:
    proof, target = read_proof(proven_folder(tmp_path / "drafter")), random_target()
    assert proof is not None
    for answer in proof.answers:
        ids = torch.tensor([[*answer.input_ids, *answer.output_ids]])
        best = target.model(input_ids=ids).logits[0, len(answer.input_ids) - 1 : -1].topk(2).values
        assert answer.output_gaps == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=2e-3)


def test_it_is_decoded_with_what_was_written_and_not_with_what_was_meant(tmp_path: Path) -> None:
    target, drafter, _ = trained_pair()

    def wrong_writer(written: Path) -> None:
        edit_folder(written, TENSOR_EDITS["layers swapped"][0])
        assert write_proof(written, target, PROMPTS) is None

    export_zlab(drafter, tmp_path / "drafter", "float32", prove=wrong_writer)
    proof = read_proof(tmp_path / "drafter")
    right = read_proof(proven_folder(tmp_path / "right"))
    assert proof is not None
    assert right is not None
    assert sum(a.target_forwards for a in proof.answers) > sum(a.target_forwards for a in right.answers)


def test_digests_are_over_format_shape_and_bytes(tmp_path: Path) -> None:
    folder = proven_folder(tmp_path / "drafter", "bfloat16")
    proof, tensors = read_proof(folder), load_file(folder / "model.safetensors")
    assert proof is not None
    assert proof.tensors.keys() == tensors.keys()
    norm = tensors["norm.weight"]
    raw = b"".join(int(value).to_bytes(2, "little", signed=True) for value in norm.view(torch.int16).tolist())
    assert proof.tensors["norm.weight"].sha256 == hashlib.sha256(b"bfloat16 [32]\n" + raw).hexdigest()
    assert proof.shape == json.loads(load_drafter(folder).config.model_dump_json())


def test_it_guards_its_own_content(tmp_path: Path) -> None:
    folder = proven_folder(tmp_path / "drafter")
    tree = json.loads((folder / PROOF_FILE).read_text())
    digest = tree.pop("digest")
    assert digest == hash_json(tree)


@pytest.mark.parametrize(
    ("change", "sign", "said"),
    [
        (lambda tree: tree["answers"].clear(), True, "has no prompts and proves nothing: restore the file, or export"),
        (lambda tree: tree.pop("answers"), True, "has no prompts"),
        (lambda tree: tree["answers"][2]["output_ids"].reverse(), False, "was changed after it was written"),
        (lambda tree: tree.update(version=7), True, "has version 7, this Draftline reads 1: it was written by a newer"),
        (lambda tree: tree.update(version="1"), True, "is damaged (it has no version)"),
        (lambda tree: tree.update(comment="mine"), True, "is damaged (comment: Extra inputs"),
        (lambda tree: tree["answers"][1].update(target_forwards=1), True, "is damaged (answers.1: Value error, 1 targ"),
        (lambda tree: tree["answers"][1]["output_gaps"].pop(), True, "is damaged (answers.1: Value error, output_gaps"),
        (lambda tree: tree["answers"][1]["draft_gaps"][0].pop(), True, "draft_gaps must have a gap for each"),
        (lambda tree: tree["answers"][1]["drafted_blocks"].reverse(), True, "do not lead to output_ids"),
        (lambda tree: tree["answers"][0].update(input_ids=[]), True, "is damaged (answers.0.input_ids"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, change: Callable[[Tree], None], sign: bool, said: str) -> None:
    folder = proven_folder(tmp_path / "drafter")
    edit_proof(folder, change, sign=sign)
    with pytest.raises(CheckpointError) as caught:
        read_proof(folder)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\x01"])
def test_what_is_no_proof_at_all_is_one_line(tmp_path: Path, content: str) -> None:
    folder = proven_folder(tmp_path / "drafter")
    (folder / PROOF_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="restore the file, or export the drafter again") as caught:
        read_proof(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_one_has_none(tmp_path: Path) -> None:
    export_zlab(make_drafter(), tmp_path / "drafter", "float32")
    assert read_proof(tmp_path / "drafter") is None


def test_another_target_is_told_by_its_weights(tmp_path: Path) -> None:
    proof = read_proof(proven_folder(tmp_path / "drafter"))
    assert proof is not None
    assert "it is of a target with other weights (random, fingerprint " in str(other_target(proof, make_target()))
    assert other_target(proof, random_target()) is None


@pytest.mark.parametrize("name", [*TENSOR_EDITS, *CONFIG_EDITS])
def test_differences_are_listed_tensors_first_then_settings_then_blocks(tmp_path: Path, name: str) -> None:
    edit, first = {**TENSOR_EDITS, **CONFIG_EDITS}[name]
    lines = differences(edit_folder(proven_folder(tmp_path / "drafter"), edit), random_target())
    assert lines[0].startswith(first)
    kinds = ["drafted" in line for line in lines]
    assert kinds == sorted(kinds)
    assert kinds[-1]


def test_names_and_shapes_that_differ_are_said(tmp_path: Path) -> None:
    folder = proven_folder(tmp_path / "drafter")
    edit_proof(folder, lambda tree: tree["tensors"]["fc.weight"].update(shape=[3, 1]))
    edit_proof(folder, lambda tree: tree["tensors"].update(extra=tree["tensors"].pop("norm.weight")))
    lines = differences(folder, random_target())
    assert lines == [
        "extra is missing",
        "norm.weight is not in the proof",
        "fc.weight is [32, 96], the proof has [3, 1]",
    ]


def test_a_target_in_another_format_is_the_same_target(tmp_path: Path) -> None:
    assert differences(proven_folder(tmp_path / "one"), rounded_target()) == []
    assert differences(proven_folder(tmp_path / "other", "bfloat16", rounded=True), random_target()) == []


def test_conversions_are_told_from_edits(tmp_path: Path) -> None:
    target = random_target()
    assert (
        differences(edit_folder(proven_folder(tmp_path / "wide", "bfloat16"), stored_as(torch.float32)), target) == []
    )
    assert differences(edit_folder(proven_folder(tmp_path / "narrow"), stored_as(torch.bfloat16)), target) == []


def test_every_export_carries_one(tmp_path: Path) -> None:
    target = make_target()
    export_drafter(source=make_run(tmp_path / "run"), out=tmp_path / "one", target=target)
    first = read_proof(tmp_path / "one")
    export_drafter(
        source=tmp_path / "one", out=tmp_path / "two", target=target, settings=ExportSettings(reader="speculators")
    )
    second = read_proof(tmp_path / "two")
    assert first is not None
    assert second is not None
    assert (first.decoding.prompts, second.decoding.prompts) == ("random", "proof")
    assert first.answers == second.answers  # the other format's folder is the same drafter
    assert differences(tmp_path / "two", target) == []


def test_an_import_carries_one_if_a_target_is_named(tmp_path: Path) -> None:
    export_zlab(make_drafter(), tmp_path / "foreign", "float32")
    import_drafter(source=tmp_path / "foreign", out=tmp_path / "without")
    assert read_proof(tmp_path / "without") is None
    import_drafter(source=tmp_path / "foreign", out=tmp_path / "with", target=make_target())
    assert read_proof(tmp_path / "with") is not None


@pytest.mark.parametrize(("changes", "drafted"), [({"draft_vocab_size": 17}, 3), ({"sample_from_anchor": True}, 4)])
def test_a_reduced_vocabulary_and_slots_that_all_predict_are_proven_too(
    tmp_path: Path, changes: Tree, drafted: int
) -> None:
    target, drafter, folder = make_target(), make_drafter(**changes), tmp_path / "drafter"
    if drafter.config.draft_vocab_size is not None:
        drafter.keep_tokens(torch.arange(17) * 2)

    def prove(written: Path) -> None:
        assert write_proof(written, target, choose_prompts(written, target)) is None

    export_speculators(drafter, folder, "bfloat16", verifier="a/target", target_head=target.head, prove=prove)
    proof = read_proof(folder)
    assert proof is not None
    blocks = [block for answer in proof.answers for block in answer.drafted_blocks]
    assert {len(block) for block in blocks} == {drafted}
    assert drafter.config.draft_vocab_size is None or all(token % 2 == 0 for block in blocks for token in block)
    assert differences(folder, target) == []


def test_no_further_prompt_is_asked_when_there_were_enough_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline.formats.proof.ENOUGH_FORWARDS", 40)
    target, drafter, _ = trained_pair()
    export_zlab(drafter, tmp_path / "drafter", "float32")
    write_proof(tmp_path / "drafter", target, ProofPrompts("random", prompts(8)))
    proof = read_proof(tmp_path / "drafter")
    assert proof is not None
    forwards = [answer.target_forwards for answer in proof.answers]
    assert sum(forwards) >= 40 > sum(forwards[:-1])
