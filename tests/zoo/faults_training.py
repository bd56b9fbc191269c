"""Faults of labels, weights, loss, metrics, optimiser and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from draftline.audit.subject import AuditSubject
from draftline.draft import block as block_module
from draftline.draft import loss as loss_module
from draftline.draft.model import DFlashDraftModel
from draftline.records import StepMetrics
from draftline.train import step as step_module
from draftline.train.checkpoint import TrainState
from tests.zoo.fault import fault
from tests.zoo.pipeline import Recipe

Patch = pytest.MonkeyPatch


def _gamma(block: int, gamma: float) -> Recipe:
    return Recipe(settings={"drafter": {"block_size": block}, "loss": {"decay_gamma": gamma}})


def _cross_entropy(patch: Patch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Another loss per slot: logits [m, V] and labels [m] -> [m]."""

    def results(hidden: Tensor, labels: Tensor, weights: Tensor, logits_of: Any, chunk_size: int) -> Any:
        logits = logits_of(hidden).float()
        value = (change(logits, labels) * weights).sum()
        return loss_module.SlotResults(value, logits.argmax(-1).detach())

    patch.setattr(step_module, "cross_entropy_sum", results)


@fault("the target's whole distribution instead of its argmax", "F05", "LOS001", Recipe(settings={}))
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    def soft(logits: Tensor, labels: Tensor) -> Tensor:
        teacher = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))[labels].softmax(-1)
        return -(teacher * logits.log_softmax(-1)).sum(-1)

    _cross_entropy(patch, soft)
    return subject


@fault("label smoothing", "F05", "LOS001")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _cross_entropy(patch, lambda logits, labels: F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1))
    return subject


@fault("a temperature on the logits", "F05", "LOS001")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _cross_entropy(patch, lambda logits, labels: F.cross_entropy(logits / 2.0, labels, reduction="none"))
    return subject


@fault("a penalty on the size of the logits", "F05", "LOS001")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _cross_entropy(
        patch,
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="none") + 0.1 * logits.logsumexp(-1) ** 2,
    )
    return subject


