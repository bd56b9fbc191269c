"""Every wrong convention is planted in what an export writes, and must be caught before the folder gets its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.draft.model import DFlashDraftModel
from draftline.errors import ExportError
from draftline.formats import files as folder_module
from draftline.formats import write as write_module
from draftline.formats.write import export_speculators, export_zlab
from tests.formats.drafters import ALL_SLIDING, BIDIRECTIONAL, MIX, YARN, make_drafter

Tree = dict[str, Any]


def export_with(monkeypatch: pytest.MonkeyPatch, name: str, edit: Callable[[Tree], None]) -> Callable[..., None]:
    """The exporter of a format with a fault in the configuration that it writes."""
    right: Callable[..., Tree] = getattr(write_module, f"{name}_config")

    def wrong(*arguments: Any) -> Tree:
        tree = right(*arguments)
        edit(tree)
        return tree

    monkeypatch.setattr(write_module, f"{name}_config", wrong)
    return export_of(name)


def export_of(name: str) -> Callable[..., None]:
    if name == "zlab":
        return export_zlab

    def export(draft_model: DFlashDraftModel, folder: Path, dtype: Any) -> None:
        export_speculators(draft_model, folder, dtype, verifier="a/target")

    return export


def one_more(ids: list[int]) -> list[int]:
    return [layer + 1 for layer in ids]


ZLAB_FAULTS: dict[str, tuple[Tree, Callable[[Tree], None], str]] = {
    "ids + 1": ({}, lambda t: t["dflash_config"].update(target_layer_ids=[2, 4, 5]), "target_layer_ids"),
    "an id lost": ({}, lambda t: t["dflash_config"].update(target_layer_ids=[1, 3]), "target_layer_ids"),
    "causal": ({}, lambda t: t.update(is_causal=True), "is_causal"),
    "causality left out": (BIDIRECTIONAL, lambda t: t.pop("is_causal"), "sliding_window_causal"),
    "causality of full layers left to readers": (ALL_SLIDING, lambda t: t.update(is_causal=False), "causal"),
    "mix overridden": (MIX, lambda t: t.update(is_causal=False), "sliding_window_causal"),
    "slot layout": ({}, lambda t: t["dflash_config"].update(sample_from_anchor=True), "sample_from_anchor"),
    "theta": ({}, lambda t: t.update(rope_theta=10000.0), "rope_parameters"),
    "scaling lost": (YARN, lambda t: t.update(rope_scaling=None), "rope_parameters"),
    "window": (MIX, lambda t: t.update(sliding_window=7), "sliding_window"),
    "window switched off": (MIX, lambda t: t.update(use_sliding_window=False), "use_sliding_window"),
    "layers all full": (MIX, lambda t: t.update(layer_types=["full_attention"] * 2), "layer_types"),
    "block size": ({}, lambda t: (t.update(block_size=5), t["dflash_config"].update(block_size=5)), "block_size"),
    "block size at one place": ({}, lambda t: t.update(block_size=5), "block_size"),
    "no block size at the top": ({}, lambda t: t.pop("block_size"), "^block_size is not written"),
    "no block size inside": (
        {},
        lambda t: t["dflash_config"].pop("block_size"),
        "dflash_config.block_size is not written",
    ),
    "depth of the drafter": ({}, lambda t: t.update(num_target_layers=6), "num_target_layers"),
    "no depth": ({}, lambda t: t.pop("num_target_layers"), "num_target_layers"),
    "mask token": ({}, lambda t: t["dflash_config"].update(mask_token_id=2), "mask_token_id"),
    "vocabulary": ({}, lambda t: t.update(vocab_size=41), "vocab_size"),
    "no dtype": ({}, lambda t: t.pop("dtype"), "dtype"),
    "dtype": ({}, lambda t: t.update(dtype="bfloat16"), "dtype"),
    "head": ({}, lambda t: t.update(tie_word_embeddings=True), "tie_word_embeddings"),
    "eps": ({}, lambda t: t.update(rms_norm_eps=1e-6), "rms_norm_eps"),
    "no layer types": ({}, lambda t: t.pop("layer_types"), "layer_types"),
}

SPECULATORS_FAULTS: dict[str, tuple[Tree, Callable[[Tree], None], str]] = {
    "ids": ({}, lambda t: t.update(aux_hidden_state_layer_ids=[1, 3, 4]), "target_layer_ids"),
    "ids + 2": ({}, lambda t: t.update(aux_hidden_state_layer_ids=[3, 5, 6]), "target_layer_ids"),
    "causal in vLLM": (
        {},
        lambda t: t.update(sliding_window_non_causal=False),
        r"vLLM reads causal \[True, True\], trained with \[False",
    ),
    "causal": (BIDIRECTIONAL, lambda t: t.update(sliding_window_non_causal=False), "sliding_window_causal"),
    "bidirectional": (ALL_SLIDING, lambda t: t.update(sliding_window_non_causal=True), "sliding_window_causal"),
    "slot layout": ({}, lambda t: t.update(sample_from_anchor=True), "sample_from_anchor"),
    "no slot layout": ({}, lambda t: t.pop("sample_from_anchor"), "sample_from_anchor"),
    "theta": ({}, lambda t: t["transformer_layer_config"]["rope_parameters"].update(rope_theta=1e4), "rope_parameters"),
    "window": (ALL_SLIDING, lambda t: t["transformer_layer_config"].update(sliding_window=7), "sliding_window"),
    "window lost": (ALL_SLIDING, lambda t: t["transformer_layer_config"].pop("sliding_window"), "sliding_window"),
    "block size": ({}, lambda t: t.update(block_size=5), "block_size"),
    "drafted tokens": (
        {},
        lambda t: t["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4),
        "speculative_tokens",
    ),
    "dtype": ({}, lambda t: t.update(dtype="bfloat16"), "dtype"),
    "head": ({}, lambda t: t.update(draft_vocab_size=32), "draft_vocab_size"),
    "tied head": ({}, lambda t: t["transformer_layer_config"].update(tie_word_embeddings=True), "tie_word_embeddings"),
}

CASES = [("zlab", *case) for case in ZLAB_FAULTS.items()] + [
    ("speculators", *case) for case in SPECULATORS_FAULTS.items()
]


@pytest.mark.parametrize(("form", "fault", "case"), CASES, ids=[f"{form}-{fault}" for form, fault, _ in CASES])
def test_a_wrong_convention_in_the_configuration_is_caught(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    fault: str,  # noqa: ARG001  # names the case
    case: tuple[Tree, Callable[[Tree], None], str],
) -> None:
    changes, edit, words = case
    export = export_with(monkeypatch, form, edit)
    with pytest.raises(ExportError, match=words) as caught:
        export(make_drafter(**changes), tmp_path / "drafter", "float32")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    a, b = "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.weight"
    return {**tensors, a: tensors[b], b: tensors[a]}


TENSOR_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "dtype": (lambda t: {name: tensor.bfloat16() for name, tensor in t.items()}, "dtype"),
    "one dtype": (lambda t: {**t, "norm.weight": t["norm.weight"].bfloat16()}, "bfloat16"),
    "head": (lambda t: {**t, "lm_head.weight": torch.zeros(40, 24)}, "lm_head"),
    "embedding": (lambda t: {**t, "embed_tokens.weight": torch.zeros(40, 24)}, "embed_tokens"),
    "mapping": (lambda t: {**t, "d2t": torch.zeros(40, dtype=torch.int64)}, "d2t"),
    "keys for values": (swapped, "k_proj"),
    "a captured layer lost": (lambda t: {**t, "fc.weight": t["fc.weight"][:, :48].contiguous()}, r"fc\.weight"),
}


@pytest.mark.parametrize("form", ["zlab", "speculators"])
@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_wrong_tensor_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, fault: str) -> None:
    edit, words = TENSOR_FAULTS[fault]
    right = folder_module.save_file
    monkeypatch.setattr(
        folder_module, "save_file", lambda tensors, path, metadata: right(edit(tensors), path, metadata=metadata)
    )
    with pytest.raises(ExportError, match=words):
        export_of(form)(make_drafter(), tmp_path / "drafter", "float32")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["zlab", "speculators"])
def test_a_model_that_was_not_trained_as_its_configuration_says_is_caught(tmp_path: Path, form: str) -> None:
    rotated, causal = make_drafter(), make_drafter(**BIDIRECTIONAL)
    rotated.rotary_emb.inv_freq *= 2
    with pytest.raises(ExportError, match="rotary table"):
        export_of(form)(rotated, tmp_path / "drafter", "float32")
    causal.layers[0].kind = make_drafter(**ALL_SLIDING).layers[0].kind
    with pytest.raises(ExportError, match="computes something else"):
        export_of(form)(causal, tmp_path / "drafter", "float32")
    assert not list(tmp_path.iterdir())
