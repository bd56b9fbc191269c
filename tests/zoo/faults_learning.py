"""Faults of Muon, of D-PACE weights, and of teaching the target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftline.config import LossConfig
from draftline.draft import loss as loss_module
from draftline.draft.loss import SlotResults, TaughtSlots
from draftline.draft.model import DFlashDraftModel
from draftline.train import optim as optim_module
from draftline.train import step as step_module
from tests.zoo.fault import fault, on_optimizer
from tests.zoo.pipeline import Recipe, World

MUON = Recipe(settings={"optim": {"name": "muon", "muon_learning_rate": 3e-3}})
DPACE = Recipe(settings={"loss": {"weights": "dpace"}})
KL = Recipe(settings={"loss": {"ce": 0.0, "kl": 1.0}})
MIXTURE = Recipe(settings={"loss": {"ce": 0.1, "tv": 0.9}})
CUT = Recipe(settings={"loss": {"ce": 0.0, "kl": 1.0, "top_k": 4}})


# D-PACE


def _dpace(world: World, change: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    world.patch.setattr(loss_module, "dpace_weights", change)


def _table(confidence: Tensor, block: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of blocks that are filled up with ones, which slots are there, and the place of each."""
    _, index, sizes = block.unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(block)) - (sizes.cumsum(0) - sizes)[index]
    factors = torch.ones(len(sizes), int(sizes.max()))
    factors[index, place] = (1 - alpha) * confidence.float() + alpha
    there = torch.zeros_like(factors)
    there[index, place] = 1.0
    return factors, there, index * factors.shape[1] + place


def _suffix(table: Tensor) -> Tensor:
    return table.flip(1).cumsum(1).flip(1)


@fault("the product of D-PACE over the blocks instead of the slots", "B48", "LOS004", DPACE)
def _(world: World) -> None:
    def weights(*given: Any) -> Tensor:
        factors, there, place = _table(*given)
        return _suffix(factors.cumprod(0) * there).flatten()[place]

    _dpace(world, weights)


@fault("the products of D-PACE are not summed over the slots behind", "B48", "LOS004", DPACE)
def _(world: World) -> None:
    def weights(*given: Any) -> Tensor:
        factors, _, place = _table(*given)
        return factors.cumprod(1).flatten()[place]

    _dpace(world, weights)


@fault("the sum of D-PACE runs over the slots before", "B48", "LOS004", DPACE)
def _(world: World) -> None:
    def weights(*given: Any) -> Tensor:
        factors, there, place = _table(*given)
        return (factors.cumprod(1) * there).cumsum(1).flatten()[place]

    _dpace(world, weights)


@fault("the product of D-PACE leaves out the slot itself", "B48", "LOS004", DPACE)
def _(world: World) -> None:
    def weights(*given: Any) -> Tensor:
        factors, there, place = _table(*given)
        return _suffix(factors.cumprod(1) / factors * there).flatten()[place]

    _dpace(world, weights)


@fault("another alpha in the code than in the settings", "B48", "LOS004", DPACE)
def _(world: World) -> None:
    clean = loss_module.dpace_weights
    _dpace(world, lambda confidence, block, _alpha: clean(confidence, block, 0.1))


@fault("slots of all of a chunk are one block for D-PACE", "B48", "LOS004", DPACE)
def _(world: World) -> None:
    clean = loss_module.dpace_weights
    _dpace(world, lambda confidence, block, alpha: clean(confidence, torch.zeros_like(block), alpha))


@fault("D-PACE with alpha 1", "F03", "LOS003", DPACE)
def _(world: World) -> None:
    world.set("loss", dpace_alpha=1.0)


@fault("decay where D-PACE is configured", "B48", "LOS004", DPACE)
def _(world: World) -> None:
    clean = step_module.slot_loss_sum
    world.patch.setattr(
        step_module,
        "slot_loss_sum",
        lambda *given: clean(*given[:3], given[3].model_copy(update={"weights": "decay"})),
    )


@fault("chunks cut blocks", "B86", "LOS008", DPACE)
def _(world: World) -> None:
    def chunks(block: Tensor, size: int) -> Iterator[slice]:
        return (slice(start, start + size) for start in range(0, len(block), size))

    world.patch.setattr(loss_module, "_whole_blocks", chunks)


@fault(
    "the sum of the decay where D-PACE weighs",
    "B97",
    "RUN005",
    Recipe(settings={"loss": {"weights": "dpace", "denominator": "weights"}}),
)
def _(world: World) -> None:
    clean = step_module.slot_loss_sum

    def results(hidden: Tensor, slots: TaughtSlots, *rest: Any) -> SlotResults:
        return replace(clean(hidden, slots, *rest), weight_sum=slots.weights_n.sum())

    world.patch.setattr(step_module, "slot_loss_sum", results)