@fault("the value of the loss is not what its gradient says", "F05", "LOS001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.row_loss

    def row_loss(*args: Any) -> tuple[Tensor, StepMetrics]:
        value, metrics = clean(*args)
        return value + 0.5 * value.detach(), metrics

    return replace(subject, row_loss=row_loss)


def _label_shift(patch: Patch, by: int) -> None:
    clean = step_module.slot_labels
    patch.setattr(
        step_module,
        "slot_labels",
        lambda predicted, ids, shift: clean(predicted, ids, shift=shift + by),
    )


@fault("labels one place late", "B41", "LOS002")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _label_shift(patch, 1)
    return subject


@fault("labels one place early", "B42", "LOS002")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _label_shift(patch, -1)
    return subject


@fault("tokens of the data as labels", "B41", "LOS002")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.row_loss
    return replace(
        subject,
        row_loss=lambda model, row, anchors, frozen, loss, attention: clean(
            model, row, anchors, frozen, loss.model_copy(update={"labels": "data"}), attention
        ),
    )


@fault("gamma 7 for blocks of 8", "F03", "LOS003", _gamma(8, 7.0))
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return subject


@fault("gamma 4 for blocks of 16", "F03", "LOS003", _gamma(16, 4.0))
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return subject


@fault("gamma 12 for blocks of 6", "F03", "LOS003", _gamma(6, 12.0))
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return subject


def _weights(patch: Patch, change: Callable[[int, float, int], Tensor]) -> None:
    patch.setattr(
        step_module,
        "slot_weights",
        lambda block, gamma, from_anchor: (
            change(block, gamma, 0 if from_anchor else 1) * (torch.arange(block) >= (0 if from_anchor else 1))
        ),
    )


@fault("all slots weigh the same", "B48", "LOS004")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _weights(patch, lambda block, gamma, first: torch.ones(block))
    return subject


@fault("another gamma in the code than in the settings", "F03", "LOS004")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _weights(patch, lambda block, gamma, first: torch.exp(-(torch.arange(block) - first) / 7.0))
    return subject


@fault("weights grow towards the end of the block", "B48", "LOS004")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _weights(patch, lambda block, gamma, first: torch.exp((torch.arange(block) - block) / gamma))
    return subject


def _slots(patch: Patch, change: Callable[..., Tensor]) -> None:
    clean = block_module.supervised_slots
    patch.setattr(block_module, "supervised_slots", lambda *args: change(clean(*args), *args))


@fault("the anchor's own slot carries a loss", "B41", "LOS005")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    def with_anchor(right: Tensor, *_: Any) -> Tensor:
        right[:, 0] = True
        return right

    _slots(patch, with_anchor)
    return subject


@fault("slots after a gap of the mask count again", "B45", "LOS005")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    def across(right: Tensor, anchors: Tensor, mask: Tensor, documents: Tensor, block: int, _from: bool) -> Tensor:
        places = (anchors[:, None] + torch.arange(block)).clamp(max=len(mask) - 1)
        wrong = mask[places] & (documents[places] == documents[anchors][:, None])
        wrong[:, 0] = False
        return wrong & (anchors[:, None] + torch.arange(block) < len(mask))

    _slots(patch, across)
    return subject


@fault("blocks reach into the next conversation", "B51", "LOS005")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = block_module.supervised_slots
    patch.setattr(
        block_module,
        "supervised_slots",
        lambda anchors, mask, documents, *rest: clean(anchors, torch.ones_like(mask), documents * 0, *rest),
    )
    return subject


@fault("partial blocks at the end of an answer carry no loss", "B105", "LOS005")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _slots(patch, lambda right, *_: right & right[:, 1:].all(dim=1, keepdim=True))
    return subject


@fault("the mask is read at the slot's own place", "B45", "LOS005")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = block_module.supervised_slots
    patch.setattr(
        block_module,
        "supervised_slots",
        lambda anchors, mask, *rest: clean(anchors, mask | mask.roll(1), *rest),
    )
    return subject


@fault("the loss of a row is its mean", "B106", "LOS006")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = subject.row_loss

    def row_loss(*args: Any) -> tuple[Tensor, StepMetrics]:
        value, metrics = clean(*args)
        return value / max(metrics.slots, 1), metrics

    patch.setattr(step_module, "row_loss", row_loss)
    return replace(subject, row_loss=row_loss)


@fault("micro-batches averaged equally", "B106", "LOS006")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = step_module.row_loss

    def row_loss(*args: Any) -> tuple[Tensor, StepMetrics]:
        value, metrics = clean(*args)
        return value * 40 / max(metrics.slots, 1), metrics

    patch.setattr(step_module, "row_loss", row_loss)
    return subject


@fault("the summed gradient is not divided", "B97", "LOS006")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    patch.setattr(torch, "_foreach_div_", lambda tensors, by: None)
    return subject


@fault("divided by the slots of the last micro-batch", "B97", "LOS006")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    patch.setattr(StepMetrics, "__add__", lambda first, second: second)
    return subject


@fault("fc gets no gradient", "B103", "LOS007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.draft_model.fc.register_forward_hook(lambda _m, _a, output: output.detach())
    return subject


@fault("context keys get no gradient in one layer", "B103", "LOS007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    subject.draft_model.layers[0].self_attn.k_proj.register_forward_hook(lambda _m, _a, output: output.detach())
    return subject


@fault("the rest after the last full chunk is lost", "B86", "LOS008")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = step_module.cross_entropy_sum

    def results(hidden: Tensor, labels: Tensor, weights: Tensor, logits_of: Any, chunk: int) -> Any:
        count = len(hidden) // chunk * chunk if len(hidden) > chunk else len(hidden)
        weights = weights * (torch.arange(len(weights)) < count)
        return clean(hidden, labels, weights, logits_of, chunk)

    patch.setattr(step_module, "cross_entropy_sum", results)
    return subject


@fault("chunks take the labels of the first chunk", "B86", "LOS008")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = step_module.cross_entropy_sum

    def results(hidden: Tensor, labels: Tensor, weights: Tensor, logits_of: Any, chunk: int) -> Any:
        first = labels[:chunk].repeat(-(-len(labels) // chunk))[: len(labels)]
        return clean(hidden, first, weights, logits_of, chunk)

    patch.setattr(step_module, "cross_entropy_sum", results)
    return subject


def _metrics(patch: Patch, change: Callable[[StepMetrics], StepMetrics]) -> None:
    clean = StepMetrics.of_blocks
    patch.setattr(StepMetrics, "of_blocks", staticmethod(lambda **given: change(clean(**given))))


@fault("the streak counts the bonus token", "B94", "LOS009")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _metrics(patch, lambda m: replace(m, streak_sum=m.streak_sum + m.blocks))
    return subject


@fault("the streak counts right slots after a wrong one", "B94", "LOS009")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _metrics(patch, lambda m: replace(m, streak_sum=float(m.correct_target_P.sum())))
    return subject


@fault("conditional and unconditional accuracy mixed up", "B95", "LOS009")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _metrics(patch, lambda m: replace(m, run_slots_P=m.slots_P))
    return subject


# Optimiser.


@fault("the target's weights in the optimiser", "B87", "OPT001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean, norm = subject.make_optimizer, subject.target.final_norm

    def make(model: DFlashDraftModel) -> Any:
        optimizer = clean(model)
        optimizer.add_param_group({"params": list(norm.parameters())})
        return optimizer

    return replace(subject, make_optimizer=make)


@fault("fc is not in the optimiser", "B87", "OPT001")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(
        subject,
        make_optimizer=lambda model: torch.optim.AdamW(
            [p for name, p in model.named_parameters() if not name.startswith("fc")], lr=6e-4, weight_decay=0.0
        ),
    )


@fault("moments in bfloat16", "B71", "OPT002")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.make_optimizer

    def make(model: DFlashDraftModel) -> Any:
        optimizer = clean(model)

        def low(made: Any, *_: Any) -> None:
            for state in made.state.values():
                state["exp_avg"] = state["exp_avg"].bfloat16()

        optimizer.register_step_post_hook(low)
        return optimizer

    return replace(subject, make_optimizer=make)


@fault("weights rounded to bfloat16 after every step", "B71", "OPT003")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.make_optimizer

    def make(model: DFlashDraftModel) -> Any:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        optimizer = clean(model)

        def round_off(*_: Any) -> None:
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data.bfloat16().float())

        optimizer.register_step_post_hook(round_off)
        return optimizer

    return replace(subject, make_optimizer=make)


@fault("norms get no updates", "B71", "OPT003")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.make_optimizer

    def make(model: DFlashDraftModel) -> Any:
        optimizer = clean(model)

        def still(*_: Any) -> None:
            for parameter in model.parameters():
                if parameter.ndim == 1 and parameter.grad is not None:
                    parameter.grad.zero_()

        optimizer.register_step_pre_hook(still)
        return optimizer

    return replace(subject, make_optimizer=make)


@fault("the rate never falls", "B48", "OPT004")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(subject, learning_rate=lambda update, total: 6e-4)


@fault("the schedule is stretched over ten times the run", "B48", "OPT004")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.learning_rate
    return replace(subject, learning_rate=lambda update, total: clean(update, total * 10))


@fault("the first update has a rate of zero", "B48", "OPT004")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.learning_rate
    return replace(subject, learning_rate=lambda update, total: clean(update, total) if update else 0.0)


@fault("the library's default weight decay", "B48", "OPT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(subject, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=6e-4))


@fault("gradients are not clipped", "B48", "OPT006")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.train_step
    return replace(subject, train_step=lambda **given: clean(**{**given, "clip_norm": 1e12}))


@fault("each tensor clipped by itself", "B48", "OPT006")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = torch.nn.utils.clip_grad_norm_

    def each(parameters: Any, limit: float) -> Tensor:
        norms = [clean([p], limit) for p in parameters if p.grad is not None]
        return torch.stack(norms).norm()

    patch.setattr(torch.nn.utils, "clip_grad_norm_", each)
    return subject


@fault("the optimiser's state is not restored", "B77", "OPT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def restore(model: DFlashDraftModel, optimizer: Any, folder: Path) -> None:
        scratch = subject.make_optimizer(model)
        subject.restore_state(model, scratch, folder)

    return replace(subject, restore_state=restore)


@fault("checkpoints in bfloat16", "B81", "OPT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def restore(model: DFlashDraftModel, optimizer: Any, folder: Path) -> None:
        subject.restore_state(model, optimizer, folder)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()

    return replace(subject, restore_state=restore)


@fault("the optimiser's count of updates starts anew", "B78", "OPT007")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    def restore(model: DFlashDraftModel, optimizer: Any, folder: Path) -> None:
        subject.restore_state(model, optimizer, folder)
        for state in optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"])

    return replace(subject, restore_state=restore)


@fault("a step also moves the target's head", "B87", "OPT008")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean, weight = subject.train_step, subject.target.model.get_output_embeddings().weight

    def train_step(**given: Any) -> Any:
        result = clean(**given)
        weight.data.add_(1e-4)
        return result

    return replace(subject, train_step=train_step)


# Faults that show only in some slots, at some borders, or after the first update.


def _labels(patch: Patch, change: Callable[[Tensor, Callable[[int], Tensor]], Tensor]) -> None:
    """Other labels [A, P]: from the right ones, and from those of another shift."""
    clean = step_module.slot_labels

    def slot_labels(predicted: Tensor, ids: Tensor, shift: int) -> Tensor:
        return change(clean(predicted, ids, shift), lambda by: clean(predicted, ids, shift + by))

    patch.setattr(step_module, "slot_labels", slot_labels)


@fault("labels right in slot 1 and one place late in the others", "B41", "LOS002")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _labels(patch, lambda right, shifted: torch.cat([right[:, :2], shifted(1)[:, 2:]], dim=1))
    return subject


@fault("the last slot is taught what the slot before it is taught", "B41", "LOS002")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    _labels(patch, lambda right, shifted: torch.cat([right[:, :-1], shifted(-1)[:, -1:]], dim=1))
    return subject


@fault("a block reaches into the first token of the next conversation", "B51", "LOS005")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = block_module.supervised_slots

    def slots(anchors: Tensor, mask: Tensor, documents: Tensor, block: int, from_anchor: bool) -> Tensor:
        border = torch.cat([documents[:1] != documents[:1], documents[1:] != documents[:-1]])
        return clean(anchors, mask, documents - border.to(documents), block, from_anchor)

    patch.setattr(block_module, "supervised_slots", slots)
    return subject


@fault("the last token of an answer carries no loss", "B105", "LOS005")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = block_module.supervised_slots

    def slots(anchors: Tensor, mask: Tensor, documents: Tensor, *rest: Any) -> Tensor:
        ends = mask & ~torch.cat([mask[1:], mask[:1] & ~mask[:1]])
        return clean(anchors, mask & ~ends, documents, *rest)

    patch.setattr(block_module, "supervised_slots", slots)
    return subject


def _optimizer(subject: AuditSubject, **options: Any) -> AuditSubject:
    clean = subject.make_optimizer

    def make(model: DFlashDraftModel) -> Any:
        optimizer = clean(model)
        for group in optimizer.param_groups:
            group.update(options)
        return optimizer

    return replace(subject, make_optimizer=make)


@fault("an eps that swallows small gradients", "B71", "OPT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return _optimizer(subject, eps=1e-3)


@fault("updates go uphill", "B71", "OPT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return _optimizer(subject, maximize=True)


@fault("weight decay on the norms alone", "B71", "OPT005")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    clean = subject.make_optimizer

    def make(model: DFlashDraftModel) -> Any:
        optimizer = clean(model)
        norms = [p for p in model.parameters() if p.ndim == 1]
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.ndim != 1]
        optimizer.add_param_group({**optimizer.param_groups[0], "params": norms, "weight_decay": 0.1})
        return optimizer

    return replace(subject, make_optimizer=make)


@fault("the rate of the schedule never reaches the optimiser", "B97", "OPT004")
def _(subject: AuditSubject, _patch: Patch) -> AuditSubject:
    return replace(subject, set_learning_rate=lambda _optimizer, _rate: None)


@fault("a resumed run begins with the first row again", "B77", "OPT007")
def _(subject: AuditSubject, patch: Patch) -> AuditSubject:
    clean = TrainState.from_json
    patch.setattr(TrainState, "from_json", lambda tree: replace(clean(tree), next_row=0))
    return subject
