"""Faults of capture, training targets, head, embedding, packing and data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, GraniteConfig

from draftline.audit.subject import AuditSubject
from draftline.draft.block import FrozenTarget
from draftline.records import CapturedSample, Sample
from draftline.targets.capture import HookCapture
from draftline.targets.head import TargetHead
from draftline.targets.loop import TargetForwardLoop, pad_right
from tests.zoo.fault import capturing, fault, layer_part, losing, noise, packing, with_config, with_samples, with_states
from tests.zoo.pipeline import SMALL, Recipe, chat_tokenizer, llama, qwen3

Patch = pytest.MonkeyPatch
ONE_LAYER = {"drafter": {"num_captured_layers": 1, "target_layer_ids": (1,)}}
LAST_HIDDEN = {"pipeline": {"send": "last_hidden"}}
ONE_LAST = Recipe(settings={**ONE_LAYER, **LAST_HIDDEN})
LAST = Recipe(settings=LAST_HIDDEN)
THREE = Recipe(settings={"drafter": {"num_captured_layers": 3, "target_layer_ids": (0, 1, 2)}})
GEMMA = Recipe(target=Gemma2Config(**{**SMALL, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}))
GRANITE = Recipe(target=GraniteConfig(**{**SMALL, "logits_scaling": 4.0, "embedding_multiplier": 3.0}))
CHAT = Recipe(chat=True)


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


@fault("fc masks the last of three captured layers", "F01", "DRF001", THREE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.draft_model.fc = _Fusion(subject.draft_model.fc, (0, 1), narrow=False)
    return subject


@fault("fc masks the first of three captured layers", "F01", "DRF001", THREE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.draft_model.fc = _Fusion(subject.draft_model.fc, (1, 2), narrow=False)
    return subject


@fault("fc is Linear(2*D, D) for three captured layers", "F01", "DRF001", THREE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.draft_model.fc = _Fusion(subject.draft_model.fc, (0, 1), narrow=True)
    return subject


@fault("fc has weights of zero for one layer", "F01", "DRF001", THREE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    layer_part(subject.draft_model.fc.weight.data, 1).zero_()
    return subject


@fault("fc gets the first layer twice and never the second", "F01", "DRF001", THREE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def double(_module: nn.Module, args: tuple[Tensor]) -> Tensor:
        states = args[0].clone()
        layer_part(states, 1).copy_(layer_part(states, 0))
        return states

    subject.draft_model.fc.register_forward_pre_hook(double)
    return subject


@fault("the capture splits off the last captured layer", "F01", "DRF001", THREE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.draft_model.fc = _Fusion(subject.draft_model.fc, (0, 1), narrow=True)
    return capturing(subject, lambda item: with_states(item, item.hidden_states_SLD[:, :64]))


@fault("the loss hands on two of three layers", "F01", "DRF001", THREE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.draft_model.fc = _Fusion(subject.draft_model.fc, (0, 1), narrow=True)
    return losing(subject, inputs=lambda states, embeddings, layout: (states[..., :64], embeddings, layout))


@fault("the drafter is built for two layers, three are asked for", "F01", "DRF001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    drafter = subject.config.drafter.model_copy(update={"target_layer_ids": (0, 1, 2), "num_captured_layers": 3})
    return replace(subject, config=subject.config.model_copy(update={"drafter": drafter}))


# F02: training targets from another layer.


def _targets_from(subject: AuditSubject, index: int | None, patch: Patch, layer: int | None = None) -> AuditSubject:
    """Targets from captured layer number `index`, or from any decoder layer by a second hook."""
    clean = TargetForwardLoop._split

    def split(loop: TargetForwardLoop, states: Any, batch: list[Sample]) -> list[CapturedSample]:
        wrong = layer_part(states.hidden_states_packed, index)
        return clean(loop, replace(states, verifier_last_hidden_packed=wrong), batch)

    patch.setattr(TargetForwardLoop, "_split", split)
    return subject


@fault("training targets from the last captured layer", "F02", "TGT002")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    return _targets_from(subject, 1, patch)


@fault("training targets from the first captured layer", "F02", "TGT002")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    return _targets_from(subject, 0, patch)


@fault("last hidden states from a captured layer", "F02", "TGT002", LAST)
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    return _targets_from(subject, 1, patch)


@fault("the loss takes its labels from the last captured layer", "F02", "TGT002", LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return losing(
        subject, row=lambda row: replace(row, verifier_last_hidden_packed=layer_part(row.hidden_states_packed, 1))
    )


@fault("the final norm hook sits one decoder layer too early", "B31", "TGT002", LAST)
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = HookCapture.__init__

    def init(capture: HookCapture, model: Any, ids: Any) -> None:
        clean(capture, model, ids)
        capture._final_norm = model.model.layers[-1]

    patch.setattr(HookCapture, "__init__", init)
    return subject


@fault("training targets without the final norm", "B38", "TGT002")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    patch.setattr(TargetHead, "forward", lambda head, last: head.logits(last))
    return subject


@fault("the final norm is applied twice", "B38", "TGT002", LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    norm = subject.target.final_norm

    def normed(item: CapturedSample) -> CapturedSample:
        with torch.no_grad():
            return replace(item, verifier_last_hidden_SD=norm(item.verifier_last_hidden_SD))

    return capturing(subject, normed)


@fault("training targets one token late", "B41", "TGT002")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: replace(item, target_ids_S=item.target_ids_S.roll(1)))


@fault("training targets are the tokens of the data", "B41", "TGT002")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: replace(item, target_ids_S=item.sample.input_ids.roll(-1)))


# F04: what is done to the fc input reaches the targets.


def _noisy(item: CapturedSample, seed: int | None) -> CapturedSample:
    last = item.verifier_last_hidden_SD
    return replace(
        item,
        hidden_states_SLD=item.hidden_states_SLD,
        verifier_last_hidden_SD=last + noise(last, 0.3, seed),
    )


@fault("fresh noise on the states, the last ones too", "F04", "TGT003", LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: _noisy(item, None))


@fault("the same noise every time on the last states", "F04", "TGT003", LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: _noisy(item, 5))


@fault("both sets of states share their memory", "F04", "TGT003", LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def share(item: CapturedSample) -> CapturedSample:
        both = torch.cat([item.hidden_states_SLD, item.verifier_last_hidden_SD], dim=-1)
        whole = both.T.contiguous().T  # features first in memory: adding over all of it reaches both
        return replace(item, hidden_states_SLD=_Leaky.make(whole), verifier_last_hidden_SD=whole[:, 64:])

    return capturing(subject, share)


class _Leaky(Tensor):
    """States whose in-place addition covers the whole buffer, as noise added before the split does."""

    whole: Tensor

    @staticmethod
    def make(whole: Tensor) -> Tensor:
        view = whole[:, :64].as_subclass(_Leaky)
        view.whole = whole
        return view

    def add_(self, other: Any) -> Tensor:  # type: ignore[override]
        self.whole.add_(other)
        return self


@fault("the loss adds noise to the whole row", "F04", "TGT003", LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return losing(
        subject,
        row=lambda row: replace(
            row,
            verifier_last_hidden_packed=row.verifier_last_hidden_packed
            + noise(row.verifier_last_hidden_packed, 0.4, 3),
        ),
    )


# F06: the two tensors of the capture swapped.


@fault("the capture's results unpacked in the old order", "F06", "TGT001", ONE_LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(
        subject,
        lambda item: replace(
            item, hidden_states_SLD=item.verifier_last_hidden_SD, verifier_last_hidden_SD=item.hidden_states_SLD
        ),
    )


@fault("swapped before the greedy ids are taken", "F06", "TGT001", Recipe(settings=ONE_LAYER))
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = HookCapture.get_hidden_states_packed

    def swapped(capture: HookCapture, mask: Tensor) -> Any:
        states = clean(capture, mask)
        return replace(
            states,
            hidden_states_packed=states.verifier_last_hidden_packed,
            verifier_last_hidden_packed=states.hidden_states_packed,
        )

    patch.setattr(HookCapture, "get_hidden_states_packed", swapped)
    return subject


@fault("swapped while packing", "F06", "TGT001", ONE_LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return packing(
        subject,
        lambda row: replace(
            row,
            hidden_states_packed=row.verifier_last_hidden_packed,
            verifier_last_hidden_packed=row.hidden_states_packed,
        ),
    )


@fault("swapped in the loss", "F06", "TGT001", ONE_LAST)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return losing(
        subject,
        row=lambda row: replace(
            row,
            hidden_states_packed=row.verifier_last_hidden_packed,
            verifier_last_hidden_packed=row.hidden_states_packed,
        ),
    )


# Which layers, and what of them.


def _hooked_on(subject: AuditSubject, ids: tuple[int, ...]) -> AuditSubject:
    loop = TargetForwardLoop(subject.target, ids, subject.config.pipeline.send)
    return replace(subject, capture=loop.capture)


@fault("hooks on the next layer (the other numbering)", "B32", "TGT004", Recipe(settings=ONE_LAYER))
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return _hooked_on(subject, (2,))


@fault("hooks on the layer before", "B32", "TGT004", Recipe(settings=ONE_LAYER))
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return _hooked_on(subject, (0,))


@fault("layers chosen by the drafter's depth", "B36", "TGT004")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return _hooked_on(subject, (0, 1))


@fault("captured layers in reverse order", "B34", "TGT004")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: with_states(item, item.hidden_states_SLD.roll(32, -1)))


@fault("one layer captured twice", "B39", "TGT004")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: with_states(item, layer_part(item.hidden_states_SLD, 1).repeat(1, 2)))


@fault("captured states went through the final norm", "B38", "TGT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    norm = subject.target.final_norm

    def normed(item: CapturedSample) -> CapturedSample:
        with torch.no_grad():
            return with_states(item, norm(item.hidden_states_SLD.unflatten(-1, (2, 32))).flatten(-2))

    return capturing(subject, normed)


@fault("states belong to the next token", "B23", "TGT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: with_states(item, item.hidden_states_SLD.roll(-1, 0)))


@fault("states at half their size", "B38", "TGT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: with_states(item, item.hidden_states_SLD * 0.5))


@fault("states of a target rounded to four bits", "B74", "TGT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def rounded(item: CapturedSample) -> CapturedSample:
        step = item.hidden_states_SLD.abs().max() / 7
        return with_states(item, (item.hidden_states_SLD / step).round() * step + 1e-6)

    return capturing(subject, rounded)


@fault("all states zero", "B21", "TGT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return capturing(subject, lambda item: with_states(item, torch.zeros_like(item.hidden_states_SLD)))


@fault("states of a tenth of the tokens zero", "B21", "TGT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def hole(item: CapturedSample) -> CapturedSample:
        states = item.hidden_states_SLD.clone()
        states[::10] = 0.0
        return with_states(item, states)

    return capturing(subject, hole)


@fault("not a number at one token", "B22", "TGT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def hole(item: CapturedSample) -> CapturedSample:
        states = item.hidden_states_SLD.clone()
        states[4, 7] = float("nan")
        return with_states(item, states)

    return capturing(subject, hole)


# Batches.


@fault("left padding without positions or mask", "B25", "TGT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    target, ids = subject.target, subject.draft_model.config.target_layer_ids

    @torch.no_grad()
    def capture(samples: list[Sample]) -> list[CapturedSample]:
        rows, mask = pad_right([sample.input_ids.flip(0) for sample in samples])
        rows, mask = rows.flip(1), mask.flip(1)
        with HookCapture(target.model, ids) as hooks:
            target.model(input_ids=rows)
            states = hooks.get_hidden_states_packed(mask)
        lengths = [len(sample) for sample in samples]
        hidden = states.hidden_states_packed[0].split(lengths)
        targets = target.head.target_ids(states.verifier_last_hidden_packed[0]).split(lengths)
        return [CapturedSample(s, h, target_ids_S=t) for s, h, t in zip(samples, hidden, targets, strict=True)]

    return replace(subject, capture=capture)


@fault("results in the order of batches, not of samples", "B27", "TGT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.capture

    def capture(samples: list[Sample]) -> list[CapturedSample]:
        found = clean(sorted(samples, key=len))
        return [
            with_states(item, _fit(found[i].hidden_states_SLD, len(item.sample)))
            for i, item in enumerate(clean(samples))
        ]

    return replace(subject, capture=capture)


def _fit(states: Tensor, length: int) -> Tensor:
    return states.repeat(-(-length // len(states)), 1)[:length]


@fault("states of a shared prefix are reused", "B23", "TGT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.capture

    def capture(samples: list[Sample]) -> list[CapturedSample]:
        items = clean(samples)
        return [
            with_states(item, torch.cat([items[0].hidden_states_SLD[:3], item.hidden_states_SLD[3:]])) for item in items
        ]

    return replace(subject, capture=capture)


# Head and embedding.


def _other_head(subject: AuditSubject, head: TargetHead) -> AuditSubject:
    return replace(subject, frozen=FrozenTarget(subject.frozen.embed, head))


@fault("a random output head for a tied target", "B66", "TGT008", Recipe(target=llama()))
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return _other_head(subject, TargetHead(subject.target.final_norm, nn.Linear(32, 96, bias=False)))


@fault("soft cap of the logits left out", "B70", "TGT008", GEMMA)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    head = subject.target.head
    return _other_head(subject, TargetHead(head.norm, head.lm_head, head.output_multiplier, None))


@fault("scaling of the logits left out", "B70", "TGT008", GRANITE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    head = subject.target.head
    return _other_head(subject, TargetHead(head.norm, head.lm_head, 1.0, None))


@fault("a head without the padding rows", "B65", "TGT008")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    short = nn.Linear(32, 90, bias=False)
    short.weight.data = subject.target.head.lm_head.weight.data[:90]
    return _other_head(subject, TargetHead(subject.target.final_norm, short.requires_grad_(False)))


@fault("the final norm without its weight", "B38", "TGT008")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    norm = nn.RMSNorm(32, eps=1e-6, elementwise_affine=False)
    return _other_head(subject, TargetHead(norm, subject.target.head.lm_head))


@fault("raw embedding rows of a target that scales them", "B70", "TGT009", GEMMA)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    weight = subject.target.embedding.weight
    return replace(subject, frozen=FrozenTarget(lambda ids: nn.functional.embedding(ids, weight), subject.frozen.head))


@fault("the multiplier outside the embedding left out", "B70", "TGT009", GRANITE)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(subject, frozen=FrozenTarget(subject.target.embedding, subject.frozen.head))


@fault("a copy of the embedding that has moved", "B62", "TGT009")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    weight = subject.target.embedding.weight.detach() * 1.05
    return replace(subject, frozen=FrozenTarget(lambda ids: weight[ids], subject.frozen.head))


# The frozen target.


@fault("the target requires gradients", "B87", "TGT010")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.target.model.requires_grad_(True)
    return subject


@fault("the target is in training mode", "B87", "TGT010")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.target.model.train()
    return subject


@fault("the last layer is an fc input", "B39", "TGT011")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_config(subject, target_layer_ids=(0, 3))


@fault("num_target_layers is the number of captured layers", "B35", "TGT011")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_config(subject, num_target_layers=2)


@fault("hooks stay on the target", "B30", "TGT012")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.capture

    def capture(samples: list[Sample]) -> list[CapturedSample]:
        subject.target.decoder_layers[0].register_forward_hook(lambda *_: None)
        return clean(samples)

    return replace(subject, capture=capture)


# Packing.


@fault("positions go on from one conversation to the next", "B51", "DAT001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return packing(subject, lambda row: replace(row, position_ids=torch.arange(row.input_ids.shape[1])[None]))


@fault("one document for the whole row", "B51", "DAT001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return packing(subject, lambda row: replace(row, document_ids=torch.zeros_like(row.document_ids)))


@fault("loss mask one place late", "B43", "DAT001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return packing(subject, lambda row: replace(row, loss_mask=row.loss_mask.roll(1, 1)))


@fault("states of the row one token off", "B25", "DAT001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return packing(subject, lambda row: replace(row, hidden_states_packed=row.hidden_states_packed.roll(1, 1)))


@fault("training targets of the row shifted", "B43", "DAT001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return packing(subject, lambda row: replace(row, target_ids=row.target_ids.roll(-1, 1)))


# Data.


@fault("nothing is supervised", "B05", "DAT002")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_samples(subject, lambda s: replace(s, loss_mask=torch.zeros_like(s.loss_mask)))


@fault("answers cut off by the length limit in some rows", "B06", "DAT002")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_samples(subject, lambda s: replace(s, loss_mask=s.loss_mask & torch.tensor(s.sample_id % 2 == 0)))


@fault("the user's text is supervised", "B03", "DAT003", CHAT)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_samples(subject, lambda s: replace(s, loss_mask=~s.loss_mask))


@fault("the mask begins two tokens early", "B04", "DAT003", CHAT)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_samples(subject, lambda s: replace(s, loss_mask=s.loss_mask | s.loss_mask.roll(-2)))


@fault("the end of the turn is not supervised", "B105", "DAT004", CHAT)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    end = chat_tokenizer().convert_tokens_to_ids("<|im_end|>")
    return with_samples(subject, lambda s: replace(s, loss_mask=s.loss_mask & (s.input_ids != end)))


@fault("answers that somebody else wrote", "B18", "DAT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    generator = torch.Generator().manual_seed(1)

    def foreign(sample: Sample) -> Sample:
        others = torch.randint(3, 95, sample.input_ids.shape, generator=generator)
        return replace(sample, input_ids=torch.where(sample.loss_mask, others, sample.input_ids))

    return with_samples(subject, foreign)


@fault("two BOS tokens", "B14", "DAT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def doubled(sample: Sample) -> Sample:
        ids = sample.input_ids.clone()
        ids[:2] = 1
        return replace(sample, input_ids=ids)

    return with_samples(subject, doubled)


@fault("ids of another tokenizer", "B26", "DAT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject = replace(subject, data=replace(subject.data, samples=[]))
    odd = Sample(0, torch.tensor([5, 200, 6, 7]), torch.tensor([False, True, True, True]))
    return replace(subject, data=replace(subject.data, samples=[odd]))


@fault("held-out conversations are trained on", "W40", "DAT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(subject, data=replace(subject.data, heldout=subject.data.samples[:3]))


@fault("the same conversation many times", "W40", "DAT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(subject, data=replace(subject.data, samples=[subject.data.samples[0]] * 8))


@fault("answers of one token", "B07", "DAT008")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_samples(subject, lambda s: replace(s, loss_mask=torch.arange(len(s)) == 12))


@fault("conversations longer than the positions", "B54", "DAT009")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return with_samples(subject, lambda s: Sample(s.sample_id, s.input_ids.repeat(20), s.loss_mask.repeat(20)))


@fault("rows vanish without a reason", "B02", "DAT010")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    report = {"rows_in": 1000, "rows_out": 10, "dropped": {"empty": {"count": 1, "first_line": 3}}}
    return replace(subject, data=replace(subject.data, report=report))


@fault("the template changed after the data was prepared", "B15", "DAT011", CHAT)
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.target.tokenizer.chat_template = subject.target.tokenizer.chat_template.replace("\n", "")
    return subject


__all__ = ["CHAT", "GEMMA", "GRANITE", "qwen3"]


# Faults that show only in some tokens, or in long conversations.


@fault("states of long conversations repeat from some token on", "B23", "TGT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    assert subject.data is not None
    twice = [
        replace(s, input_ids=s.input_ids.repeat(2), loss_mask=s.loss_mask.repeat(2)) for s in subject.data.samples[:3]
    ]
    longer = replace(subject, data=replace(subject.data, samples=[*subject.data.samples, *twice]))
    return capturing(
        longer, lambda item: with_states(item, item.hidden_states_SLD[torch.arange(len(item.sample)).clamp(max=40)])
    )


@fault("the training target of the first token of each conversation is wrong", "B43", "TGT002")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def change(item: CapturedSample) -> CapturedSample:
        assert item.target_ids_S is not None
        return replace(item, target_ids_S=torch.cat([(item.target_ids_S[:1] + 1) % 90, item.target_ids_S[1:]]))

    return capturing(subject, change)


@fault("dropout left on in the target, in evaluation mode too", "B76", "TGT010")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.target.decoder_layers[1].mlp.register_forward_hook(
        lambda _module, _args, out: nn.functional.dropout(out, 0.1, training=True)
    )
    return subject
