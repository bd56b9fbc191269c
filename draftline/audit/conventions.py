"""In words: which conventions a drafter's folder follows, and what each program makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftline.audit.drafter_reference import DrafterView
from draftline.audit.engines import differences, read_as, readers_of
from draftline.errors import CheckpointError
from draftline.formats.dialects import Format, detect
from draftline.formats.files import DrafterFiles

_TRAINERS: dict[Format, str] = {
    "zlab": "a trainer that writes z-lab's format",
    "specforge": "SpecForge: z-lab's names; auto_map points at a file that is not shipped",
    "modelopt": "NVIDIA ModelOpt: z-lab's names, block_size at top level only, windows bidirectional inside a block",
    "nemo": "NVIDIA NeMo AutoModel: z-lab's names, sliding layers bidirectional inside a block",
    "torchspec": "TorchSpec: tensors context_proj, context_norm, final_norm; num_target_layers counts captured layers",
    "deepspec": "DeepSpec: every slot predicts, a block of P drafts P tokens; stores embedding and head",
    "speculators": "speculators: layer ids count from the embedding (plus one)",
}

_OURS = "the target's own next tokens, divided by the count of supervised slots"

_SIGNALS: dict[Format, str] = {
    "zlab": "what the files do not say",
    "specforge": "the tokens of the data, divided by the local sum of weights",
    "modelopt": "the target's whole distribution, divided by the local sum of weights",
    "nemo": "the tokens of the data, divided by the local sum of weights",
    "torchspec": "the tokens of the data, divided by the local sum of weights",
    "deepspec": "the tokens of the data, divided by the global sum of weights",
    "speculators": "the target's own next tokens, divided by the count of supervised slots",
}


def describe(files: DrafterFiles) -> list[str]:
    """Sentences for the report: format, conventions, and one per program that might read the folder."""
    try:
        form = detect(files.tree, set(files.tensors), files.where)
    except CheckpointError as error:
        return [f"conventions: {error}"]
    ours = files.shape is not None
    return [
        f"written by {'Draftline' if ours else _TRAINERS[form]}",
        f"trained on {_OURS if ours else _SIGNALS[form]}",
        *_ids(files.tree, form),
        *(_engine(reader, files, form) for reader in readers_of(files.tree)),
    ]


def _ids(tree: Mapping[str, Any], form: Format) -> list[str]:
    if form == "speculators":
        ids = tree.get("aux_hidden_state_layer_ids") or []
        return [f"captured layers {ids} count from the embedding: outputs of layers {[i - 1 for i in ids]}"]
    inner = tree.get("dflash_config") or {}
    ids = inner.get("target_layer_ids", tree.get("target_layer_ids"))
    if ids is None:
        return ["captured layers are not written: each reader computes its own"]
    embedding = " (-1 is the embedding's output)" if -1 in ids else ""
    return [f"captured layers {ids} are 0-based layer outputs{embedding}"]


def _engine(reader: str, files: DrafterFiles, form: Format) -> str:
    """What one program does with the folder."""
    names = set(files.tensors)
    if form == "torchspec" and "context_proj.weight" in names:
        return f"{reader}: finds none of fc, hidden_norm, norm under these names; convert with `draftline import`"
    if form == "deepspec":
        return f"{reader}: would read every slot one place off; import with --sample-from-anchor"
    try:
        reading = read_as(reader, files.tree)
    except (KeyError, TypeError, ValueError) as error:
        return f"{reader}: cannot read the config ({type(error).__name__}: {error})"
    if reading.view is None:
        return f"{reader}: {'; '.join(reading.remarks)}"
    remarks = [*reading.remarks, *_against_others(reader, reading.view, files.tree)]
    layout = "causal" if all(reading.view.causal) else "bidirectional" if not any(reading.view.causal) else "mixed"
    text = f"{reader}: layers {list(reading.view.target_layer_ids)}, blocks of {reading.view.block_size}, {layout}"
    return text + (f"; {'; '.join(remarks)}" if remarks else "")


def _against_others(reader: str, view: DrafterView, tree: Mapping[str, Any]) -> list[str]:
    """Where two programs read the same file differently."""
    texts = []
    for other in readers_of(tree):
        if other == reader:
            continue
        reading = read_as(other, tree)
        if reading.view is not None:
            different = differences(reading.view, view)
            texts += [f"{other} reads {name} otherwise" for name in different]
    return texts
