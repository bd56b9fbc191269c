"""EXP and PRF: is a folder the drafter that was trained, whoever reads it, and is it still what was exported?

EXP: the drafter is exported with random weights of probe size; its files are read here by the rules of each serving
engine and computed by a second implementation. PRF: every export carries `draftline_proof.json`. It is asked for the
tensors and settings that were written, and for the drafted blocks of some prompts, which are decoded again.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftline.audit.drafter_reference import DrafterView, reference_block, rope_table, view_of_config
from draftline.audit.probe import Probe, once_per_audit, relative_difference
from draftline.audit.report import Problem, check
from draftline.audit.subject import NotApplicable
from draftline.errors import CheckpointError, ExportError, TargetError
from draftline.formats.files import read_files
from draftline.formats.folder import PROOF_FILE
from draftline.formats.programs import (
    Reading,
    as_trained,
    block_of,
    differences,
    format_of,
    layers_of,
    missing_keys,
    readings,
)
from draftline.formats.proof import (
    FileDifferences,
    Proof,
    decoding_differences,
    file_differences,
    other_target,
    read_proof,
    replay_decoding,
)
from draftline.targets.layers import default_target_layer_ids

_KNOWN_KEYS = {
    *("architectures", "model_type", "block_size", "num_target_layers", "dtype"),
    *("layer_types", "vocab_size", "head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("is_causal", "dflash_config", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "max_window_layers", "use_sliding_window"),
    *("sliding_window", "attention_bias", "attention_dropout", "initializer_range", "tie_word_embeddings"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"),
}
_COMPUTED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
"""Settings on which readers act, with what the drafter does."""
_KNOWN_BLOCK_KEYS = {
    *("block_size", "mask_token_id", "target_layer_ids"),
    *("sample_from_anchor", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
}
_AS_EXPORTED = "take the folder as it was exported, or export the drafter again"
_NO_PROOF = (
    f"the folder has no {PROOF_FILE}: it is of another program or older than proofs; export it again to have one"
)


@dataclass(frozen=True, eq=False)
class Exported:
    """What lies in the folder, and what was in memory when it was written.

    Attributes:
        refusal: why the export itself refused to write; the other fields are empty then.
        trained: outputs [A, P, D] of the training forward with the same weights.
    """

    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: dict[str, Tensor]
    trained: Tensor
    refusal: str = ""

    @property
    def layers(self) -> dict[str, Any]:
        """The part of the config that describes the layers."""
        return layers_of(self.tree)

    @property
    def block(self) -> dict[str, Any]:
        """The part that describes blocks."""
        return block_of(self.tree)

    @property
    def is_speculators(self) -> bool:
        return format_of(self.tree) == "speculators"

    @property
    def readings(self) -> list[Reading]:
        """The folder by the rules of every program that reads its format."""
        return readings(self.tree)


@check("EXP001", "the exported tensors are not the drafter's", needs=("DRF001", "DRF006", "DRF008", "DRF009"))
def tensors(probe: Probe) -> Problem | None:
    found = exported(probe)
    if found.refusal:
        return Problem(f"the export refuses: {found.refusal}", "fix what it names; nothing was written")
    missing = sorted(found.weights.keys() - found.tensors.keys())
    extra = sorted(found.tensors.keys() - found.weights.keys() - _beside(probe))
    changed = [
        name
        for name, tensor in found.tensors.items()
        if name in found.weights and not _equal(tensor, found.weights[name].to(tensor.dtype))
    ]
    if not missing and not extra and not changed:
        return None
    return Problem(
        f"{len(missing)} missing {missing[:3]}, {len(extra)} unexpected {extra[:3]}, {len(changed)} with other values "
        f"{changed[:3]}",
        "write every backbone tensor under z-lab's names, unchanged but for the dtype; no embedding, and no head but "
        "that of a reduced vocabulary",
    )


@check("EXP002", "a key that a reader needs is missing from the exported config", needs=("EXP001",))
def required_keys(probe: Probe) -> Problem | None:
    found = _exported(probe)
    missing = missing_keys(found.tree)
    if not missing:
        return None
    effects = [f"{r.program} {remark}" for r in found.readings for remark in r.remarks if "missing" in remark]
    wrong = any(r.shape is None or differences(r, _trained(probe)) for r in found.readings)
    return Problem(
        f"missing: {', '.join(missing)}{'; ' + effects[0] if effects else ''}",
        "write every key of the format",
        "error" if wrong else "warning",
    )


@check("EXP003", "a reader would capture other target layers", needs=("EXP001", "EXP002"))
def layer_ids(probe: Probe) -> Problem | None:
    depth = probe.subject.target.num_layers
    told = _tree(probe).get("num_target_layers", depth)
    if told != depth:
        return Problem(f"num_target_layers is {told}, the target has {depth}", f"num_target_layers: {depth}")
    fix = "convention A: 0-based layers whose output is read"
    return _reading_differs(probe, ("target_layer_ids",), fix) or _other_convention(probe)


def _other_convention(probe: Probe) -> Problem | None:
    """Ids of a finished folder that are the usual choice but for a shift: written in the other numbering?"""
    ids, depth = probe.layer_ids, probe.subject.target.num_layers
    if probe.subject.folder is None or len(ids) > depth - 3:
        return None
    usual = default_target_layer_ids(depth, len(ids))
    for shift in (-1, 1):
        if ids == tuple(i + shift for i in usual) and ids != usual:
            return Problem(
                f"layers {list(ids)} are the usual {list(usual)} of {depth} {shift:+d}: "
                "the ids may be written in the other numbering convention",
                f"if it was trained on the outputs of layers {list(usual)}, write those ids",
                "warning",
            )
    return None


@check(
    "EXP004", "a reader would run layers causally that were trained bidirectionally, or the reverse", needs=("EXP001",)
)
def causality(probe: Probe) -> Problem | None:
    found = _reading_differs(
        probe, ("causal",), "is_causal: false if all layers are bidirectional, left out for the mix with sliding ones"
    )
    flag = "sliding_window_non_causal"
    if found is None and "transformer_layer_config" in _exported(probe).tree and flag not in _exported(probe).tree:
        return Problem(
            f"{flag} is not written: vLLM 0.32 assumes true, speculators false", f"write {flag}", severity="warning"
        )
    return found


@check("EXP005", "a reader would use another sliding window", needs=("EXP001",))
def windows(probe: Probe) -> Problem | None:
    layers = _exported(probe).layers
    declared = [w for w in probe.view.windows if w is not None]
    if declared and layers.get("use_sliding_window") is False:
        return Problem(
            f"use_sliding_window is {layers['use_sliding_window']} although layers slide: the window is dropped",
            "use_sliding_window: true",
        )
    return _reading_differs(probe, ("windows",), "write sliding_window and layer_types as trained")


@check("EXP006", "a reader would rotate otherwise, or clamp positions", needs=("EXP001",))
def rope(probe: Probe) -> Problem | None:
    layers, config = _exported(probe).layers, probe.subject.draft_model.config
    fix = "write the rotary settings used in training, and at least the target's max_position_embeddings"
    reading = next((r for r in _exported(probe).readings if r.shape is not None), None)
    if reading is None or reading.shape is None:
        raise NotApplicable("no program reads the exported config")
    settings = reading.shape.rope_parameters
    partial = {k: settings.get(k, layers.get(k)) for k in ("partial_rotary_factor", "mrope_section")}
    if any(value not in (None, 1, 1.0) for value in partial.values()):
        return Problem(f"{partial}: engines honour it, the trained drafter turns whole heads", fix)
    limit = min(r.shape.max_position_embeddings for r in _exported(probe).readings if r.shape is not None)
    if limit < config.max_position_embeddings:
        return Problem(f"max_position_embeddings {limit}, trained with {config.max_position_embeddings}", fix)
    places = torch.tensor([0, 1, 100, 5000])
    found = rope_table(view_of(reading), places)
    wanted = probe.subject.draft_model.rotary_emb(torch.zeros(1, device=probe.device), places[None].to(probe.device))
    for index, place in enumerate(places.tolist()):
        difference = max(
            float((f[index] - w[0, index].double().cpu()).abs().max()) for f, w in zip(found, wanted, strict=True)
        )
        if difference > 1e-4 + place * 1e-6:
            return Problem(
                f"table from the written settings {settings} differs at position {place} by {difference:.2e} from "
                "that of training",
                fix,
            )
    return None


@check("EXP007", "block size, mask token or slot layout are written wrong", needs=("EXP001", "EXP002"))
def block_layout(probe: Probe) -> Problem | None:
    tree, inner = _tree(probe), _exported(probe).block
    fix = "write block_size at top level and in dflash_config, mask_token_id and the slot layout as trained"
    top, nested = tree.get("block_size"), inner.get("block_size")
    if None not in (top, nested) and top != nested:
        return Problem(f"block_size is {top} at top level, {nested} in dflash_config", fix)
    said, trained = inner.get("sample_from_anchor"), probe.subject.draft_model.config.sample_from_anchor
    if said is not None and bool(said) != trained:
        return Problem(f"sample_from_anchor is written as {said}, trained with {trained}", fix)
    return _reading_differs(probe, ("block_size", "mask_token_id", "sample_from_anchor"), fix)


@check("EXP008", "scaling of embeddings or logits is not written", needs=("EXP001",))
def scales(probe: Probe) -> Problem | None:
    names = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    target = probe.subject.target
    # measured on the live target: z-lab multiplies raw rows, so this number has to be right
    ids = probe.samples[0].input_ids[:4].to(target.device)
    rows = target.embedding.get_parameter("weight").detach()[ids].double()
    found = probe.reference[0].first_input[:4].double()
    measured = float((found * rows).sum() / rows.square().sum())
    written = float(_exported(probe).block.get("input_embedding_scale") or 1.0)
    if relative_difference(rows * measured, found) < 1e-2 and abs(written / measured - 1) > 1e-2:
        return Problem(
            f"input_embedding_scale {written:g}, the target's first layer receives {measured:.4g} times its raw rows",
            f"dflash_config.input_embedding_scale: {measured:.6g}",
        )
    logits, raw = _raw_logits(probe)
    values = _exported(probe).block
    scaled = raw * float(values.get("output_multiplier") or 1.0)
    cap = values.get("final_logit_softcapping")
    scaled = torch.tanh(scaled / cap) * cap if cap else scaled
    difference = relative_difference(scaled, logits)
    if difference > probe.tolerance:
        return Problem(
            f"the written output_multiplier and soft cap give logits that differ by {difference:.1e} from the target's",
            "dflash_config.output_multiplier and final_logit_softcapping as the target applies them",
        )
    return _reading_differs(probe, names, "write what the target does to embeddings and logits")


@check("EXP009", "the written dtype is not that of the tensors, or the drafter overflows in float16", needs=("EXP001",))
def dtype(probe: Probe) -> Problem | None:
    found = _exported(probe)
    kinds = {str(t.dtype).removeprefix("torch.") for t in found.tensors.values() if t.is_floating_point()}
    written = found.tree.get("dtype", found.tree.get("torch_dtype"))
    if written is not None and kinds != {written}:
        return Problem(f"config says {written}, the tensors are {sorted(kinds)}", "write dtype as stored")
    broken = [n for n, t in probe.subject.draft_model.named_parameters() if float(t.detach().abs().max()) > 65504]
    if broken:
        return Problem(f"weights beyond float16: {broken[:3]}", "serve with dtype bfloat16 or float32", "warning")
    return None


@check("EXP010", "the exported config has keys that the drafter does not have", needs=("EXP001",))
def foreign_keys(probe: Probe) -> Problem | None:
    found = _exported(probe)
    if found.is_speculators:
        raise NotApplicable("speculators reads its configuration strictly itself")
    extra = sorted(set(found.tree) - _KNOWN_KEYS)
    extra += [f"dflash_config.{key}" for key in sorted(set(found.block) - _KNOWN_BLOCK_KEYS)]
    if not extra:
        return None
    return Problem(f"unknown to the format: {', '.join(extra)}", "write only the keys of the format", "warning")


@check("EXP011", "a reader would use another embedding, head or vocabulary", needs=("EXP001",))
def vocabulary(probe: Probe) -> Problem | None:
    found, target = _exported(probe), probe.subject.target
    fix = "vocab_size: rows of the target's table, padding included; tie_word_embeddings: false; no head of its own"
    rows = found.layers.get("vocab_size", target.vocab_size)
    if rows != target.vocab_size:
        return Problem(f"vocab_size {rows}, the target's table has {target.vocab_size} rows", fix)
    if found.layers.get("tie_word_embeddings"):
        return Problem("tie_word_embeddings is true: the drafter has neither embedding nor head", fix)
    reduced = _reduced_mistake(probe, found)
    if reduced is not None:
        return reduced
    architecture = "DFlashSpeculator" if found.is_speculators else "DFlashDraftModel"
    named = found.tree.get("architectures")
    if named != [architecture]:
        return Problem(
            f"architectures is {named}, readers look for {architecture}", f'architectures: ["{architecture}"]'
        )
    kind = found.layers.get("model_type")
    return None if kind == "qwen3" else Problem(f"model_type is {kind}, readers look for qwen3", "model_type: qwen3")


def _beside(probe: Probe) -> set[str]:
    """Tensors that a reduced vocabulary stores with the drafter's own."""
    return set() if probe.subject.draft_model.d2t is None else {"lm_head.weight", "t2d"}


