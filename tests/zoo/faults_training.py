"""Faults of labels, weights, loss, metrics, optimiser and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftline.config import LossConfig
from draftline.draft import block as block_module
from draftline.draft import loss as loss_module
from draftline.draft.loss import StepMetrics, TaughtSlots
from draftline.draft.model import DFlashDraftModel
from draftline.train import checkpoint as checkpoint_module
from draftline.train import step as step_module
from draftline.train.checkpoint import TrainState
from tests.zoo.fault import fault, losing, on_frozen, on_model, on_optimizer
from tests.zoo.pipeline import Recipe, World, in_precision

WSD = Recipe(settings={"optim": {"schedule": "wsd", "decay_fraction": 0.3}})
CONSTANT = Recipe(settings={"optim": {"schedule": "constant"}})
TWO_MORE = {"extensions": (2,), "tokens_per_row": 100}
EXTENDED = Recipe(settings={"train": TWO_MORE, "optim": {"warmup_fraction": 0.3}})
EXTENDED_WSD = Recipe(settings={"train": TWO_MORE, "optim": {"warmup_fraction": 0.3, "schedule": "wsd"}})


def _blocks_of(size: int) -> Recipe:
    return Recipe(settings={"drafter": {"block_size": size}})


def _cross_entropy(world: World, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Another loss per slot: logits [m, V] and labels [m] -> [m]."""

    def results(hidden: Tensor, slots: TaughtSlots, logits_of: Any, _loss: LossConfig) -> Any:
        logits = logits_of(hidden).float()
        value = (change(logits, slots.labels_n) * slots.weights_n).sum()
        return loss_module.SlotResults(value, slots.weights_n.sum(), logits.argmax(-1).detach(), torch.zeros(()))

    world.patch.setattr(step_module, "slot_loss_sum", results)


@fault("the target's whole distribution instead of its argmax", "F05", "LOS001", Recipe(settings={}))
def _(world: World) -> None:
    def soft(logits: Tensor, labels: Tensor) -> Tensor:
        teacher = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))[labels].softmax(-1)
        return -(teacher * logits.log_softmax(-1)).sum(-1)

    _cross_entropy(world, soft)


@fault("label smoothing", "F05", "LOS001")
def _(world: World) -> None:
    _cross_entropy(world, lambda logits, labels: F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1))


@fault("a temperature on the logits", "F05", "LOS001")
def _(world: World) -> None:
    _cross_entropy(world, lambda logits, labels: F.cross_entropy(logits / 2.0, labels, reduction="none"))


@fault("a penalty on the size of the logits", "F05", "LOS001")
def _(world: World) -> None:
    _cross_entropy(
        world,
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="none") + 0.1 * logits.logsumexp(-1) ** 2,
    )


@fault("the value of the loss is not what its gradient says", "F05", "LOS001")
def _(world: World) -> None:
    clean = step_module.slot_loss_sum

    def results(*given: Any) -> loss_module.SlotResults:
        right = clean(*given)
        return replace(right, loss_sum=right.loss_sum + 0.5 * right.loss_sum.detach())

    world.patch.setattr(step_module, "slot_loss_sum", results)


