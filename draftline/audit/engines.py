"""What each program makes of a drafter's `config.json`: the same file, read by the rules of five readers.

Rules are those of z-lab `dflash` 0.1.0, speculators 0.9.0, vLLM 0.32, SGLang 0.5 and llama.cpp as read in their public
code. A reading is a `DrafterView`, so that it can be compared with the trained drafter, and run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from draftline.audit.drafter_reference import DrafterView
from draftline.targets.layers import default_target_layer_ids
from draftline.targets.rope import rope_as_read

ZLAB_READERS = ("z-lab", "vLLM", "SGLang", "llama.cpp")
SPECULATORS_READERS = ("speculators", "vLLM")


@dataclass(frozen=True)
class Reading:
    """What one reader does with a folder.

    Attributes:
        view: the drafter as it understands it; None if it refuses.
        remarks: what it assumes, ignores or refuses, in words.
    """

    reader: str
    view: DrafterView | None
    remarks: tuple[str, ...]


def readers_of(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The programs that read this kind of configuration."""
    return SPECULATORS_READERS if "speculators_model_type" in tree else ZLAB_READERS


def read_as(reader: str, tree: Mapping[str, Any]) -> Reading:
    """Read a configuration by the rules of one program."""
    if "speculators_model_type" in tree:
        return _read_speculators(reader, tree)
    return _read_zlab(reader, tree)


def _read_zlab(reader: str, tree: Mapping[str, Any]) -> Reading:
    inner = dict(tree.get("dflash_config") or {})
    both = {**tree, **inner}
    remarks: list[str] = []
    depth = tree.get("num_target_layers")
    if depth is None:
        if reader == "z-lab":
            return Reading(reader, None, ("refuses: num_target_layers is missing at top level",))
        if reader == "SGLang":
            depth = tree["num_hidden_layers"]
            remarks.append(f"takes num_target_layers = {depth} from the drafter's own depth")
    ids = both.get("target_layer_ids")
    if ids is None:
        count = tree["num_hidden_layers"]
        if not isinstance(depth, int) or depth < count + 3:
            return Reading(reader, None, (*remarks, "refuses: target_layer_ids are missing"))
        ids = default_target_layer_ids(depth, count)
        remarks.append(f"target_layer_ids are missing: assumes {list(ids)}")
    if reader == "SGLang" and depth is not None and max(ids) >= depth:
        return Reading(reader, None, (*remarks, f"refuses: layer {max(ids)} of a target of {depth} layers"))
    if both.get("mask_token_id") is None:
        return Reading(reader, None, (*remarks, "refuses: mask_token_id is missing"))
    block = _block_size(reader, tree, inner, remarks)
    view = DrafterView(
        target_layer_ids=tuple(ids),
        **_shape(tree),
        **_zlab_masks(tree, remarks),
        block_size=block,
        mask_token_id=both["mask_token_id"],
        first=_zlab_first(reader, both, remarks),
        input_embedding_scale=float(both.get("input_embedding_scale") or 1.0),
        output_multiplier=float(both.get("output_multiplier") or 1.0),
        final_logit_softcapping=both.get("final_logit_softcapping"),
    )
    return Reading(reader, view, tuple(remarks))


def _block_size(reader: str, tree: Mapping[str, Any], inner: Mapping[str, Any], remarks: list[str]) -> int:
    if reader == "vLLM":
        remarks.append("never reads block_size: give num_speculative_tokens = block_size - 1 on the command line")
    value = inner.get("block_size", tree.get("block_size"))
    if reader == "llama.cpp" and "block_size" not in tree:
        remarks.append("some builds read block_size at top level only, where it is missing")
    if value is None:
        remarks.append("block_size is missing: assumes 16")
        return 16
    return int(value)


def _zlab_first(reader: str, both: Mapping[str, Any], remarks: list[str]) -> int:
    if both.get("sample_from_anchor"):
        remarks.append(f"{reader} has no word for sample_from_anchor: it reads every slot one place too early")
    return 1


def _zlab_masks(tree: Mapping[str, Any], remarks: list[str]) -> dict[str, Any]:
    """Causality and window of each layer."""
    count = int(tree["num_hidden_layers"])
    types = tree.get("layer_types")
    if types:
        sliding = [kind == "sliding_attention" for kind in types]
    else:  # what transformers fills in for a Qwen3 configuration
        windowed = bool(tree.get("use_sliding_window")) and tree.get("sliding_window") is not None
        sliding = [windowed and layer >= int(tree.get("max_window_layers", 28)) for layer in range(count)]
        remarks.append(f"layer_types are missing: assumes a window in {sum(sliding)} of {count} layers")
    override = tree.get("is_causal")
    causal = tuple(sliding) if override is None else (bool(override),) * count
    inner = tree.get("dflash_config") or {}
    if inner.get("use_swa") or "swa_window_size" in inner:
        remarks.append("ignores dflash_config.use_swa / swa_window_size: the window is lost beyond it")
    if inner.get("causal") is not None and override is not None and bool(inner["causal"]) != bool(override):
        remarks.append(f"ignores dflash_config.causal = {inner['causal']}, follows is_causal = {override}")
    window = tree.get("sliding_window")
    return {"causal": causal, "windows": tuple(window if s else None for s in sliding)}


def _read_speculators(reader: str, tree: Mapping[str, Any]) -> Reading:
    layer = tree["transformer_layer_config"]
    remarks: list[str] = []
    ids = tree.get("aux_hidden_state_layer_ids")
    if ids is None:
        return Reading(reader, None, ("refuses: aux_hidden_state_layer_ids are missing",))
    count = int(layer["num_hidden_layers"])
    types = list(layer.get("layer_types") or ["full_attention"] * count)
    sliding = [kind == "sliding_attention" for kind in types]
    free = bool(tree.get("sliding_window_non_causal", reader == "vLLM"))  # each reader has its own default
    if reader == "vLLM":
        causal = (not free,) * count
        if not free:
            remarks.append("sliding_window_non_causal is false: runs every layer causally, full attention included")
        remarks.append("never reads block_size: num_speculative_tokens comes from the command line")
    else:
        causal = tuple(s and not free for s in sliding)
    window = layer.get("sliding_window")
    view = DrafterView(
        target_layer_ids=tuple(i - 1 for i in ids),
        **_shape(layer),
        causal=causal,
        windows=tuple(window if s else None for s in sliding),
        block_size=int(tree["block_size"]),
        mask_token_id=tree.get("mask_token_id"),
        first=0 if tree.get("sample_from_anchor") else 1,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )
    return Reading(reader, view, tuple(remarks))


def _shape(tree: Mapping[str, Any]) -> dict[str, Any]:
    heads = int(tree["num_attention_heads"])
    return {
        "num_heads": heads,
        "num_key_value_heads": int(tree.get("num_key_value_heads", heads)),
        "head_dim": int(tree.get("head_dim") or tree["hidden_size"] // heads),
        "eps": float(tree.get("rms_norm_eps", 1e-6)),
        "rope": rope_as_read(tree),
        "max_position_embeddings": int(tree.get("max_position_embeddings", 32768)),
    }


def differences(found: DrafterView, trained: DrafterView) -> dict[str, str]:
    """Fields in which a reading is another drafter than the one trained, in words."""
    texts = {}
    for field in fields(DrafterView):
        ours, theirs = getattr(trained, field.name), getattr(found, field.name)
        if field.name in ("rope", "max_position_embeddings"):
            continue
        if ours != theirs:
            texts[field.name] = f"{field.name} {_plain(theirs)}, trained with {_plain(ours)}"
    return texts


def _plain(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