def _reduced_mistake(probe: Probe, found: Exported) -> Problem | None:
    """What readers of a reduced vocabulary would take otherwise than it was trained."""
    model = probe.subject.draft_model
    fix = "write draft_vocab_size, d2t (offsets), t2d, and as lm_head the target's rows at the kept ids"
    rows = found.tree.get("draft_vocab_size", model.config.head_rows)
    if rows != model.config.head_rows:
        return Problem(f"draft_vocab_size {rows}, the drafter can say {model.config.head_rows} tokens", fix)
    if model.d2t is None:
        return None
    missing = sorted(_beside(probe) - found.tensors.keys())
    if missing:
        return Problem(f"{missing[0]} is missing: vLLM would draft from the target's whole head", fix)
    kept_ids = probe.kept_ids
    if found.tensors["t2d"].nonzero()[:, 0].tolist() != kept_ids.tolist():
        return Problem("t2d keeps other tokens than d2t", fix)
    head = probe.subject.target.model.get_output_embeddings().get_parameter("weight").detach().cpu()
    stored = found.tensors["lm_head.weight"]
    if not _equal(stored, head[kept_ids].to(stored.dtype)):
        return Problem("lm_head is not the target's rows at the tokens that d2t names", fix)
    return None


@check(
    "EXP012",
    "the exported drafter computes something else than the trained one",
    needs=(
        "EXP001",
        "EXP002",
        "EXP003",
        "EXP004",
        "EXP005",
        "EXP006",
        "DRF001",
        "DRF002",
        "DRF003",
        "DRF004",
        "DRF005",
        "DRF006",
        "DRF008",
    ),
)
def forward_equality(probe: Probe) -> Problem | None:
    found = _exported(probe)
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    other_heads = _reading_differs(probe, heads, "write the heads of the trained drafter")
    if other_heads is not None:
        return other_heads
    unlike = {k: found.layers[k] for k, v in _COMPUTED.items() if found.layers.get(k, v) not in (v, None)}
    if unlike:
        return Problem(
            f"written {unlike}, the trained drafter has { ({name: _COMPUTED[name] for name in unlike}) }",
            "write what the drafter computes",
        )
    for reading in found.readings:
        if reading.shape is None:
            return Problem(f"{reading.program} {'; '.join(reading.remarks)}", "write every key of the format")
        difference = _run(probe, view_of(reading), found)
        precision = 2e-4 if found.tensors["fc.weight"].dtype == torch.float32 else 5e-2
        if difference > precision:
            return Problem(
                f"read as {reading.program} does, its outputs differ by {difference:.1e} (relative) from training",
                "compare the written config with the settings of the run",
            )
    return None


