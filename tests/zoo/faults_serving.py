"""Faults of the exported folder, of decoding, and of what is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftline.evaluate import acceptance as acceptance_module
from draftline.evaluate import generate as generate_module
from draftline.evaluate.acceptance import Acceptance
from draftline.evaluate.generate import Generation
from draftline.evaluate.result import CountedAnswer
from draftline.formats import write as write_module
from tests.zoo.fault import fault
from tests.zoo.faults_drafter import SLIDING
from tests.zoo.faults_target import GEMMA, GRANITE
from tests.zoo.pipeline import World

Tree = dict[str, Any]


def _exporting(world: World, change: Callable[[Path], None]) -> None:
    """Change every folder that an export leaves, behind its own checks."""
    clean = write_module.write_folder

    def write(folder: Path, *rest: Any, **named: Any) -> None:
        clean(folder, *rest, **named)
        change(folder)

    world.patch.setattr(write_module, "write_folder", write)


def written(world: World, change: Callable[[Tree], object]) -> None:
    """Exports with another config.json."""

    def rewrite(folder: Path) -> None:
        path = folder / "config.json"
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    _exporting(world, rewrite)


def stored(world: World, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Exports with other tensors; what the file says of itself stays."""

    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        with safe_open(path, "pt") as file:
            header = file.metadata()
        save_file(change(load_file(path)), path, metadata=header)

    _exporting(world, rewrite)


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["context_norm.weight"] = tensors.pop("hidden_norm.weight")
    return tensors


@fault("a tensor under another trainer's name", "B69", "EXP001")
def _(world: World) -> None:
    stored(world, _renamed)


@fault("a tensor left out", "B69", "EXP001")
def _(world: World) -> None:
    stored(world, lambda t: {name: v for name, v in t.items() if "q_norm" not in name})


@fault("norms written as 1 + w", "B38", "EXP001")
def _(world: World) -> None:
    stored(world, lambda t: {name: v - 1.0 if v.ndim == 1 else v for name, v in t.items()})


@fault("the export carries an embedding of its own", "B65", "EXP001")
def _(world: World) -> None:
    stored(world, lambda t: {**t, "embed_tokens.weight": torch.zeros(96, 32)})


@fault("num_target_layers left out", "B35", "EXP002")
def _(world: World) -> None:
    written(world, lambda tree: tree.pop("num_target_layers"))


@fault("target_layer_ids left to be computed by the reader", "B35", "EXP002")
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].pop("target_layer_ids"))


@fault("block_size at top level only", "B42", "EXP002")
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].pop("block_size"))


@fault("no dtype", "B73", "EXP002")
def _(world: World) -> None:
    written(world, lambda tree: tree.pop("dtype"))


@fault("the mask token left out", "B64", "EXP002")
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].pop("mask_token_id"))


@fault("layer ids written plus one", "B32", "EXP003")
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].update(target_layer_ids=[1, 3]))


@fault("layer ids of another depth", "B36", "EXP003")
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].update(target_layer_ids=[0, 1]))


@fault("num_target_layers written as the number of captured layers", "B35", "EXP003")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(num_target_layers=2))


@fault("a bidirectional drafter written as causal", "B58", "EXP004")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(is_causal=True))


@fault("causal sliding layers written as bidirectional", "B58", "EXP004", SLIDING)
def _(world: World) -> None:
    written(world, lambda tree: tree.update(is_causal=False))


@fault("the window left out", "B58", "EXP005", SLIDING)
def _(world: World) -> None:
    written(world, lambda tree: tree.update(sliding_window=None))


@fault("another window written", "B58", "EXP005", SLIDING)
def _(world: World) -> None:
    written(world, lambda tree: tree.update(sliding_window=64))


@fault("layer types written as full attention", "B58", "EXP005", SLIDING)
def _(world: World) -> None:
    written(world, lambda tree: tree.update(layer_types=["full_attention"] * 2, is_causal=True))


@fault("use_sliding_window is false although layers slide", "B58", "EXP005", SLIDING)
def _(world: World) -> None:
    written(world, lambda tree: tree.update(use_sliding_window=False))


@fault("rope_theta written wrong", "B55", "EXP006")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(rope_theta=500000.0))


@fault("a rotary scaling that was not trained", "B55", "EXP006")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(rope_scaling={"rope_type": "linear", "factor": 4.0}))


@fault("partial rotary written", "B53", "EXP006")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(partial_rotary_factor=0.25))


@fault("positions written as the training length", "B54", "EXP006")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(max_position_embeddings=64))


@fault("another block size inside than outside", "B42", "EXP007")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(block_size=16))


@fault("block size written as drafted tokens", "B42", "EXP007")
def _(world: World) -> None:
    def change(tree: Tree) -> None:
        tree["block_size"] = tree["dflash_config"]["block_size"] = 7

    written(world, change)


@fault("the pad token written as mask token", "B61", "EXP007")
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].update(mask_token_id=0))


@fault("scaling of the embedding not written", "B70", "EXP008", GEMMA)
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].pop("input_embedding_scale"))


@fault("soft cap not written", "B70", "EXP008", GEMMA)
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].pop("final_logit_softcapping"))


@fault("scaling of the logits not written", "B70", "EXP008", GRANITE)
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].pop("output_multiplier"))


@fault("dtype written is not that of the tensors", "B81", "EXP009")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(dtype="float16"))


@fault("fields of the target's family in the config", "B83", "EXP010")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(num_experts=8, attn_output_gate=True))


@fault("auto_map points at a file that is not there", "B83", "EXP010")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(auto_map={"AutoModel": "dflash.DFlashDraftModel"}))


@fault("vocab_size of the tokenizer written", "B65", "EXP011")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(vocab_size=90))


