"""What every export checks about itself before its folder gets its name.

The folder is read back as its readers read it, fact by fact: layer offset, block size, slot layout, causality, window,
rotary table, number format, who owns the head. Then one forward of what was read is compared with one of what was
written. Each check has a test that plants the wrong convention it is there for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftline.config import DFlashConfig, ExportDtype
from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DraftlineError, ExportError
from draftline.formats.dialects import detect, said_by
from draftline.formats.files import (
    DTYPES,
    DrafterFiles,
    build_drafter,
    canonical,
    in_float32,
    read_files,
    stored_tensors,
)
from draftline.formats.load import complete
from draftline.formats.programs import (
    as_trained,
    differences,
    format_of,
    layers_as_read,
    layers_of,
    missing_keys,
    proposed_tokens,
    readings,
)
from draftline.options import Given

EXPORT_CHECKS: tuple[str, ...] = (
    "reload",
    "shape, layer offset, slot layout, causality and window",
    "block size and causality in every place where a reader looks",
    "number format",
    "head, embedding and vocabulary",
    "weights",
    "rotary table",
    "forward",
)
"""What `verify_folder` covers, for the model card."""


def verify_folder(
    folder: Path, draft_model: DFlashDraftModel, dtype: ExportDtype, beside: Mapping[str, Tensor] | None = None
) -> None:
    """Check a written folder against the drafter it was written from.

    Args:
        beside: tensors that the format stores with the drafter's own.

    Raises:
        ExportError: something reads back differently; the message says what.
    """
    try:
        files = read_files(folder)
        form = detect(files.tree, set(files.tensors), files.where)
        config = complete(said_by(files, form), Given(), files.where)
    except DraftlineError as error:
        raise ExportError(f"what was written cannot be read back: {error}") from error
    expected = canonical(draft_model.config)
    tensors = stored_tensors(draft_model, dtype)
    everything = {**tensors, **(beside or {})}
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _different_shape(config, expected),
        lambda: _read_otherwise(files.tree, expected),
        lambda: _different_dtype(files, dtype),
        lambda: _owned_head(files, expected, everything),
        lambda: _different_weights(files, everything),
        lambda: _different_rotation(files, draft_model),
        lambda: _different_forward(config, files, draft_model, tensors),
    )
    for check in checks:
        fault = check()
        if fault is not None:
            raise ExportError(f"{fault}: not exported")


def refuse_short_window(config: DFlashConfig) -> None:
    """Readers differ in whether a bidirectional window also hides later slots; with a short one that would matter.

    Raises:
        ExportError: it would.
    """
    sliding = "sliding_attention" in config.layer_types and not config.sliding_window_causal
    if sliding and config.sliding_window is not None and config.sliding_window < config.block_size:
        raise ExportError(
            f"sliding_window {config.sliding_window} is shorter than block_size {config.block_size} in bidirectional "
            "layers: some readers would also hide later slots from earlier ones; set drafter.sliding_window to at "
            f"least {config.block_size}"
        )


def _different_shape(config: DFlashConfig, expected: DFlashConfig) -> str | None:
    for name in DFlashConfig.model_fields:
        found, wanted = getattr(config, name), getattr(expected, name)
        if found != wanted:
            return f"{name} was {wanted!r} and reads back as {found!r}"
    return None


def _read_otherwise(tree: dict[str, Any], expected: DFlashConfig) -> str | None:
    """By the rules of every program that reads the format: they look in different places, and guess where a key is
    absent."""
    missing = missing_keys(tree)
    if missing:
        return f"{missing[0]} is not written, and readers guess it differently"
    for reading in readings(tree):
        if reading.shape is None:
            return f"{reading.program} {'; '.join(reading.remarks)}"
        found = differences(reading, as_trained(expected))
        if found:
            return f"{reading.program} reads {next(iter(found.values()))}"
    if format_of(tree) == "speculators" and proposed_tokens(tree) != expected.num_speculative_tokens:
        drafted = expected.num_speculative_tokens
        return f"speculative_tokens is {proposed_tokens(tree)}, the drafter drafts {drafted}"
    return None


def _different_dtype(files: DrafterFiles, dtype: ExportDtype) -> str | None:
    if files.tree.get("dtype") != dtype:
        return f"dtype is written as {files.tree.get('dtype')!r}, the weights are {dtype}"
    floats = {name: tensor for name, tensor in files.tensors.items() if tensor.is_floating_point()}
    other = next((name for name, tensor in floats.items() if tensor.dtype != DTYPES[dtype]), None)
    return None if other is None else f"{other} is stored as {files.tensors[other].dtype}, not {dtype}"


def _owned_head(files: DrafterFiles, expected: DFlashConfig, wanted: Mapping[str, Tensor]) -> str | None:
    """Readers decide from these whether to use the target's head and embedding, which is what was trained with."""
    heads = ("lm_head", "embed_tokens", "t2d", "d2t")
    owned = sorted(name for name in files.tensors.keys() - wanted.keys() if name.startswith(heads))
    if owned:
        return f"{owned[0]} is stored, and readers would use it instead of the target's"
    layers = layers_of(files.tree)
    if layers.get("tie_word_embeddings") is not False:
        return "tie_word_embeddings is not false, and readers would look for a head of the drafter's own"
    rows = files.tree.get("draft_vocab_size", expected.vocab_size)
    if rows != expected.head_rows:
        return f"draft_vocab_size is {rows}, and readers would expect a head of so many rows, not {expected.head_rows}"
    return None


def _different_weights(files: DrafterFiles, tensors: dict[str, Tensor]) -> str | None:
    if files.tensors.keys() != tensors.keys():
        return f"tensors differ in name: {sorted(files.tensors.keys() ^ tensors.keys())[0]}"
    other = next((name for name, tensor in tensors.items() if not torch.equal(files.tensors[name], tensor)), None)
    return None if other is None else f"{other} reads back with other values; check the disk"


def _different_rotation(files: DrafterFiles, draft_model: DFlashDraftModel) -> str | None:
    """As transformers reads the file, which is what readers call; our own parser is not asked."""
    table = Qwen3RotaryEmbedding(layers_as_read(files.tree))
    ours = draft_model.rotary_emb
    if torch.equal(table.inv_freq, ours.inv_freq.cpu()) and table.attention_scaling == ours.attention_scaling:
        return None
    return f"rope_parameters {draft_model.config.rope_parameters} read back as another rotary table"


@torch.no_grad()
def _different_forward(
    config: DFlashConfig, files: DrafterFiles, draft_model: DFlashDraftModel, tensors: dict[str, Tensor]
) -> str | None:
    """Two blocks over a few random states, by what was read and by the live model with the same rounded weights."""
    live = copy.deepcopy(draft_model).to("cpu", torch.float32)
    live.load_state_dict(in_float32(tensors))
    size = live.config.block_size
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, size + 4, live.fc.in_features, generator=generator)
    blocks = torch.randn(1, 2 * size, live.config.hidden_size, generator=generator)
    layout = BlockLayout.of_row(torch.tensor([1, size + 3]), torch.arange(size + 4), size)
    read = build_drafter(config, {name: files.tensors[name] for name in tensors}, str(files.folder))
    if torch.equal(read(states, blocks, layout), live(states, blocks, layout)):
        return None
    return "the drafter read back computes something else than the one written"