@once_per_audit
def exported(probe: Probe) -> Exported:
    """The finished folder, or one export with random weights of probe size."""
    return _export(probe) if probe.subject.folder is None else _finished(probe, probe.subject.folder)


def view_of(reading: Reading) -> DrafterView:
    """What a program reads, in the words of the reference."""
    assert reading.shape is not None, f"{reading.program} refuses the folder"
    return replace(view_of_config(reading.shape), causal=reading.causal, windows=reading.windows)


def _finished(probe: Probe, folder: Path) -> Exported:
    files = read_files(folder)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in probe.subject.draft_model.state_dict().items()}
    return Exported(files.tree, files.tensors, weights, probe.run_drafter(probe.states))


def _export(probe: Probe) -> Exported:
    model = probe.subject.draft_model
    with probe.shaken_weights(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "drafter"
        weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        trained = probe.run_drafter(probe.states)
        try:
            probe.subject.export(model, folder)
        except (ExportError, CheckpointError) as error:
            if model.config.sample_from_anchor and model.d2t is None:
                raise NotApplicable("the format has no words for sample_from_anchor") from error
            return Exported({}, {}, weights, trained, refusal=str(error))
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = load_file(folder / "model.safetensors")
    return Exported(tree, stored, weights, trained)


def _exported(probe: Probe) -> Exported:
    found = exported(probe)
    if found.refusal:
        raise NotApplicable("nothing was exported")
    return found


def _tree(probe: Probe) -> dict[str, Any]:
    return _exported(probe).tree


def _reading_differs(probe: Probe, names: tuple[str, ...], fix: str) -> Problem | None:
    for reading in _exported(probe).readings:
        if reading.shape is None:
            continue
        found = differences(reading, _trained(probe))
        for name in names:
            if name in found:
                return Problem(f"{reading.program} reads {found[name]}", fix)
    return None


def _trained(probe: Probe) -> Reading:
    return as_trained(probe.subject.draft_model.config)


def _run(probe: Probe, view: DrafterView, found: Exported) -> float:
    block, worst = probe.block_size, 0.0
    anchors, starts = probe.few_anchors, probe.starts(probe.few_anchors)
    for index in (0, len(anchors) - 1):
        states = probe.states[0, starts[index] : anchors[index]]
        embeddings = probe.block_embeddings[0, index * block : (index + 1) * block]
        output = reference_block(view, found.tensors, states, embeddings)
        worst = max(worst, relative_difference(output, found.trained[index].cpu()))
    return worst


@torch.no_grad()
def _raw_logits(probe: Probe) -> tuple[Tensor, Tensor]:
    """Logits of the target and of its head module alone, for a few tokens."""
    forward = probe.reference[0]
    return forward.logits[:6].double().cpu(), probe.subject.target.model.get_output_embeddings()(
        forward.normed[:6]
    ).double().cpu()


def _equal(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.equal(found, wanted)


# The proof.


@check("PRF001", "tensors or settings are not those of the proof")
def unchanged(probe: Probe) -> Problem | None:
    found = _files(probe)
    probe.notes += found.notes
    if not found.lines:
        return None
    others = f"; {len(found.lines) - 1} further differences" if len(found.lines) > 1 else ""
    return Problem(f"{found.lines[0]}{others}", _AS_EXPORTED)


@check("PRF002", "the folder drafts other blocks than its proof says")
def drafts_the_same(probe: Probe) -> Problem | None:
    proof, target = _proof(probe), probe.subject.target
    files = _files(probe)
    try:
        replay = replay_decoding(proof, _folder(probe), target)
    except TargetError as error:
        raise NotApplicable(f"this target is not decoded here: {error}") from error
    lines = decoding_differences(proof, replay, target, lossy=files.lossy)
    if lines:
        others = f"; {len(lines) - 1} further differences" if len(lines) > 1 else ""
        return Problem(f"{lines[0]}{others}", _AS_EXPORTED)
    probe.notes.append(replay.sentence())
    return None


@check("PRF003", "the proof is damaged, or of another target or tokenizer")
def of_this_target(probe: Probe) -> Problem | None:
    try:
        proof = read_proof(_folder(probe))
    except CheckpointError as error:
        return Problem(str(error), "export the drafter again")
    if proof is None:
        raise NotApplicable(_NO_PROOF)
    fault = other_target(proof, probe.subject.target)
    return None if fault is None else Problem(fault, "name the target that the drafter was exported for")


def _folder(probe: Probe) -> Path:
    if probe.subject.folder is None:
        raise NotApplicable("only a finished folder carries a proof")
    return probe.subject.folder


def _proof(probe: Probe) -> Proof:
    """The proof, if it says something about this target; what is wrong with it is reported once."""
    try:
        proof = read_proof(_folder(probe))
    except CheckpointError as error:
        raise NotApplicable("the proof cannot be used, see PRF003") from error
    if proof is None:
        raise NotApplicable(_NO_PROOF)
    if other_target(proof, probe.subject.target) is not None:
        raise NotApplicable("the proof cannot be used, see PRF003")
    return proof


@once_per_audit
def _files(probe: Probe) -> FileDifferences:
    return file_differences(_proof(probe), _folder(probe), probe.subject.draft_model.config)
