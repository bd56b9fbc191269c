"""Faults of capture, training targets, head and embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma2Config, GraniteConfig

from draftline import run as run_module
from draftline.records import CapturedSample, Sample
from draftline.targets import capture as capture_module
from draftline.targets import drafter_shape
from draftline.targets import loop as loop_module
from draftline.targets.capture import HookCapture
from draftline.targets.head import TargetHead
from draftline.targets.loop import TargetForwardLoop, pad_right
from tests.zoo.fault import (
    capturing,
    fault,
    handing,
    layer_part,
    noise,
    on_drafter,
    on_frozen,
    on_model,
    packing,
    seeing,
    shaped,
    with_ids,
    with_last,
    with_states,
)
from tests.zoo.pipeline import SMALL, Recipe, World, gpt2, llama, qwen3

ONE_LAYER = {"drafter": {"num_captured_layers": 1, "target_layer_ids": (1,)}}
LAST_HIDDEN = {"pipeline": {"send": "last_hidden"}}
ONE_LAST = Recipe(settings={**ONE_LAYER, **LAST_HIDDEN})
LAST = Recipe(settings=LAST_HIDDEN)
THREE = Recipe(settings={"drafter": {"num_captured_layers": 3, "target_layer_ids": (0, 1, 2)}})
GEMMA = Recipe(target=Gemma2Config(**{**SMALL, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}))
GPT2 = Recipe(target=gpt2())
GRANITE = Recipe(target=GraniteConfig(**{**SMALL, "logits_scaling": 4.0, "embedding_multiplier": 3.0}))


# F01: a captured layer does not reach fc.


class _Fusion(nn.Module):
    """fc over some of the captured layers."""

    def __init__(self, fc: nn.Linear, kept: tuple[int, ...], narrow: bool) -> None:
        super().__init__()
        self.in_features = len(kept) * 32 if narrow else fc.in_features
        self.weight = nn.Parameter(fc.weight.detach()[:, : len(kept) * 32].clone()) if narrow else fc.weight
        self.kept, self.narrow = kept, narrow

    def forward(self, states: Tensor) -> Tensor:
        if self.narrow:
            return states[..., : self.in_features] @ self.weight.T
        mask = torch.zeros(states.shape[-1])
        for index in self.kept:
            layer_part(mask, index).fill_(1.0)
        return (states * mask) @ self.weight.T


def _fused(world: World, kept: tuple[int, ...], narrow: bool) -> None:
    on_model(world, lambda model: setattr(model, "fc", _Fusion(model.fc, kept, narrow)))


@fault("fc masks the last of three captured layers", "F01", "DRF001", THREE)
def _(world: World) -> None:
    _fused(world, (0, 1), narrow=False)


@fault("fc masks the first of three captured layers", "F01", "DRF001", THREE)
def _(world: World) -> None:
    _fused(world, (1, 2), narrow=False)


@fault("fc is Linear(2*D, D) for three captured layers", "F01", "DRF001", THREE)
def _(world: World) -> None:
    _fused(world, (0, 1), narrow=True)


@fault("fc has weights of zero for one layer", "F01", "DRF001", THREE)
def _(world: World) -> None:
    on_drafter(world, lambda drafter: layer_part(drafter.model.fc.weight.data, 1).zero_())


@fault("fc gets the first layer twice and never the second", "F01", "DRF001", THREE)
def _(world: World) -> None:
    def double(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
        states = args[0].clone()
        layer_part(states, 1).copy_(layer_part(states, 0))
        return states

    on_model(world, lambda model: model.fc.register_forward_pre_hook(double))


@fault("the capture splits off the last captured layer", "F01", "DRF001", THREE)
def _(world: World) -> None:
    _fused(world, (0, 1), narrow=True)
    capturing(world, lambda item: with_states(item, item.hidden_states_SLD[:, :64]))


@fault("the loss hands on two of three layers", "F01", "DRF001", THREE)
def _(world: World) -> None:
    _fused(world, (0, 1), narrow=True)
    handing(world, lambda states, embeddings, layout: (states[..., :64], embeddings, layout))


@fault("the drafter is built for two layers, three are asked for", "F01", "DRF001", THREE)
def _(world: World) -> None:
    clean = run_module.resolve_drafter_config
    two = world.config.drafter.model_copy(update={"target_layer_ids": (0, 2), "num_captured_layers": 2})
    world.patch.setattr(run_module, "resolve_drafter_config", lambda target, _drafter, used: clean(target, two, used))


# F02: training targets from another layer.


def _split_states(world: World, change: Callable[[Any], Any]) -> None:
    """Other states behind the hooks of a target loop, before they are split by conversation."""
    clean = TargetForwardLoop._split

    def split(loop: TargetForwardLoop, states: Any, batch: list[Sample]) -> list[CapturedSample]:
        return clean(loop, change(states), batch)

    world.patch.setattr(TargetForwardLoop, "_split", split)


def _targets_from(world: World, index: int) -> None:
    """Targets from captured layer number `index`."""
    _split_states(
        world, lambda s: replace(s, verifier_last_hidden_packed=layer_part(s.hidden_states_packed, index).contiguous())
    )


@fault("training targets from the last captured layer", "F02", "TGT002")
def _(world: World) -> None:
    _targets_from(world, 1)


@fault("training targets from the first captured layer", "F02", "TGT002")
def _(world: World) -> None:
    _targets_from(world, 0)


@fault("last hidden states from a captured layer", "F02", "TGT002", LAST)
def _(world: World) -> None:
    capturing(world, lambda item: with_last(item, lambda _: layer_part(item.hidden_states_SLD, 1)))


@fault("the loss takes its labels from the last captured layer", "F02", "TGT002", LAST)
def _(world: World) -> None:
    seeing(world, lambda row: replace(row, verifier_last_hidden_packed=layer_part(row.hidden_states_packed, 1)))


@fault("the final norm hook sits one decoder layer too early", "B31", "TGT002", LAST)
def _(world: World) -> None:
    clean = HookCapture.__init__

    def init(capture: HookCapture, model: Any, ids: Any) -> None:
        clean(capture, model, ids)
        capture._final_norm = model.model.layers[-1]

    world.patch.setattr(HookCapture, "__init__", init)


@fault("training targets without the final norm", "B38", "TGT002")
def _(world: World) -> None:
    world.patch.setattr(TargetHead, "forward", lambda head, last: head.logits(last))


@fault("the final norm is applied twice", "B38", "TGT002", LAST)
def _(world: World) -> None:
    capturing(world, lambda item: with_last(item, torch.no_grad()(world.target.final_norm)))


@fault("training targets one token late", "B41", "TGT002")
def _(world: World) -> None:
    capturing(world, lambda item: with_ids(item, lambda ids: ids.roll(1)))


@fault("training targets are the tokens of the data", "B41", "TGT002")
def _(world: World) -> None:
    capturing(world, lambda item: with_ids(item, lambda _: item.sample.input_ids.roll(-1)))


@fault("the first training target of each conversation is wrong", "B43", "TGT002")
def _(world: World) -> None:
    def change(ids: Tensor) -> Tensor:
        first = (ids >= 0).cumsum(0) == 1
        return torch.where(first & (ids >= 0), (ids + 1) % 90, ids)

    capturing(world, lambda item: with_ids(item, change))


# F04: what is done to the fc input reaches the targets.


@fault("fresh noise on the states, the last ones too", "F04", "TGT003", LAST)
def _(world: World) -> None:
    capturing(world, lambda item: with_last(item, lambda last: last + noise(last, 0.3)))


@fault("the same noise every time on the last states", "F04", "TGT003", LAST)
def _(world: World) -> None:
    capturing(world, lambda item: with_last(item, lambda last: last + noise(last, 0.3, 5)))


@fault("both sets of states share their memory", "F04", "TGT003", LAST)
def _(world: World) -> None:
    def noisy(states: Any) -> Any:
        both = torch.cat([states.hidden_states_packed, states.verifier_last_hidden_packed], dim=-1)
        width = states.hidden_states_packed.shape[-1]
        inputs, last = both[..., :width], both[..., width:]
        inputs._base.add_(noise(both, 0.3, 5))  # in place, and on all that the view is a part of
        return replace(states, hidden_states_packed=inputs, verifier_last_hidden_packed=last)

    _split_states(world, noisy)


@fault("the loss adds noise to the whole row", "F04", "TGT003", LAST)
def _(world: World) -> None:
    def noisy(row: Any) -> Any:
        last = row.verifier_last_hidden_packed
        return replace(row, verifier_last_hidden_packed=last + noise(last, 0.4, 3))

    seeing(world, noisy)


# F06: the two tensors of the capture swapped.


def _swapped(row: Any) -> Any:
    return replace(
        row,
        hidden_states_packed=row.verifier_last_hidden_packed,
        verifier_last_hidden_packed=row.hidden_states_packed,
    )


@fault("the capture's results unpacked in the old order", "F06", "TGT001", ONE_LAST)
def _(world: World) -> None:
    def swapped(item: CapturedSample) -> CapturedSample:
        last = item.verifier_last_hidden_SD
        return item if last is None else with_last(with_states(item, last), lambda _: item.hidden_states_SLD)

    capturing(world, swapped)


@fault("swapped before the greedy ids are taken", "F06", "TGT001", Recipe(settings=ONE_LAYER))
def _(world: World) -> None:
    _split_states(world, _swapped)


@fault("swapped while packing", "F06", "TGT001", ONE_LAST)
def _(world: World) -> None:
    packing(world, _swapped)


@fault("swapped in the loss", "F06", "TGT001", ONE_LAST)
def _(world: World) -> None:
    seeing(world, _swapped)


# Which layers, and what of them.


def _hooked_on(world: World, ids: tuple[int, ...]) -> None:
    """Target loops that listen to other layers than they are told."""
    clean = TargetForwardLoop.__init__

    def init(loop: TargetForwardLoop, target: Any, _ids: Sequence[int], *rest: Any) -> None:
        clean(loop, target, ids, *rest)

    world.patch.setattr(TargetForwardLoop, "__init__", init)


@fault("hooks on the next layer (the other numbering)", "B32", "TGT004", Recipe(settings=ONE_LAYER))
def _(world: World) -> None:
    _hooked_on(world, (2,))


@fault("hooks on the layer before", "B32", "TGT004", Recipe(settings=ONE_LAYER))
def _(world: World) -> None:
    _hooked_on(world, (0,))


@fault("layers chosen by the drafter's depth", "B36", "TGT004")
def _(world: World) -> None:
    _hooked_on(world, (0, 1))


@fault("captured layers in reverse order", "B34", "TGT004")
def _(world: World) -> None:
    capturing(world, lambda item: with_states(item, item.hidden_states_SLD.roll(32, -1)))


@fault("one layer captured twice", "B39", "TGT004")
def _(world: World) -> None:
    capturing(world, lambda item: with_states(item, layer_part(item.hidden_states_SLD, 1).repeat(1, 2)))


@fault("captured states went through the final norm", "B38", "TGT006")
def _(world: World) -> None:
    norm = torch.no_grad()(world.target.final_norm)
    capturing(world, lambda item: with_states(item, norm(item.hidden_states_SLD.unflatten(-1, (2, 32))).flatten(-2)))


@fault("states belong to the next token", "B23", "TGT006")
def _(world: World) -> None:
    capturing(world, lambda item: with_states(item, item.hidden_states_SLD.roll(-1, 0)))


@fault("states at half their size", "B38", "TGT006")
def _(world: World) -> None:
    capturing(world, lambda item: with_states(item, item.hidden_states_SLD * 0.5))


@fault("states of a target rounded to four bits", "B74", "TGT006")
def _(world: World) -> None:
    def rounded(item: CapturedSample) -> CapturedSample:
        step = item.hidden_states_SLD.abs().max() / 7
        return with_states(item, (item.hidden_states_SLD / step).round() * step + 1e-6)

    capturing(world, rounded)


@fault("states of long conversations repeat from some token on", "B23", "TGT006")
def _(world: World) -> None:
    world.samples += [
        replace(s, input_ids=s.input_ids.repeat(2), loss_mask=s.loss_mask.repeat(2)) for s in world.samples[:3]
    ]
    capturing(
        world, lambda item: with_states(item, item.hidden_states_SLD[torch.arange(len(item.sample)).clamp(max=40)])
    )


def _with_hole(world: World, places: Any, value: float) -> None:
    def hole(item: CapturedSample) -> CapturedSample:
        states = item.hidden_states_SLD.clone()
        states[places] = value
        return with_states(item, states)

    capturing(world, hole)


@fault("all states zero", "B21", "TGT005")
def _(world: World) -> None:
    _with_hole(world, slice(None), 0.0)


@fault("states of a tenth of the tokens zero", "B21", "TGT005")
def _(world: World) -> None:
    _with_hole(world, slice(None, None, 10), 0.0)


@fault("not a number at one token", "B22", "TGT005")
def _(world: World) -> None:
    _with_hole(world, (4, 7), float("nan"))


# Batches.


@fault("left padding without positions or mask", "B25", "TGT007")
def _(world: World) -> None:
    @torch.no_grad()
    def forward(loop: TargetForwardLoop, hooks: HookCapture, batch: list[Sample]) -> list[CapturedSample]:
        rows, mask = pad_right([sample.input_ids.flip(0) for sample in batch])
        rows, mask = rows.flip(1), mask.flip(1)
        loop.target.model(input_ids=rows, use_cache=False)
        return loop._split(hooks.get_hidden_states_packed(mask), batch)

    world.patch.setattr(TargetForwardLoop, "_forward", forward)


@fault("results in the order of batches, not of samples", "B27", "TGT007")
def _(world: World) -> None:
    clean = TargetForwardLoop.capture

    def capture(loop: TargetForwardLoop, samples: Sequence[Sample]) -> list[CapturedSample]:
        found = clean(loop, sorted(samples, key=lambda sample: (len(sample), -sample.sample_id)))
        return [
            with_states(item, _fit(found[i].hidden_states_SLD, len(item.sample)))
            for i, item in enumerate(clean(loop, samples))
        ]

    world.patch.setattr(TargetForwardLoop, "capture", capture)


def _fit(states: Tensor, length: int) -> Tensor:
    return states.repeat(-(-length // len(states)), 1)[:length]


@fault("states of a shared prefix are reused", "B23", "TGT007")
def _(world: World) -> None:
    clean = TargetForwardLoop.capture

    def capture(loop: TargetForwardLoop, samples: Sequence[Sample]) -> list[CapturedSample]:
        items = clean(loop, samples)
        return [
            with_states(item, torch.cat([items[0].hidden_states_SLD[:3], item.hidden_states_SLD[3:]])) for item in items
        ]

    world.patch.setattr(TargetForwardLoop, "capture", capture)


# Head and embedding.


def _other_head(world: World, head: TargetHead) -> None:
    on_frozen(world, lambda frozen: replace(frozen, head=head))


@fault("a random output head for a tied target", "B66", "TGT008", Recipe(target=llama()))
def _(world: World) -> None:
    torch.manual_seed(1)
    _other_head(world, TargetHead(world.target.final_norm, nn.Linear(32, 96, bias=False)))


@fault("soft cap of the logits left out", "B70", "TGT008", GEMMA)
def _(world: World) -> None:
    head = world.target.head
    _other_head(world, TargetHead(head.norm, head.lm_head, head.output_multiplier, None))


@fault("scaling of the logits left out", "B70", "TGT008", GRANITE)
def _(world: World) -> None:
    head = world.target.head
    _other_head(world, TargetHead(head.norm, head.lm_head, 1.0, None))


@fault("a head without the padding rows", "B65", "TGT008")
def _(world: World) -> None:
    short = nn.Linear(32, 90, bias=False)
    short.weight.data = world.target.head.lm_head.weight.data[:90]
    _other_head(world, TargetHead(world.target.final_norm, short.requires_grad_(False)))


@fault("the final norm without its weight", "B38", "TGT008", LAST)
def _(world: World) -> None:
    norm = nn.RMSNorm(32, eps=1e-6, elementwise_affine=False)
    _other_head(world, TargetHead(norm, world.target.head.lm_head))


@fault("raw embedding rows of a target that scales them", "B70", "TGT009", GEMMA)
def _(world: World) -> None:
    weight = world.target.embedding.weight
    on_frozen(world, lambda frozen: replace(frozen, embed=lambda ids: nn.functional.embedding(ids, weight)))


@fault("the multiplier outside the embedding left out", "B70", "TGT009", GRANITE)
def _(world: World) -> None:
    on_frozen(world, lambda frozen: replace(frozen, embed=world.target.embedding))


@fault("a copy of the embedding that has moved", "B62", "TGT009")
def _(world: World) -> None:
    weight = world.target.embedding.weight.detach() * 1.05
    on_frozen(world, lambda frozen: replace(frozen, embed=lambda ids: weight[ids]))


@fault("embeddings twice as long beside learned positions", "B70", "TGT009", GPT2)
def _(world: World) -> None:
    on_frozen(world, lambda frozen: replace(frozen, embed=lambda ids: 2 * world.target.embedding(ids)))


@fault("positions of the target in the embeddings of blocks", "B41", "DRF010", GPT2)
def _(world: World) -> None:
    places = world.target.model.transformer.wpe.weight
    on_frozen(world, lambda frozen: replace(frozen, embed=lambda ids: world.target.embedding(ids) + places[3]))


# The frozen target.


@fault("the target is in training mode", "B87", "TGT010", Recipe(target=qwen3(attention_dropout=0.2)))
def _(world: World) -> None:
    world.target.model.train()


@fault("dropout left on in the target, in evaluation mode too", "B76", "TGT010")
def _(world: World) -> None:
    world.target.decoder_layers[1].mlp.register_forward_hook(
        lambda _module, _args, out: nn.functional.dropout(out, 0.1, training=True)
    )


@fault("the last layer is an fc input", "B39", "TGT011")
def _(world: World) -> None:
    world.set("drafter", target_layer_ids=(0, 3))
    for module in (drafter_shape, loop_module, capture_module):  # nobody refuses it
        world.patch.setattr(module, "check_target_layer_ids", lambda ids, _depth: tuple(ids))


@fault("num_target_layers is the number of captured layers", "B35", "TGT011")
def _(world: World) -> None:
    shaped(world, num_target_layers=2)


@fault("hooks stay on the target, and round what passes", "B30", "TGT012")
def _(world: World) -> None:
    clean = HookCapture.__enter__

    def enter(capture: HookCapture) -> HookCapture:
        for layer in capture._layers:
            layer.register_forward_hook(lambda _module, _args, output: (output * 64).round() / 64)
        return clean(capture)

    world.patch.setattr(HookCapture, "__enter__", enter)
