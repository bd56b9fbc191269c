"""What every export checks about itself before its folder gets its name.

The folder is read back as its readers read it, fact by fact: layer offset, block size, slot layout, causality, window,
rotary table, number format, who owns the head. Then one forward of what was read is compared with one of what was
written. Each check has a test that plants the wrong convention it is there for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftline.config import DFlashConfig
from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DraftlineError, ExportError
from draftline.formats.dialects import detect, facts_of
from draftline.formats.files import (
    DTYPES,
    DrafterFiles,
    ExportDtype,
    build_drafter,
    canonical,
    in_float32,
    read_files,
    stored_tensors,
)
from draftline.formats.load import Given, resolve

CHECKS: tuple[str, ...] = (
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
        config = resolve(facts_of(files, detect(files.tree, set(files.tensors), files.where)), Given())
    except DraftlineError as error:
        raise ExportError(f"what was written cannot be read back: {error}") from error
    expected = canonical(draft_model.config)
    tensors = stored_tensors(draft_model, dtype)
    everything = {**tensors, **(beside or {})}
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _different_shape(config, expected),
        lambda: _speculators_reader(files.tree, expected) if "speculators_model_type" in files.tree else None,
        lambda: _zlab_reader(files.tree, expected) if "speculators_model_type" not in files.tree else None,
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


def _zlab_reader(tree: dict[str, object], expected: DFlashConfig) -> str | None:
    """z-lab, SGLang and llama.cpp look in different places, and guess where a key is absent."""
    nested = tree.get("dflash_config")
    inside = nested.get("block_size") if isinstance(nested, dict) else None
    for place, value in (("the top level", tree.get("block_size")), ("dflash_config", inside)):
        if value != expected.block_size:
            return f"block_size in {place} is {value!r}, not {expected.block_size}"
    for name in ("layer_types", "num_target_layers", "dtype"):
        if name not in tree:
            return f"{name} is not written, and readers guess it differently"
    for layer, kind in enumerate(expected.layer_types):
        said = tree.get("is_causal")
        runs = kind == "sliding_attention" if said is None else bool(said)
        wanted = kind == "sliding_attention" and expected.sliding_window_causal
        if runs != wanted:
            return f"readers would run layer {layer} {_manner(runs)}, it was trained {_manner(wanted)}"
    return None


def _speculators_reader(tree: dict[str, object], expected: DFlashConfig) -> str | None:
    """vLLM takes one flag for all layers, and drafts as many tokens as the proposal method says."""
    runs = not tree.get("sliding_window_non_causal")
    for layer, kind in enumerate(expected.layer_types):
        wanted = kind == "sliding_attention" and expected.sliding_window_causal
        if runs != wanted:
            return f"vLLM would run layer {layer} {_manner(runs)}, it was trained {_manner(wanted)}"
    settings = tree.get("speculators_config")
    methods = settings.get("proposal_methods") if isinstance(settings, dict) else None
    drafted = methods[0].get("speculative_tokens") if methods else None
    if drafted != expected.num_speculative_tokens:
        return f"speculative_tokens is {drafted}, the drafter drafts {expected.num_speculative_tokens}"
    return None


def _manner(causal: bool) -> str:
    return "causally" if causal else "bidirectionally"


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
    layers = files.tree.get("transformer_layer_config", files.tree)
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
    layers = files.tree.get("transformer_layer_config", files.tree)
    table = Qwen3RotaryEmbedding(Qwen3Config.from_dict(layers))
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
