"""A target of which only embedding, final norm and head are in memory: what training needs where states are on disk.

What is known of the whole target was written down when the states were captured (`Borrowed`): its identity, and the
constants that its forward applies around these parts, which cannot be tried out without its layers. The parts that are
loaded are compared with those of then; the layers are not, because nobody looks at them.

The parts are read by name from the checkpoint's safetensors files. Where a checkpoint names its tensors otherwise than
its model does, or is of another format, all of it is loaded and the layers are dropped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftline.config import TargetConfig, target_folder
from draftline.errors import CheckpointError, TargetError
from draftline.storage import reason_of, write_text
from draftline.targets.head import TargetHead, TargetParts, find_parts
from draftline.targets.model import (
    TINY_FOLDER,
    Target,
    load_target,
    load_target_config,
    load_tokenizer_if_any,
    model_class,
    resolve_device,
    torch_dtype,
    weights_fingerprint,
)

BORROWED_FILE = "target.json"
"""Beside the states of a target."""


@dataclass(frozen=True)
class Borrowed:
    """What training needs to know of a target beside its embedding, norm and head.

    Attributes:
        weights: fingerprint of all weights.
        parts: of those that are borrowed.
        dtype: in which the target captured, by its torch name.
        output_multiplier, final_logit_softcapping, embedding_multiplier, input_embedding_scale: see `Target` and its
            head.
    """

    weights: str
    parts: str
    dtype: str
    output_multiplier: float
    final_logit_softcapping: float | None
    embedding_multiplier: float
    input_embedding_scale: float

    @staticmethod
    def of(target: Target) -> Borrowed:
        """Of a whole target."""
        head = target.head
        return Borrowed(
            weights=target.fingerprint,
            parts=_parts_fingerprint(target.parts),
            dtype=str(target.dtype).removeprefix("torch."),
            output_multiplier=head.output_multiplier,
            final_logit_softcapping=head.final_logit_softcapping,
            embedding_multiplier=target.embedding_multiplier,
            input_embedding_scale=target.input_embedding_scale,
        )

    def write(self, folder: Path) -> None:
        """Keep it beside states; raises as `write_text`."""
        write_text(folder / BORROWED_FILE, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(folder: Path) -> Borrowed | None:
        """What was kept beside states, none if nothing was.

        Raises:
            CheckpointError: it cannot be read.
        """
        path = folder / BORROWED_FILE
        if not path.exists():
            return None
        try:
            return Borrowed(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({reason_of(error)}): restore it, or delete it to load the whole target"
            ) from error


def load_borrowed(config: TargetConfig, known: Borrowed) -> Target:
    """Embedding, final norm and head of a target; its layers have shapes and no memory, and a forward is refused.

    Raises:
        TargetError: the target cannot be loaded, or is not the one that is known.
    """
    device = resolve_device(config.device)
    model = _parts_alone(config, device) or load_target(config).model
    model = model.eval().requires_grad_(False)
    parts = find_parts(model)
    parts.decoder_layers.to("meta")
    found = _parts_fingerprint(parts)
    if found != known.parts:
        raise TargetError(
            f"target {config.name} has another embedding, norm or head than the one whose states are read, or "
            f"another dtype than {known.dtype}: name that target, or other states (pipeline.states_path)"
        )

    def refuse(*_: object) -> None:
        raise LayersNotLoaded(
            f"the layers of target {config.name} are not loaded, because its states are read from disk"
        )

    model.register_forward_pre_hook(refuse)
    parts.backbone.register_forward_pre_hook(refuse)
    return Target(
        config.name,
        model,
        load_tokenizer_if_any(config),
        parts,
        TargetHead(parts.final_norm, parts.lm_head, known.output_multiplier, known.final_logit_softcapping),
        known.embedding_multiplier,
        known.input_embedding_scale,
        known.weights,
    )


class LayersNotLoaded(TargetError):
    """A forward was asked of a target of which only the borrowed parts are in memory."""


def _parts_fingerprint(parts: TargetParts) -> str:
    return weights_fingerprint(nn.ModuleList([parts.embedding, parts.final_norm, parts.lm_head]))


def _parts_alone(config: TargetConfig, device: torch.device) -> PreTrainedModel | None:
    """The model with nothing in memory but the parts, none if its checkpoint cannot be read so."""
    folder = TINY_FOLDER if config.name == "tiny" else None if config.name == "smollm2" else target_folder(config.name)
    if folder is None:
        return None
    described = load_target_config(config)
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config.name, described).from_config(
            described, trust_remote_code=config.trust_remote_code
        )
    parts = find_parts(model)
    places = _tensor_files(folder)
    wanted = torch_dtype(config.dtype, device)
    loaded: dict[int, nn.Parameter] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for module in (parts.embedding, parts.final_norm, parts.lm_head):
        if any(True for _ in module.buffers()):
            return None
        for name, parameter in list(module.named_parameters()):
            key = f"{names[id(module)]}.{name}"
            if id(parameter) not in loaded:
                if key not in places:
                    return None
                tensor = _read(places[key], key)
                dtype = tensor.dtype if isinstance(wanted, str) else wanted
                loaded[id(parameter)] = nn.Parameter(tensor.to(device, dtype, copy=True), requires_grad=False)
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, loaded[id(parameter)])
    return model


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_tensor(name)
        return found


def _tensor_files(folder: Path) -> dict[str, Path]:
    """File of each tensor of a checkpoint, by name; nothing where it has no safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
        return {name: folder / file for name, file in content.get("weight_map", {}).items()}
    single = folder / "model.safetensors"
    if not single.exists():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
