"""A proven folder of a drafter that is right now and then, and what people do to folders."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.data.conversations import hash_json
from draftline.formats.files import ExportDtype
from draftline.formats.load import load_drafter
from draftline.formats.proof import (
    ProofPrompts,
    decoding_differences,
    file_differences,
    other_target,
    read_proof,
    replay_decoding,
    write_proof,
)
from draftline.formats.write import export_zlab
from draftline.targets.model import Target, build_target
from tests.evaluate.pairs import prompts, random_target, trained_pair

Tree = dict[str, Any]
Tensors = dict[str, Tensor]
Edit = Callable[[Tree, Tensors], None]

PROMPTS = ProofPrompts("random", prompts(5))


def proven_folder(folder: Path, dtype: ExportDtype = "float32", *, rounded: bool = False) -> Path:
    """The folder of a trained drafter, decoded on five prompts; by the target in bfloat16 if `rounded`."""
    folder.mkdir()
    for name, content in _exported(dtype, rounded).items():
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def _exported(dtype: ExportDtype, rounded: bool) -> dict[str, bytes]:
    _, drafter, _ = trained_pair()
    target = rounded_target() if rounded else random_target()

    def prove(written: Path) -> None:
        assert write_proof(written, target, PROMPTS) is None

    with tempfile.TemporaryDirectory() as place:
        export_zlab(drafter, Path(place) / "drafter", dtype, prove=prove)
        return {path.name: path.read_bytes() for path in (Path(place) / "drafter").iterdir()}


def differences(folder: Path, target: Target) -> list[str]:
    """All that the audit asks of a folder with a proof, in its order: tensors, settings, decoding."""
    proof = read_proof(folder)
    assert proof is not None
    assert other_target(proof, target) is None
    files = file_differences(proof, folder, load_drafter(folder, target=target).config)
    again = replay_decoding(proof, folder, target)
    return [*files.lines, *decoding_differences(proof, again, target, lossy=files.lossy)]


@functools.cache
def rounded_target() -> Target:
    """The same target in bfloat16."""
    return build_target("random", copy.deepcopy(random_target().model).to(torch.bfloat16), None)


def edit_folder(folder: Path, *edits: Edit) -> Path:
    """Change configuration and tensors as a script would that knows nothing of Draftline, and save them again."""
    tree, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for edit in edits:
        edit(tree, tensors)
    (folder / "config.json").write_text(json.dumps(tree))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def edit_proof(folder: Path, change: Callable[[Tree], None], *, sign: bool = True) -> None:
    """Change the proof, and make its digest fit again if `sign`."""
    path = folder / "draftline_proof.json"
    tree = json.loads(path.read_text())
    digest = tree.pop("digest")
    change(tree)
    path.write_text(json.dumps({**tree, "digest": hash_json(tree) if sign else digest}))


def stored_as(dtype: torch.dtype) -> Edit:
    """Stored in another number format, as `config.json` then says, too."""

    def convert(tree: Tree, tensors: Tensors) -> None:
        tree["dtype"] = str(dtype).removeprefix("torch.")
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    return convert


def _swap(tensors: Tensors, one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other].clone(), tensors[one].clone()


def _permute_fc(_tree: Tree, tensors: Tensors) -> None:
    weight = tensors["fc.weight"]
    tensors["fc.weight"] = torch.cat(weight.chunk(3, dim=1)[::-1], dim=1)


def _swap_norms(_tree: Tree, tensors: Tensors) -> None:
    _swap(tensors, "layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight")


def _swap_gate_and_up(_tree: Tree, tensors: Tensors) -> None:
    _swap(tensors, "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight")


def _through(dtype: torch.dtype) -> Edit:
    def rounded(_tree: Tree, tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype).to(tensor.dtype) for name, tensor in tensors.items()})

    return rounded


def _zero(_tree: Tree, tensors: Tensors) -> None:
    tensors["layers.1.self_attn.o_proj.weight"].zero_()


def _swap_layers(_tree: Tree, tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        _swap(tensors, name, name.replace("layers.0.", "layers.1."))


def permute_ids(tree: Tree, _tensors: Tensors) -> None:
    """Not increasing any more, which no reader takes."""
    tree["dflash_config"]["target_layer_ids"] = tree["dflash_config"]["target_layer_ids"][::-1]


def _other_layer(tree: Tree, _tensors: Tensors) -> None:
    tree["dflash_config"]["target_layer_ids"] = [1, 2, 4]


def _other_mask(tree: Tree, _tensors: Tensors) -> None:
    tree["dflash_config"]["mask_token_id"] -= 1


def _other_rope(tree: Tree, _tensors: Tensors) -> None:
    tree["rope_theta"] *= 10


TENSOR_EDITS: dict[str, tuple[Edit, str]] = {
    "fc inputs permuted": (_permute_fc, "fc.weight has other values"),
    "q_norm and k_norm swapped": (_swap_norms, "layers.0.self_attn.k_norm.weight has other values"),
    "gate and up swapped": (_swap_gate_and_up, "layers.1.mlp.gate_proj.weight has other values"),
    "weights through fp8": (_through(torch.float8_e4m3fn), "fc.weight has other values"),
    "one tensor zeroed": (_zero, "layers.1.self_attn.o_proj.weight has other values"),
    "layers swapped": (_swap_layers, "layers.0.input_layernorm.weight has other values"),
}
"""Edits of weights, and the first difference that must be named."""

CONFIG_EDITS: dict[str, tuple[Edit, str]] = {
    "rope base changed": (_other_rope, "config.json: rope_parameters reads as"),
    "another layer captured": (
        _other_layer,
        "config.json: target_layer_ids reads as [1, 2, 4], the proof",
    ),
    "mask token changed": (_other_mask, "config.json: mask_token_id reads as 62, the proof has 63"),
}

TWICE_ROUNDED: Edit = _through(torch.bfloat16)
"""Of a float32 folder."""