@fault("tie_word_embeddings inherited from the target", "B66", "EXP011")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(tie_word_embeddings=True))


@fault("an architecture that readers do not know", "B83", "EXP011")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(architectures=["Qwen3ForCausalLM"]))


@fault("another eps written", "B55", "EXP012")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(rms_norm_eps=0.1))


@fault("another number of heads written", "B83", "EXP012")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(head_dim=8, num_attention_heads=4, num_key_value_heads=2))


# Decoding.


@fault("every drafted token is accepted", "B103", "EVL001")
def _(world: World) -> None:
    clean = generate_module.verify_greedy

    def accept(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        _, _ = clean(drafted, logits)
        return len(drafted), int(logits[-1].argmax())

    world.patch.setattr(generate_module, "verify_greedy", accept)


@fault("the bonus token is taken one place late", "B103", "EVL001")
def _(world: World) -> None:
    clean = generate_module.verify_greedy

    def late(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        accepted, _ = clean(drafted, logits)
        return accepted, int(logits[min(accepted + 1, len(logits) - 1)].argmax())

    world.patch.setattr(generate_module, "verify_greedy", late)


@fault("the target's cache keeps rejected tokens", "B103", "EVL001")
def _(world: World) -> None:
    from draftline.evaluate.target_state import TargetState

    clean = TargetState.keep

    def keep(state: TargetState, count: int) -> None:
        clean(state, min(count + 1, state._new_ids.shape[1]))

    world.patch.setattr(TargetState, "keep", keep)


@fault("only the first drafted token is ever accepted", "B103", "EVL002")
def _(world: World) -> None:
    clean = generate_module.verify_greedy

    def first(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        accepted = min(clean(drafted, logits)[0], 1)
        return accepted, int(logits[accepted].argmax())

    world.patch.setattr(generate_module, "verify_greedy", first)


@fault("the prompt's forward is counted", "B100", "EVL002")
def _(world: World) -> None:
    clean = generate_module.decode

    def decode(*given: Any) -> Generation:
        made = clean(*given)
        return replace(made, accepted_per_forward=[0, *made.accepted_per_forward])

    world.patch.setattr(generate_module, "decode", decode)


@fault("acceptance length without the bonus token", "B94", "EVL003")
def _(world: World) -> None:
    def accepted(answer: CountedAnswer) -> Acceptance:
        forwards = len(answer.accepted_per_forward)
        return Acceptance(answer.output_length - 1 - forwards, forwards)

    world.patch.setattr(CountedAnswer, "acceptance", property(accepted))


@fault("acceptance length averaged over answers", "B94", "EVL003")
def _(world: World) -> None:
    def macro(parts: Sequence[Acceptance]) -> Acceptance:
        forwards = sum(part.forwards for part in parts)
        mean = sum(part.length for part in parts) / max(1, len(parts))
        return Acceptance(mean * forwards, forwards)

    world.patch.setattr(Acceptance, "total", staticmethod(macro))


def _drafting(world: World, change: Callable[[Tensor], Tensor]) -> None:
    """Decoding whose drafter gets other states than training gave it."""
    clean = generate_module.BlockDrafter.extend

    def extend(drafter: Any, hidden_states: Tensor) -> None:
        clean(drafter, change(hidden_states))

    world.patch.setattr(generate_module.BlockDrafter, "extend", extend)


@fault("decoding feeds captured layers in another order", "B34", "EVL004")
def _(world: World) -> None:
    _drafting(world, lambda states: states.roll(32, -1))


@fault("decoding drops the last state of each forward", "B41", "EVL004")
def _(world: World) -> None:
    _drafting(world, lambda states: torch.cat([states[:, :-1], states[:, :1]], dim=1))


@fault("decoding anchors blocks at the mask token", "B41", "EVL004")
def _(world: World) -> None:
    clean = generate_module.BlockDrafter.propose
    world.patch.setattr(generate_module.BlockDrafter, "propose", lambda drafter, _anchor: clean(drafter, 95))


@fault("the estimate averages over all anchors", "B98", "EVL005")
def _(world: World) -> None:
    def mean(streaks: Sequence[int]) -> acceptance_module.Acceptance:
        return acceptance_module.Acceptance(sum(streaks) + len(streaks), len(streaks))

    world.patch.setattr(acceptance_module, "walk", mean)


@fault("the estimate counts from slot 0", "B98", "EVL005")
def _(world: World) -> None:
    clean = acceptance_module.walk
    world.patch.setattr(acceptance_module, "walk", lambda streaks: clean([s + 1 for s in streaks]))


@fault("the other slot layout written", "B42", "EXP007")
def _(world: World) -> None:
    written(world, lambda tree: tree["dflash_config"].update(sample_from_anchor=True))


@fault("another activation written", "B83", "EXP012")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(hidden_act="gelu"))


@fault("biases written that the drafter does not have", "B83", "EXP012")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(attention_bias=True))


@fault("dropout of the target's family written", "B83", "EXP012")
def _(world: World) -> None:
    written(world, lambda tree: tree.update(attention_dropout=0.1))


@fault("decoding goes on behind a stop token", "B103", "EVL001")
def _(world: World) -> None:
    world.patch.setattr(generate_module, "_cut", lambda tokens, room, _stop: tokens[:room])


@fault("a block that is right as a whole loses its last token", "B103", "EVL002")
def _(world: World) -> None:
    clean = generate_module.verify_greedy

    def verify(drafted: Tensor, logits: Tensor) -> tuple[int, int]:
        accepted, bonus = clean(drafted, logits)
        whole = accepted == len(drafted) > 0
        return (accepted - 1, int(drafted[-1])) if whole else (accepted, bonus)

    world.patch.setattr(generate_module, "verify_greedy", verify)
