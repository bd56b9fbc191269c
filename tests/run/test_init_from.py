"""A run that trains further what is there: a run of ours, an export, another trainer's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftline.audit.subject import subject_to_come
from draftline.config import load_run_config
from draftline.draft.model import DFlashDraftModel
from draftline.errors import CheckpointError, ConfigError
from draftline.formats.exporting import export_drafter
from draftline.options import ExportSettings
from draftline.records import Sample
from draftline.train.checkpoint import load_draft_model
from tests.engine.tiny_target import tiny_samples, tiny_target
from tests.run.small_run import SETTINGS, small_run

ONE_STEP = ("train.max_steps=1", "optim.learning_rate=1e-9", "train.seed=9")
"""A step that moves no weight by more than the rate."""

REDUCED = "drafter.draft_vocab_size=12"

FLOAT32 = ExportSettings(dtype="float32")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that was trained, as a run."""
    out = tmp_path_factory.mktemp("first") / "run"
    small_run(out)
    return out


def exported(run: Path, out: Path) -> Path:
    export_drafter(source=run, out=out, target=tiny_target(), settings=FLOAT32)
    return out


def as_torchspec(folder: Path) -> Path:
    """The same drafter in another trainer's names."""
    tree = json.loads((folder / "config.json").read_text())
    nested = tree.pop("dflash_config")
    tree |= {key: nested[key] for key in ("target_layer_ids", "mask_token_id", "block_size")}
    tree |= {"target_num_hidden_layers": tree["num_target_layers"], "num_target_layers": len(tree["target_layer_ids"])}
    (folder / "config.json").write_text(json.dumps(tree))
    names = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
    names["norm.weight"] = "final_norm.weight"
    tensors = load_file(folder / "model.safetensors")
    save_file({names.get(name, name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def assert_near(found: DFlashDraftModel, wanted: DFlashDraftModel) -> None:
    tensors, others = found.state_dict(), wanted.state_dict()
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["run", "zlab", "torchspec"])
def test_the_first_step_starts_from_the_weights_of_the_folder(first: Path, kind: str, tmp_path: Path) -> None:
    source = first if kind == "run" else exported(first, tmp_path / "drafter")
    if kind == "torchspec":
        as_torchspec(source)
    small_run(tmp_path / "run", f"drafter.init_from={source}", *ONE_STEP)
    assert_near(load_draft_model(tmp_path / "run"), load_draft_model(first))


def test_training_goes_on_and_a_resume_keeps_what_was_learned(first: Path, tmp_path: Path) -> None:
    words = (f"drafter.init_from={first}", "train.max_steps=5")
    small_run(tmp_path / "run", *words)
    learned = load_draft_model(tmp_path / "run" / "last").state_dict()
    assert not torch.equal(learned["fc.weight"], load_draft_model(first).fc.weight)
    small_run(tmp_path / "run", *words, resume=True)
    assert torch.equal(load_draft_model(tmp_path / "run" / "last").fc.weight, learned["fc.weight"])


def test_what_is_not_the_targets_is_kept(first: Path, tmp_path: Path) -> None:
    source = exported(first, tmp_path / "drafter")
    tree = json.loads((source / "config.json").read_text())
    tree |= {"rope_theta": 123.0, "rms_norm_eps": 0.25}
    (source / "config.json").write_text(json.dumps(tree))
    save_file(load_file(source / "model.safetensors"), source / "model.safetensors")  # without the header's shape
    small_run(tmp_path / "run", f"drafter.init_from={source}", *ONE_STEP)
    config = load_draft_model(tmp_path / "run").config
    assert (config.rope_parameters["rope_theta"], config.rms_norm_eps) == (123.0, 0.25)


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("drafter.block_size=6", "set drafter.block_size=4"),
        ("drafter.num_layers=2", "set drafter.num_layers=1"),
        ("drafter.target_layer_ids=[0,1]", r"set drafter.target_layer_ids=\[0,2\]"),
        ("drafter.target_layer_ids=null", "set drafter.num_captured_layers=2"),
        ("drafter.mask_token_id=37", "set drafter.mask_token_id=38"),
        ("drafter.sample_from_anchor=true", "set drafter.sample_from_anchor=False"),
        ("drafter.start_from=target_layers", "set drafter.start_from=random"),
        (REDUCED, "set drafter.draft_vocab_size=null"),
    ],
)
def test_settings_of_another_shape_are_refused(first: Path, word: str, fix: str, tmp_path: Path) -> None:
    words = (f"drafter.init_from={first}", word)
    with pytest.raises(ConfigError, match=fix) as refusal:
        small_run(tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()
    proposed = str(refusal.value).rpartition("set ")[2].split()
    small_run(tmp_path / "run", *words, *proposed, *ONE_STEP)  # the fix is literally right


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        small_run(tmp_path / "run", f"drafter.init_from={tmp_path / 'absent'}")


def test_a_reduced_vocabulary_stays(tmp_path: Path) -> None:
    small_run(tmp_path / "first", REDUCED)
    source = tmp_path / "drafter"
    export_drafter(
        source=tmp_path / "first",
        out=source,
        target=tiny_target(),
        settings=ExportSettings(reader="speculators", dtype="float32"),
    )
    others = [Sample(s.sample_id, s.input_ids.flip(0), s.loss_mask) for s in tiny_samples(24, seed=5)]
    small_run(tmp_path / "run", f"drafter.init_from={source}", REDUCED, *ONE_STEP, samples=others)
    assert_near(load_draft_model(tmp_path / "run"), load_draft_model(tmp_path / "first"))


def test_the_audit_examines_the_drafter_that_is_continued(first: Path) -> None:
    config = load_run_config(None, [*SETTINGS, f"drafter.init_from={first}"])
    assert_near(subject_to_come(config, tiny_target()).draft_model, load_draft_model(first))