class _NarrowTorch:
    """Torch as the loss sees it, where nothing is widened: what is float32 already stays what it is."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def promote_types(self, of: torch.dtype, _least: torch.dtype) -> torch.dtype:
        return of


@fault(
    "logits are not widened before the exponentials", "B71", "LOS010", in_precision(Recipe(), "bfloat16", "bfloat16")
)
def _(world: World) -> None:
    world.patch.setattr(loss_module, "torch", _NarrowTorch())


def _label_shift(world: World, by: int) -> None:
    clean = step_module.slot_labels
    world.patch.setattr(
        step_module,
        "slot_labels",
        lambda predicted, ids, shift: clean(predicted, ids, shift=shift + by),
    )


@fault("labels one place late", "B41", "LOS002")
def _(world: World) -> None:
    _label_shift(world, 1)


@fault("labels one place early", "B42", "LOS002")
def _(world: World) -> None:
    _label_shift(world, -1)


@fault("tokens of the data as labels", "B41", "LOS002")
def _(world: World) -> None:
    def from_data(clean: Any, model: Any, row: Any, anchors: Tensor, frozen: Any, loss: Any, attention: Any) -> Any:
        return clean(model, row, anchors, frozen, loss.model_copy(update={"labels": "data"}), attention)

    losing(world, from_data)


@fault("gamma 7 for blocks of 8", "F03", "LOS003")
def _(world: World) -> None:
    world.set("loss", decay_gamma=7.0)


@fault("gamma 4 for blocks of 16", "F03", "LOS003", _blocks_of(16))
def _(world: World) -> None:
    world.set("loss", decay_gamma=4.0)


@fault("gamma 12 for blocks of 6", "F03", "LOS003", _blocks_of(6))
def _(world: World) -> None:
    world.set("loss", decay_gamma=12.0)


def _weights(world: World, change: Callable[[int, float, int], Tensor]) -> None:
    world.patch.setattr(
        step_module,
        "slot_weights",
        lambda block, gamma, from_anchor: (
            change(block, gamma, 0 if from_anchor else 1) * (torch.arange(block) >= (0 if from_anchor else 1))
        ),
    )


@fault("all slots weigh the same", "B48", "LOS004")
def _(world: World) -> None:
    _weights(world, lambda block, gamma, first: torch.ones(block))


@fault("another gamma in the code than in the settings", "F03", "LOS004")
def _(world: World) -> None:
    _weights(world, lambda block, gamma, first: torch.exp(-(torch.arange(block) - first) / 7.0))


@fault("weights grow towards the end of the block", "B48", "LOS004")
def _(world: World) -> None:
    _weights(world, lambda block, gamma, first: torch.exp((torch.arange(block) - block) / gamma))


def _slots(world: World, change: Callable[..., Tensor]) -> None:
    clean = block_module.supervised_slots
    world.patch.setattr(block_module, "supervised_slots", lambda *args: change(clean(*args), *args))


@fault("the anchor's own slot carries a loss", "B41", "LOS005")
def _(world: World) -> None:
    def with_anchor(right: Tensor, *_: Any) -> Tensor:
        right[:, 0] = True
        return right

    _slots(world, with_anchor)


@fault("slots after a gap of the mask count again", "B45", "LOS005")
def _(world: World) -> None:
    def across(right: Tensor, anchors: Tensor, mask: Tensor, documents: Tensor, block: int, _from: bool) -> Tensor:
        places = (anchors[:, None] + torch.arange(block)).clamp(max=len(mask) - 1)
        wrong = mask[places] & (documents[places] == documents[anchors][:, None])
        wrong[:, 0] = False
        return wrong & (anchors[:, None] + torch.arange(block) < len(mask))

    _slots(world, across)


@fault("blocks reach into the next conversation", "B51", "LOS005")
def _(world: World) -> None:
    clean = block_module.supervised_slots
    world.patch.setattr(
        block_module,
        "supervised_slots",
        lambda anchors, mask, documents, *rest: clean(anchors, torch.ones_like(mask), documents * 0, *rest),
    )


@fault("partial blocks at the end of an answer carry no loss", "B105", "LOS005")
def _(world: World) -> None:
    _slots(world, lambda right, *_: right & right[:, 1:].all(dim=1, keepdim=True))


@fault("the mask is read at the slot's own place", "B45", "LOS005")
def _(world: World) -> None:
    clean = block_module.supervised_slots
    world.patch.setattr(
        block_module,
        "supervised_slots",
        lambda anchors, mask, *rest: clean(anchors, mask | mask.roll(1), *rest),
    )


@fault("the loss of a row is its mean", "B106", "LOS006")
def _(world: World) -> None:
    def mean(clean: Any, *given: Any) -> tuple[Tensor, StepMetrics]:
        value, metrics = clean(*given)
        return value / max(metrics.slots, 1), metrics

    losing(world, mean)


@fault("micro-batches averaged equally", "B106", "LOS006")
def _(world: World) -> None:
    def alike(clean: Any, *given: Any) -> tuple[Tensor, StepMetrics]:
        value, metrics = clean(*given)
        return value * 40 / max(metrics.slots, 1), metrics

    losing(world, alike)


@fault("the summed gradient is not divided", "B97", "LOS006")
def _(world: World) -> None:
    world.patch.setattr(torch, "_foreach_div_", lambda tensors, by: None)


@fault("divided by the slots of the last micro-batch", "B97", "LOS006")
def _(world: World) -> None:
    world.patch.setattr(StepMetrics, "__add__", lambda first, second: second)


def _detached(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output.detach()


@fault("fc gets no gradient", "B103", "LOS007")
def _(world: World) -> None:
    on_model(world, lambda model: model.fc.register_forward_hook(_detached))


@fault("context keys get no gradient in one layer", "B103", "LOS007")
def _(world: World) -> None:
    on_model(world, lambda model: model.layers[0].self_attn.k_proj.register_forward_hook(_detached))


@fault("the rest after the last full chunk is lost", "B86", "LOS008")
def _(world: World) -> None:
    clean = step_module.slot_loss_sum

    def results(hidden: Tensor, slots: TaughtSlots, logits_of: Any, loss: LossConfig) -> Any:
        chunk = loss.chunk_size or len(hidden)
        count = len(hidden) // chunk * chunk if len(hidden) > chunk else len(hidden)
        weights = slots.weights_n * (torch.arange(len(hidden)) < count)
        return clean(hidden, replace(slots, weights_n=weights), logits_of, loss)

    world.patch.setattr(step_module, "slot_loss_sum", results)


@fault("chunks take the labels of the first chunk", "B86", "LOS008")
def _(world: World) -> None:
    clean = step_module.slot_loss_sum

    def results(hidden: Tensor, slots: TaughtSlots, logits_of: Any, loss: LossConfig) -> Any:
        labels = slots.labels_n
        chunk = loss.chunk_size or len(labels)
        first = labels[:chunk].repeat(-(-len(labels) // chunk))[: len(labels)]
        return clean(hidden, replace(slots, labels_n=first), logits_of, loss)

    world.patch.setattr(step_module, "slot_loss_sum", results)


def _metrics(world: World, change: Callable[[StepMetrics], StepMetrics]) -> None:
    clean = StepMetrics.of_blocks
    world.patch.setattr(StepMetrics, "of_blocks", staticmethod(lambda **given: change(clean(**given))))


@fault("the streak counts the bonus token", "B94", "LOS009")
def _(world: World) -> None:
    _metrics(world, lambda m: replace(m, streak_sum=m.streak_sum + m.blocks))


@fault("the streak counts right slots after a wrong one", "B94", "LOS009")
def _(world: World) -> None:
    _metrics(world, lambda m: replace(m, streak_sum=float(m.correct_target_P.sum())))


@fault("conditional and unconditional accuracy mixed up", "B95", "LOS009")
def _(world: World) -> None:
    _metrics(world, lambda m: replace(m, run_slots_P=m.slots_P))


# Optimiser.


@fault("the target's weights in the optimiser", "B87", "OPT001")
def _(world: World) -> None:
    embedding = world.target.embedding.requires_grad_(True)
    on_frozen(world, lambda frozen: replace(frozen, embed=embedding))
    on_optimizer(world, lambda _model, made: made.add_param_group({"params": list(embedding.parameters())}))


@fault("fc is not in the optimiser", "B87", "OPT001")
def _(world: World) -> None:
    def rest(model: DFlashDraftModel, _made: Any) -> torch.optim.AdamW:
        parameters = [p for name, p in model.named_parameters() if not name.startswith("fc")]
        return torch.optim.AdamW(parameters, lr=6e-4, weight_decay=0.0)

    on_optimizer(world, rest)


@fault("moments in bfloat16", "B71", "OPT002")
def _(world: World) -> None:
    def low(made: Any, *_: Any) -> None:
        for state in made.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()

    on_optimizer(world, lambda _model, made: made.register_step_post_hook(low) and made)


def _round_off(model: DFlashDraftModel) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16().float())


@fault("weights rounded to bfloat16 after every step", "B71", "OPT003")
def _(world: World) -> None:
    def rounding(model: DFlashDraftModel, made: Any) -> None:
        _round_off(model)
        made.register_step_post_hook(lambda *_: _round_off(model))

    on_optimizer(world, rounding)


@fault("norms get no updates", "B71", "OPT003")
def _(world: World) -> None:
    def still(made: Any, *_: Any) -> None:
        for parameter in (p for group in made.param_groups for p in group["params"]):
            if parameter.ndim == 1 and parameter.grad is not None:
                parameter.grad.zero_()

    on_optimizer(world, lambda _model, made: made.register_step_pre_hook(still) and made)


def _rate(world: World, change: Callable[[Callable[..., float], int, int, Any], float]) -> None:
    """Another schedule: from the right one, the number of the update and of all updates."""
    clean = step_module.learning_rate
    world.patch.setattr(
        step_module, "learning_rate", lambda update, total, config: change(clean, update, total, config)
    )


@fault("the rate never falls", "B48", "OPT004")
def _(world: World) -> None:
    _rate(world, lambda _clean, _update, _total, config: config.learning_rate)


@fault("a plateau and a fall are taken for a cosine", "B48", "OPT004", recipe=WSD)
def _(world: World) -> None:
    as_cosine = {"schedule": "cosine", "decay_fraction": None}
    _rate(world, lambda clean, update, total, config: clean(update, total, config.model_copy(update=as_cosine)))


@fault("a plateau falls twice as long as configured", "B48", "OPT004", recipe=WSD)
def _(world: World) -> None:
    longer = {"decay_fraction": 0.6}
    _rate(world, lambda clean, update, total, config: clean(update, total, config.model_copy(update=longer)))


@fault("a rate that is to stay falls", "B48", "OPT004", recipe=CONSTANT)
def _(world: World) -> None:
    falling = {"schedule": "wsd"}
    _rate(world, lambda clean, update, total, config: clean(update, total, config.model_copy(update=falling)))


@fault("the schedule is stretched over ten times the run", "B48", "OPT004")
def _(world: World) -> None:
    _rate(world, lambda clean, update, total, config: clean(update, total * 10, config))


@fault("the first update has a rate of zero", "B48", "OPT004")
def _(world: World) -> None:
    _rate(world, lambda clean, update, total, config: clean(update, total, config) if update else 0.0)


def _extension(world: World, rate: Callable[[Callable[..., float], int, int, Any], float]) -> None:
    """Another rate in extensions, from the right one, the number of the update and of all updates there."""
    clean = step_module.extension_rate
    world.patch.setattr(step_module, "extension_rate", lambda update, total, config: rate(clean, update, total, config))


@fault("an extension keeps the rate with which the run ended", "B48", "RUN014", recipe=EXTENDED)
def _(world: World) -> None:
    _extension(world, lambda _clean, _update, _total, config: config.learning_rate * config.final_fraction)


@fault("the cosine of an extension starts at its highest", "B48", "RUN014", recipe=EXTENDED)
def _(world: World) -> None:
    at_once = {"warmup_fraction": 0.0}
    _extension(world, lambda clean, update, total, config: clean(update, total, config.model_copy(update=at_once)))


@fault("a plateau warms up again in an extension", "B48", "RUN014", recipe=EXTENDED_WSD)
def _(world: World) -> None:
    _extension(world, lambda _clean, update, total, config: step_module.learning_rate(update, total, config))


@fault("the schedule of a run is stretched over its extension", "B48", "RUN014", recipe=EXTENDED)
def _(world: World) -> None:
    clean = step_module.learning_rate
    world.patch.setattr(
        step_module.Drafter,
        "learning_rate",
        lambda drafter, step: clean(step, drafter.total_steps, drafter.config.optim),
    )


@fault("the rate of the schedule never reaches the optimiser", "B97", "OPT004")
def _(world: World) -> None:
    world.patch.setattr(step_module, "set_learning_rate", lambda _optimizer, _rate: None)


@fault("the library's default weight decay", "B48", "OPT005")
def _(world: World) -> None:
    on_optimizer(world, lambda model, _made: torch.optim.AdamW(model.parameters(), lr=6e-4))


@fault("gradients are not clipped", "B48", "OPT006")
def _(world: World) -> None:
    clean = step_module.train_step
    world.patch.setattr(step_module, "train_step", lambda **given: clean(**{**given, "clip_norm": 1e12}))


@fault("each tensor clipped by itself", "B48", "OPT006")
def _(world: World) -> None:
    clean = torch.nn.utils.clip_grad_norm_

    def each(parameters: Any, limit: float) -> Tensor:
        norms = [clean([p], limit) for p in parameters if p.grad is not None]
        return torch.stack(norms).norm()

    world.patch.setattr(torch.nn.utils, "clip_grad_norm_", each)


@fault("the optimiser's state is not restored", "B77", "OPT007")
def _(world: World) -> None:
    world.patch.setattr(step_module, "restore_optimizer", lambda *_: None)


@fault("checkpoints in bfloat16", "B81", "OPT007")
def _(world: World) -> None:
    clean = checkpoint_module.save_file

    def low(tensors: dict[str, Tensor], path: Path) -> None:
        weights = path.name == "drafter.safetensors"
        clean({name: tensor.bfloat16() if weights else tensor for name, tensor in tensors.items()}, path)

    world.patch.setattr(checkpoint_module, "save_file", low)


@fault("the optimiser's count of updates starts anew", "B78", "OPT007")
def _(world: World) -> None:
    clean = step_module.restore_optimizer

    def restore(optimizer: Any, *rest: Any) -> None:
        clean(optimizer, *rest)
        for state in optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"])

    world.patch.setattr(step_module, "restore_optimizer", restore)


@fault("a resumed run begins with the first row again", "B77", "OPT007")
def _(world: World) -> None:
    clean = TrainState.from_json
    world.patch.setattr(TrainState, "from_json", lambda tree: replace(clean(tree), next_row=0))


@fault("a step also moves the target's head", "B87", "OPT008")
def _(world: World) -> None:
    clean, weight = step_module.train_step, world.target.model.get_output_embeddings().weight

    def train_step(**given: Any) -> Any:
        result = clean(**given)
        weight.data.add_(1e-4)
        return result

    world.patch.setattr(step_module, "train_step", train_step)


# Faults that show only in some slots, at some borders, or after the first update.


def _labels(world: World, change: Callable[[Tensor, Callable[[int], Tensor]], Tensor]) -> None:
    """Other labels [A, P]: from the right ones, and from those of another shift."""
    clean = step_module.slot_labels

    def slot_labels(predicted: Tensor, ids: Tensor, shift: int) -> Tensor:
        return change(clean(predicted, ids, shift), lambda by: clean(predicted, ids, shift + by))

    world.patch.setattr(step_module, "slot_labels", slot_labels)


@fault("labels right in slot 1 and one place late in the others", "B41", "LOS002")
def _(world: World) -> None:
    _labels(world, lambda right, shifted: torch.cat([right[:, :2], shifted(1)[:, 2:]], dim=1))


@fault("the last slot is taught what the slot before it is taught", "B41", "LOS002")
def _(world: World) -> None:
    _labels(world, lambda right, shifted: torch.cat([right[:, :-1], shifted(-1)[:, -1:]], dim=1))


@fault("a block reaches into the first token of the next conversation", "B51", "LOS005")
def _(world: World) -> None:
    clean = block_module.supervised_slots

    def slots(anchors: Tensor, mask: Tensor, documents: Tensor, block: int, from_anchor: bool) -> Tensor:
        border = torch.cat([documents[:1] != documents[:1], documents[1:] != documents[:-1]])
        return clean(anchors, mask, documents - border.to(documents), block, from_anchor)

    world.patch.setattr(block_module, "supervised_slots", slots)


@fault("the last token of an answer carries no loss", "B105", "LOS005")
def _(world: World) -> None:
    clean = block_module.supervised_slots

    def slots(anchors: Tensor, mask: Tensor, documents: Tensor, *rest: Any) -> Tensor:
        ends = mask & ~torch.cat([mask[1:], mask[:1] & ~mask[:1]])
        return clean(anchors, mask & ~ends, documents, *rest)

    world.patch.setattr(block_module, "supervised_slots", slots)


def _options(world: World, **options: Any) -> None:
    on_optimizer(world, lambda _model, made: [group.update(options) for group in made.param_groups] and made)


@fault("an eps that swallows small gradients", "B71", "OPT005")
def _(world: World) -> None:
    _options(world, eps=1e-3)


@fault("updates go uphill", "B71", "OPT005")
def _(world: World) -> None:
    _options(world, maximize=True)


@fault("weight decay on the norms alone", "B71", "OPT005")
def _(world: World) -> None:
    def decaying(model: DFlashDraftModel, made: Any) -> None:
        norms = [p for p in model.parameters() if p.ndim == 1]
        made.param_groups[0]["params"] = [p for p in model.parameters() if p.ndim != 1]
        made.add_param_group({**made.param_groups[0], "params": norms, "weight_decay": 0.1})

    on_optimizer(world, decaying)
