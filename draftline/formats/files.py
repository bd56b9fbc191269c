"""A drafter's folder as all formats share it: `config.json` beside safetensors files.

Reading is strict: half of a copy, a file that is not safetensors, or a weight in another number format than
`config.json` says is an error here, not a surprise in a server. Writing goes through `storage.new_folder`, so that a
folder appears complete and checked, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftline.config import DFlashConfig, ExportDtype
from draftline.draft.model import DFlashDraftModel
from draftline.draft.vocabulary import mapping_fault
from draftline.errors import CheckpointError, ExportError
from draftline.formats.folder import read_config
from draftline.storage import new_folder

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SHAPE_KEY = "draftline"
"""Entry of the safetensors header that repeats the drafter's whole shape, for formats that have no place for all of it
and to notice a `config.json` that was changed or exchanged afterwards."""

_FLOATS = ("float32", "bfloat16", "float16")
"""Number formats that float32 holds exactly."""

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class DrafterFiles:
    """What lies in a drafter's folder.

    Attributes:
        folder: where.
        tree: `config.json`.
        tensors: every tensor, as stored.
        shape: the shape that Draftline wrote into the weights' header; none in files of other programs.
    """

    folder: Path
    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    shape: DFlashConfig | None

    @property
    def where(self) -> str:
        """Names the configuration in messages."""
        return f"{self.folder}/config.json"


def read_files(folder: Path) -> DrafterFiles:
    """Read configuration and tensors.

    Raises:
        CheckpointError: there is no drafter, or its files are incomplete or contradict each other.
    """
    tree = read_config(folder)
    tensors: dict[str, Tensor] = {}
    header: dict[str, str] = {}
    for path in _weight_files(folder):
        found, metadata = _read_weights(path)
        twice = found.keys() & tensors.keys()
        if twice:
            raise CheckpointError(f"{path} repeats {sorted(twice)[0]}: remove files of another checkpoint")
        tensors |= found
        header |= metadata
    files = DrafterFiles(folder, tree, tensors, _written_shape(header, folder))
    _check_dtype(files)
    return files


def write_folder(
    folder: Path,
    tree: Mapping[str, Any],
    draft_model: DFlashDraftModel,
    dtype: ExportDtype,
    check: Callable[[Path], None],
    card: str | None = None,
    beside: Mapping[str, Tensor] | None = None,
    prove: Callable[[Path], None] | None = None,
) -> None:
    """Write `config.json`, the weights in `dtype` and the model card; the folder appears only if `check` passes.

    Args:
        beside: tensors that the format stores with the drafter's own.
        check: called with the finished files under their temporary name; raises if they are not as they should be.
        prove: called with the checked files; adds its own.

    Raises:
        ExportError: a weight is not finite in `dtype`, or `check` fails.
        StorageError: the folder is not empty or cannot be written.
    """
    tensors = stored_tensors(draft_model, dtype)
    header = {"format": "pt", SHAPE_KEY: canonical(draft_model.config).model_dump_json()}
    with new_folder(folder) as temporary:
        (temporary / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        save_file({**tensors, **(beside or {})}, temporary / _WEIGHTS, metadata=header)
        check(temporary)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        if prove is not None:
            prove(temporary)


def stored_tensors(draft_model: DFlashDraftModel, dtype: ExportDtype) -> dict[str, Tensor]:
    """The drafter's weights as they go to disk; `d2t` keeps its whole numbers.

    Raises:
        ExportError: the dtype is not written, or a weight is not finite in it.
    """
    if dtype not in DTYPES:
        raise ExportError(f"dtype {dtype!r} is not written: use float32 or bfloat16")
    tensors = {
        name: tensor.detach().to("cpu", DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in draft_model.state_dict().items()
    }
    broken = next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        raise ExportError(f"{broken} has values that are not finite in {dtype}: the training run is broken")
    return tensors


def build_drafter(config: DFlashConfig, tensors: Mapping[str, Tensor], where: str) -> DFlashDraftModel:
    """The drafter with these weights, in float32 on the CPU; every tensor of the shape and no other.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape, or `d2t` is not a mapping; `where` names the
            folder.
    """
    model = DFlashDraftModel(config)
    wanted = model.state_dict()
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    for names, word in ((missing, "misses"), (unexpected, "has unknown")):
        if names:
            raise CheckpointError(
                f"{where} {word} {len(names)} tensors, first {names[0]}: it is not a drafter of this shape; "
                "copy it again, with the config.json and the names it was trained with"
            )
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise CheckpointError(f"{where}: {name} is stored as {tensor.dtype}: copy or export the drafter again")
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{where}: {name} is {list(tensor.shape)}, config.json asks for {list(wanted[name].shape)}: "
                "they do not belong together"
            )
    if config.draft_vocab_size is not None:
        fault = mapping_fault(tensors["d2t"], config.draft_vocab_size, config.vocab_size)
        if fault is not None:
            raise CheckpointError(f"{where}: {fault}: export the drafter again")
    model.load_state_dict(in_float32(tensors), strict=True, assign=True)
    return model.eval()


def in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights in float32; whole numbers as they are."""
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def canonical(config: DFlashConfig) -> DFlashConfig:
    """The same drafter with settings of sliding layers at rest where there are none."""
    if "sliding_attention" in config.layer_types:
        return config
    return config.model_copy(update={"sliding_window": None, "sliding_window_causal": True})


def compare_with_header(config: DFlashConfig, files: DrafterFiles) -> None:
    """Refuse a `config.json` that says something else than the weights it lies beside.

    Raises:
        CheckpointError: a field differs from what was written into the weights' header.
    """
    if files.shape is None:
        return
    for name in DFlashConfig.model_fields:
        here, there = getattr(config, name), getattr(files.shape, name)
        if here != there:
            raise CheckpointError(
                f"{files.where}: {name} reads as {here!r}, but the weights were written for {there!r}: "
                "restore the file or export again"
            )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / _INDEX} is damaged: copy the folder again") from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise CheckpointError(f"{folder} misses {absent[0]}, one of {len(names)} weight files: copy it again")
        return [folder / name for name in names]
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    hint = f"{others[0]} is not read: convert it to safetensors" if others else "copy the whole folder"
    raise CheckpointError(f"{folder} has no {_WEIGHTS}: {hint}")


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read ({reason}): copy or export the drafter again") from error


def _written_shape(header: Mapping[str, str], folder: Path) -> DFlashConfig | None:
    if SHAPE_KEY not in header:
        return None
    try:
        return DFlashConfig.model_validate_json(header[SHAPE_KEY])
    except ValidationError as error:
        raise CheckpointError(f"{folder} was written by another version of Draftline: use that version") from error


def _check_dtype(files: DrafterFiles) -> None:
    """What `config.json` calls the dtype is what servers cast to, so it must be that of the weights."""
    said = {name: files.tree[name] for name in ("dtype", "torch_dtype") if files.tree.get(name) is not None}
    floats = {
        str(tensor.dtype).removeprefix("torch.") for tensor in files.tensors.values() if tensor.is_floating_point()
    }
    if len(floats) > 1:
        raise CheckpointError(f"{files.folder} mixes {' and '.join(sorted(floats))} weights: convert them to one")
    found = ", ".join(sorted(floats))
    other = next((name for name, dtype in said.items() if floats and floats != {dtype}), None)
    if other is not None:
        raise CheckpointError(f"{files.where}: {other} is {said[other]!r}, the weights are {found}: fix the file")
    if not floats <= set(_FLOATS):
        raise CheckpointError(f"{files.folder} has {found} weights: convert them to one of {', '.join(_FLOATS)}")
