"""Read a drafter from any folder that is understood: a run of ours, an export, or another trainer's checkpoint.

A fact that a folder leaves out is asked for, never guessed: the same weights under another layout, block size or mask
token load without an error and are accepted a tenth as often.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from draftline.config import DFlashConfig, ExportDtype
from draftline.draft.model import DFlashDraftModel
from draftline.draft.vocabulary import membership_of
from draftline.errors import CheckpointError, ConfigError
from draftline.evaluate.generate import check_fits
from draftline.formats.dialects import Format, detect, our_tensors, said_by
from draftline.formats.files import DrafterFiles, build_drafter, compare_with_header, read_files
from draftline.options import Given
from draftline.targets.layers import check_target_layer_ids
from draftline.targets.model import Target
from draftline.train.checkpoint import load_draft_model
from draftline.train.run_folder import checkpoint_folder

T = TypeVar("T", int, bool)

_OPTIONS = {
    "sample_from_anchor": "--sample-from-anchor or --no-sample-from-anchor",
    "block_size": "--block-size",
    "mask_token_id": "--mask-token-id",
    "num_target_layers": "--target or --num-target-layers",
}
_MEANING = {
    "sample_from_anchor": "whether slot 0, the anchor, predicts a token (DSpark) or not (DFlash)",
    "block_size": "how many slots a block has",
    "mask_token_id": "which token stands for slots to be predicted",
    "num_target_layers": "how deep its target is",
}


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and where it came from.

    Attributes:
        draft_model: float32, on the CPU.
        format: `draftline` for a run or a checkpoint of ours, else as `dialects` lists them.
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


def _with_depth(given: Given, files: DrafterFiles, form: Format, target: Target | None) -> Given:
    """Take the depth from the target where neither the folder nor the user says it."""
    if target is None or given.num_target_layers is not None or files.shape is not None or form != "speculators":
        return given
    return given.model_copy(update={"num_target_layers": target.num_layers})


def _load_files(files: DrafterFiles, form: Format, given: Given, target: Target | None) -> LoadedDrafter:
    config = complete(said_by(files, form), given, files.where)
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


def complete(said: DFlashConfig, given: Given, where: str) -> DFlashConfig:
    """The complete shape: what a folder says, and what the user says where it says nothing.

    Args:
        said: as `dialects.said_by` gives it.
        where: names the configuration in messages.

    Raises:
        CheckpointError: a fact is missing, contradicts what the user says, or is out of range.
    """
    fields = dict(said)
    fields |= {name: _settled(name, fields[name], value, where) for name, value in given.model_dump().items()}
    try:
        config = DFlashConfig.model_validate(fields)
        check_target_layer_ids(config.target_layer_ids, config.num_target_layers)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(map(str, fault["loc"])) or "config"
        raise CheckpointError(f"{where}: {name}: {fault['msg']}: fix or export again") from error
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return config


def _settled(name: str, found: T | None, given: T | None, where: str) -> T:
    if isinstance(found, str):  # "false" is true to some readers and false to others
        raise CheckpointError(f"{where}: {name} is the text {found!r}: write the value itself, without quotes")
    if found is None and given is None:
        raise CheckpointError(
            f"{where} has no {name}, which says {_MEANING[name]}: state it to `draftline import` with {_OPTIONS[name]}"
        )
    if found is not None and given is not None and found != given:
        raise CheckpointError(f"{where}: {name} is {found!r} there and {given!r} was given: leave out {_OPTIONS[name]}")
    return given if found is None else found  # type: ignore[return-value]  # one of them is there