# Distances


def _distance(world: World, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Another loss: of logits [n, V], the target's logits [n, V] and labels [n] -> [n], by autograd and at once."""

    def results(hidden: Tensor, slots: TaughtSlots, logits_of: Any, loss: LossConfig) -> SlotResults:
        logits = logits_of(hidden).float()
        teacher = slots.teacher(slice(0, len(hidden))).float() if loss.teaches_distribution else logits.detach()
        value = (change(logits, teacher, slots.labels_n) * slots.weights_n).sum()
        return SlotResults(value, slots.weights_n.sum(), logits.argmax(-1).detach(), torch.zeros(()))

    world.patch.setattr(step_module, "slot_loss_sum", results)


@fault("D-PACE weights are not constants of the gradient", "B103", "LOS001", DPACE)
def _(world: World) -> None:
    def results(hidden: Tensor, slots: TaughtSlots, logits_of: Any, loss: LossConfig) -> SlotResults:
        logits = logits_of(hidden).float()
        nats = F.cross_entropy(logits, slots.labels_n, reduction="none")
        weights = loss_module.dpace_weights((-nats).exp(), slots.block_n, loss.dpace_alpha)
        return SlotResults((nats * weights).sum(), weights.sum(), logits.argmax(-1).detach(), torch.zeros(()))

    world.patch.setattr(step_module, "slot_loss_sum", results)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    """KL(left || right) of logits."""
    return (left.softmax(-1) * (left.log_softmax(-1) - right.log_softmax(-1))).sum(-1)


@fault("target and drafter swapped in KL", "F05", "LOS001", KL)
def _(world: World) -> None:
    _distance(world, lambda logits, teacher, _labels: _kl(logits, teacher))


@fault("a temperature on the target alone", "F05", "LOS001", KL)
def _(world: World) -> None:
    _distance(world, lambda logits, teacher, _labels: _kl(teacher / 2.0, logits))


@fault("a temperature on the drafter alone", "F05", "LOS001", KL)
def _(world: World) -> None:
    _distance(world, lambda logits, teacher, _labels: _kl(teacher, logits / 2.0))


@fault("a temperature on both sides", "F05", "LOS001", KL)
def _(world: World) -> None:
    _distance(world, lambda logits, teacher, _labels: _kl(teacher / 2.0, logits / 2.0))


@fault("labels alone where the distribution is configured", "F05", "LOS001", KL)
def _(world: World) -> None:
    _distance(world, lambda logits, _teacher, labels: F.cross_entropy(logits, labels, reduction="none"))


def _variation(logits: Tensor, teacher: Tensor) -> Tensor:
    return (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2


@fault("shares of the mixture swapped", "F05", "LOS001", MIXTURE)
def _(world: World) -> None:
    def mixed(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return 0.9 * F.cross_entropy(logits, labels, reduction="none") + 0.1 * _variation(logits, teacher)

    _distance(world, mixed)


@fault("the sum of differences without its half", "F05", "LOS001", MIXTURE)
def _(world: World) -> None:
    def mixed(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return 0.1 * F.cross_entropy(logits, labels, reduction="none") + 1.8 * _variation(logits, teacher)

    _distance(world, mixed)


def _teaching(world: World, change: Callable[..., Tensor]) -> None:
    """Other logits of the target: `change` gets the right function and its arguments."""
    clean = step_module._teacher_logits
    world.patch.setattr(step_module, "_teacher_logits", lambda *given: change(clean, *given))


@fault("the target's distribution one place late", "B41", "LOS002", KL)
def _(world: World) -> None:
    def late(clean: Any, row: Any, head: Any, positions: Tensor, chunk: slice) -> Tensor:
        return clean(row, head, (positions + 1).clamp(max=row.input_ids.shape[1] - 1), chunk)

    _teaching(world, late)


@fault("the target's distribution without its final norm", "F01", "LOS001", KL)
def _(world: World) -> None:
    def unnormed(_clean: Any, row: Any, head: Any, positions: Tensor, chunk: slice) -> Tensor:
        return head.logits(row.verifier_last_hidden_packed[0, positions[chunk]]).detach()

    _teaching(world, unnormed)


@fault("chunks take the distributions of the first chunk", "B86", "LOS008", KL)
def _(world: World) -> None:
    _teaching(world, lambda clean, row, head, at, chunk: clean(row, head, at, slice(0, chunk.stop - chunk.start)))


@fault("what is left of a cut is not scaled", "F05", "LOS001", CUT)
def _(world: World) -> None:
    clean = loss_module._distribution

    def distribution(*given: Any) -> tuple[Tensor, Tensor]:
        kept, lost = clean(*given)
        return kept * (1.0 - lost), lost

    world.patch.setattr(loss_module, "_distribution", distribution)


@fault("what a cut loses is not counted", "B94", "RUN005", CUT)
def _(world: World) -> None:
    clean = loss_module._distribution
    world.patch.setattr(loss_module, "_distribution", lambda *given: (clean(*given)[0], torch.zeros(1, 1)))


@fault("another cut in the code than in the settings", "F05", "LOS001", CUT)
def _(world: World) -> None:
    clean = loss_module._distribution
    world.patch.setattr(loss_module, "_distribution", lambda logits, _k, dtype: clean(logits, 2, dtype))


# Muon


@fault("a matrix in no group", "B87", "OPT001", MUON)
def _(world: World) -> None:
    on_optimizer(world, lambda _model, made: made.param_groups[0]["params"].pop() is None or made)


@fault("a matrix in two groups", "B87", "OPT001", MUON)
def _(world: World) -> None:
    on_optimizer(world, lambda model, made: made.param_groups[1]["params"].append(model.fc.weight))


@fault("fc is left to AdamW", "B87", "OPT001", MUON)
def _(world: World) -> None:
    clean = optim_module.is_orthogonalised
    world.patch.setattr(
        optim_module, "is_orthogonalised", lambda name, p: clean(name, p) and not name.startswith("fc.")
    )


@fault("a group keeps its first rate", "B97", "OPT004", MUON)
def _(world: World) -> None:
    def first_alone(optimizer: Any, rate: float) -> None:
        optimizer.param_groups[0]["lr"] = rate * optimizer.param_groups[0]["rate_factor"]

    world.patch.setattr(step_module, "set_learning_rate", first_alone)


@fault("matrices move at the rate of the norms", "B97", "OPT004", MUON)
def _(world: World) -> None:
    on_optimizer(world, lambda _model, made: made.param_groups[0].update(rate_factor=1.0))


@fault("gradients are not orthogonalised", "B71", "OPT005", MUON)
def _(world: World) -> None:
    world.patch.setattr(optim_module, "orthogonalised", lambda wide, _steps: F.normalize(wide.flatten(1)).view_as(wide))


@fault("matrices of one shape are orthogonalised as one", "B71", "OPT005", MUON)
def _(world: World) -> None:
    clean = optim_module.orthogonalised

    def side_by_side(wide: Tensor, steps: int) -> Tensor:
        return torch.stack(clean(torch.cat(list(wide), dim=1)[None], steps)[0].chunk(len(wide), dim=1))

    world.patch.setattr(optim_module, "orthogonalised", side_by_side)


@fault("Nesterov's step is left out", "B71", "OPT005", MUON)
def _(world: World) -> None:
    on_optimizer(world, lambda _model, made: made.param_groups[0].update(nesterov=False))


@fault("Nesterov's step is left out, whatever the group says", "B71", "OPT005", MUON)
def _(world: World) -> None:
    clean = optim_module.Muon._move
    world.patch.setattr(
        optim_module.Muon, "_move", lambda made, some, group: clean(made, some, {**group, "nesterov": False})
    )


@fault("two iterations instead of five", "B71", "OPT005", MUON)
def _(world: World) -> None:
    clean = optim_module.orthogonalised
    world.patch.setattr(optim_module, "orthogonalised", lambda wide, _steps: clean(wide, 2))


@fault("a step of Muon at its own scale, not AdamW's", "B71", "OPT005", MUON)
def _(world: World) -> None:
    world.patch.setattr(optim_module, "_RMS_OF_ADAMW", 1.0)


@fault("no decay of matrices", "B48", "OPT005", MUON)
def _(world: World) -> None:
    on_optimizer(world, lambda _model, made: made.param_groups[0].update(weight_decay=0.0))


@fault("the momentum of matrices is lost on a resume", "B77", "OPT007", MUON)
def _(world: World) -> None:
    clean = step_module.restore_optimizer

    def restore(optimizer: Any, model: nn.Module, tensors: Any) -> None:
        clean(optimizer, model, {name: t for name, t in tensors.items() if not name.endswith("momentum_buffer")})

    world.patch.setattr(step_module, "restore_optimizer", restore)


@fault("the momentum of matrices is kept in bfloat16", "B71", "OPT002", MUON)
def _(world: World) -> None:
    def low(made: Any, *_: Any) -> None:
        for state in made.state.values():
            if "momentum_buffer" in state:
                state["momentum_buffer"] = state["momentum_buffer"].bfloat16()

    def hooked(_model: DFlashDraftModel, made: Any) -> None:
        made.register_step_post_hook(low)

    on_optimizer(world, hooked)
