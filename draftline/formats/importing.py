"""Read a drafter from any folder that is understood: a run of ours, an export, or another trainer's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftline.config import DFlashConfig
from draftline.draft.model import DFlashDraftModel
from draftline.draft.vocabulary import membership_of
from draftline.errors import CheckpointError
from draftline.evaluate.generate import check_fits
from draftline.formats.facts import Given, resolve
from draftline.formats.folder import DrafterFiles, ExportDtype, build_drafter, compare_with_header, read_files
from draftline.formats.formats import Format, detect, our_tensors
from draftline.formats.reading import facts_of
from draftline.targets.model import Target
from draftline.train.checkpoint import checkpoint_folder, load_draft_model


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and where it came from.

    Attributes:
        draft_model: float32, on the CPU.
        format: `draftline` for a run or a checkpoint of ours, else as `formats.py` lists them.
        stored_dtype: number format of the weights on disk.
        notes: what was left out and why, one sentence each.
    """

    draft_model: DFlashDraftModel
    format: Format | Literal["draftline"]
    stored_dtype: torch.dtype
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> DFlashConfig:
        return self.draft_model.config

    @property
    def export_dtype(self) -> ExportDtype:
        """The dtype that loses nothing of what was stored."""
        return "bfloat16" if self.stored_dtype == torch.bfloat16 else "float32"


def load_drafter(folder: Path, given: Given | None = None, target: Target | None = None) -> LoadedDrafter:
    """Read the drafter in a folder.

    Args:
        given: facts that the folder leaves out.
        target: what the drafter is meant for; it must fit, and supplies its depth where the folder leaves it out.

    Raises:
        CheckpointError: there is no drafter, it is incomplete, not computed here, or leaves out what was not given.
        TargetError: it was trained for another target.
    """
    given = given or Given()
    if checkpoint_folder(folder) is not None:
        loaded = LoadedDrafter(load_draft_model(folder), "draftline", torch.float32)
    else:
        files = read_files(folder)
        form = detect(files.tree, set(files.tensors), files.where)
        loaded = _load_files(files, form, _with_depth(given, files, form, target), target)
    if target is not None:
        check_fits(loaded.config, target, str(folder))
    return loaded


def load_format(folder: Path, form: Format) -> LoadedDrafter:
    """Read the drafter in a folder that must be in one format.

    Raises:
        CheckpointError: there is no drafter, it is in another format, incomplete, or not computed here.
    """
    files = read_files(folder)
    found = detect(files.tree, set(files.tensors), files.where)
    if found != form:
        names = files.tree.get("architectures")
        raise CheckpointError(f"{files.where} is in the format {found} (architectures {names}), not {form}: import it")
    return _load_files(files, form, Given(), None)


def detect_format(folder: Path) -> Format | Literal["draftline"]:
    """Which format a folder is in.

    Raises:
        CheckpointError: no known one.
    """
    if checkpoint_folder(folder) is not None:
        return "draftline"
    files = read_files(folder)
    return detect(files.tree, set(files.tensors), files.where)


def _with_depth(given: Given, files: DrafterFiles, form: Format, target: Target | None) -> Given:
    """Take the depth from the target where neither the folder nor the user says it."""
    if target is None or given.num_target_layers is not None or files.shape is not None or form != "speculators":
        return given
    return Given(given.sample_from_anchor, given.block_size, given.mask_token_id, target.num_layers)


def _load_files(files: DrafterFiles, form: Format, given: Given, target: Target | None) -> LoadedDrafter:
    config = resolve(facts_of(files, form), given)
    own, beside = our_tensors(files, form)
    draft_model = build_drafter(config, own, str(files.folder))
    compare_with_header(config, files)
    _check_membership(draft_model, beside.pop("t2d", None), files)
    dtype = own["fc.weight"].dtype
    notes = tuple(_left_out(name, tensor, target, draft_model, files) for name, tensor in beside.items())
    return LoadedDrafter(draft_model, form, dtype, notes)


def _check_membership(draft_model: DFlashDraftModel, t2d: Tensor | None, files: DrafterFiles) -> None:
    """Both halves of a reduced vocabulary are there, and say the same: readers differ in which they use."""
    if draft_model.d2t is None:
        return
    if t2d is None:
        raise CheckpointError(f"{files.folder} misses t2d beside d2t: copy or export the drafter again")
    wanted = membership_of(draft_model.d2t, draft_model.config.vocab_size)
    if t2d.dtype != torch.bool or not torch.equal(t2d, wanted):
        raise CheckpointError(f"{files.folder}: t2d and d2t keep different tokens: export the drafter again")


def _left_out(
    name: str, tensor: Tensor, target: Target | None, draft_model: DFlashDraftModel, files: DrafterFiles
) -> str:
    """Say that a copy of the target's tensor is not used, after comparing it where that is possible."""
    if target is None:
        return f"{name} is left out: the target's own is used, and was not compared"
    head = target.head.of_rows(draft_model.kept_ids).lm_head
    parts = {
        "embed_tokens.weight": target.embedding,
        "lm_head.weight": head,
        "verifier_lm_head.weight": head,
        "verifier_norm.weight": target.final_norm,
    }
    theirs = parts[name].get_parameter("weight").detach().cpu()
    same = theirs.shape == tensor.shape and torch.allclose(
        theirs.to(tensor.dtype).float(), tensor.float(), rtol=1e-2, atol=1e-5
    )
    if not same:
        raise CheckpointError(
            f"{files.folder}: {name} is not that of {target.name}: it was trained, or belongs to another target; "
            "such a drafter is not computed here"
        )
    return f"{name} is left out: it is the target's own"
