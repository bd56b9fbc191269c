"""OPT: are exactly the drafter's weights trained, precisely enough to move, and resumed as they were?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftline.audit.oracle_update import Moment, goes_by_muon, moved, rate_of
from draftline.audit.probe import Probe
from draftline.audit.report import Problem, check
from draftline.config import OptimConfig
from draftline.draft.loss import StepMetrics
from draftline.plan.devices import memory_of
from draftline.plan.estimate import estimate_run
from draftline.plan.sizes import TargetSizes
from draftline.plan.work import Workload
from draftline.train import checkpoint
from draftline.train.checkpoint import TrainState
from draftline.train.step import Drafter

_STEPS = 4


@check("OPT001", "the optimiser does not hold exactly the drafter's parameters")
def parameter_set(probe: Probe) -> Problem | None:
    model = probe.subject.draft_model
    groups = probe.subject.run.drafter.optimizer.param_groups
    held = [id(p) for group in groups for p in group["params"]]
    wanted = {id(p): name for name, p in model.named_parameters()}
    frozen = {id(p): name for name, p in probe.subject.target.model.named_parameters()}
    missing = [name for key, name in wanted.items() if key not in held]
    foreign = [frozen.get(key, "an unknown tensor") for key in held if key not in wanted]
    stopped = [name for name, p in model.named_parameters() if not p.requires_grad]
    if not missing and not foreign and not stopped and len(set(held)) == len(held):
        return _not_orthogonalised(probe)
    return Problem(
        f"{len(missing)} drafter parameters not held {missing[:3]}, {len(foreign)} held that are none {foreign[:3]}, "
        f"{len(stopped)} that do not train {stopped[:3]}, {len(held) - len(set(held))} held twice",
        "give the optimiser draft_model.parameters(), all and nothing else",
    )


def _not_orthogonalised(probe: Probe) -> Problem | None:
    """Muon gives all directions of a matrix one size, which is no sense in a vector or in rows of a head."""
    muon = [group for group in probe.subject.run.drafter.optimizer.param_groups if "ns_steps" in group]
    moved = {id(p) for group in muon for p in group["params"]}
    parameters = dict(probe.subject.draft_model.named_parameters())
    found = {name for name, p in parameters.items() if id(p) in moved}
    wanted = {
        name
        for name, p in parameters.items()
        if goes_by_muon(p, probe.subject.config.optim) and name.startswith(("fc.", "layers."))
    }
    if found == wanted:
        return None
    return Problem(
        f"Muon moves {sorted(found - wanted)[:3]}, which are no matrices of fc and the layers, and does not move "
        f"{sorted(wanted - found)[:3]}",
        "Muon for fc and the matrices inside the layers, AdamW for norms, vectors and any head",
    )


@check("OPT002", "weights or optimiser state are not float32", needs=("DRF001",))
def precision(probe: Probe) -> Problem | None:
    drafter = _twin(probe)
    low = [name for name, p in drafter.model.named_parameters() if p.dtype != torch.float32]
    _step(probe, drafter)
    moments = {
        str(value.dtype)
        for state in drafter.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dtype != torch.float32
    }
    if not low and not moments:
        return None
    return Problem(
        f"{len(low)} parameters are not float32 {low[:2]}; moments in {sorted(moments)}",
        "keep float32 master weights and moments; autocast the forward instead",
    )


@check("OPT003", "some weights never move", needs=("DRF001", "OPT001", "LOS007"))
def everything_moves(probe: Probe) -> Problem | None:
    drafter = _twin(probe)
    before = {name: p.detach().clone() for name, p in drafter.model.named_parameters()}
    for _ in range(_STEPS):
        _step(probe, drafter)
    still = {
        name: float((p.detach() == before[name]).double().mean())
        for name, p in drafter.model.named_parameters()
        if (p.detach() == before[name]).double().mean() > 0.5
    }
    if not still:
        return None
    name = max(still, key=still.__getitem__)
    return Problem(
        f"after {_STEPS} steps {still[name]:.0%} of {name} is exactly as before; so are {len(still)} of {len(before)} "
        "tensors in their greater part",
        "float32 master weights: in bfloat16 a step below 2^-9 of a weight is rounded away; and a rate above 0",
    )


@check("OPT004", "the learning rate does not follow its schedule")
def schedule(probe: Probe) -> Problem | None:
    config, total, drafter = probe.subject.config.optim, 200, _twin(probe)
    drafter.total_steps, drafter.seams = total, ()
    rates = [drafter.learning_rate(update) for update in range(total)]
    peak, top = max(rates), rates.index(max(rates))
    wanted_top = round(config.warmup_fraction * total)
    fix = f"a linear rise over warmup_fraction of all updates, then optim.schedule = {config.schedule}"
    falling = all(a >= b - 1e-12 for a, b in pairwise(rates[top:]))
    rising = all(a <= b + 1e-12 for a, b in pairwise(rates[: top + 1]))
    faults = {
        f"peak {peak:.3g}, learning_rate is {config.learning_rate:.3g}": math.isclose(
            peak, config.learning_rate, rel_tol=0.02
        ),
        f"peak at update {top}, warm-up ends at {wanted_top}": abs(top - wanted_top) <= 2,
        f"first rate {rates[0]:.3g}": rates[0] > 0,
        "it does not rise and then fall": rising and falling,
    }
    for update, wanted in _waypoints(config, top, total).items():
        text = f"rate {rates[update]:.3g} of update {update}, wanted {wanted:.3g}"
        faults[text] = abs(rates[update] - wanted) <= 0.03 * config.learning_rate
    wrong = [text for text, right in faults.items() if not right]
    return Problem(f"over {total} updates: {wrong[0]}", fix) if wrong else _unused_rate(probe)


def _waypoints(config: OptimConfig, top: int, total: int) -> dict[int, float]:
    """Rates that a schedule passes through, by the number of the update."""
    high, low = config.learning_rate, config.learning_rate * config.final_fraction
    middle, half = min(top + (total - top) // 2, total - 1), (high + low) / 2
    if config.schedule == "constant":
        return {middle: high, total - 1: high}
    if config.schedule == "cosine":
        return {middle: half, total - 1: low} if top < total - 2 else {total - 1: low}
    fall = round(total * (config.decay_fraction or 0.2))
    if total - fall <= top:
        return {total - 1: low}
    return {total - fall - 1: high, total - 1 - fall // 2: half, total - 1: low}


def _unused_rate(probe: Probe) -> Problem | None:
    """The rate of the schedule has to reach every tensor, at its own multiple, and before the update."""
    drafter, update, optim = _twin(probe), 77, probe.subject.config.optim
    drafter.total_steps, drafter.seams = 200, ()
    rates: dict[int, float] = {}
    drafter.optimizer.register_step_pre_hook(
        lambda made, *_: rates.update({id(p): group["lr"] for group in made.param_groups for p in group["params"]})
    )
    drafter.step([replace(probe.row, step=update)])
    rate = drafter.learning_rate(update)
    for name, parameter in drafter.model.named_parameters():
        found, wanted = rates.get(id(parameter), math.nan), rate_of(parameter, rate, optim)
        if not math.isclose(found, wanted, rel_tol=1e-6):
            return Problem(
                f"at update {update} of 200 the rate of {name} is {wanted:.3g}, the optimiser has {found:.3g}",
                "set the rate of every group, by the number of the update, at Muon's own multiple",
            )
    return None


@check("OPT005", "the optimiser's numbers are not the configured ones")
def numbers(probe: Probe) -> Problem | None:
    config = probe.subject.config.optim
    adamw = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "betas": (config.beta1, config.beta2),
    }
    muon = {
        "lr": config.muon_learning_rate or config.learning_rate,
        "weight_decay": config.muon_weight_decay,
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "ns_steps": config.muon_ns_steps,
    }
    for group in _twin(probe).optimizer.param_groups:
        for name, wanted in (muon if "ns_steps" in group else adamw).items():
            if name not in group or group[name] != wanted:
                return Problem(f"{name} is {group.get(name)}, configured {wanted}", "build the optimiser from optim.*")
    return _wrong_update(probe)


def _wrong_update(probe: Probe) -> Problem | None:
    """Two updates with known gradients against the formula, for what no number says: eps, sign, another rule."""
    config, generator = probe.subject.config.optim, probe.generator(13)
    drafter = _twin(probe)
    model = drafter.model
    before = {name: p.detach().double().cpu() for name, p in model.named_parameters()}
    gradients = {name: torch.randn(2, *p.shape, generator=generator) * 1e-3 for name, p in before.items()}
    for update in range(2):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][update].to(parameter)
        drafter.optimizer.step()
    for name, parameter in model.named_parameters():
        wanted, moment = before[name], Moment.zero(before[name])
        for gradient in gradients[name].double():
            wanted, moment = moved(wanted, gradient, moment, config.learning_rate, config)
        step = (parameter.detach().double().cpu() - before[name]).abs().max()
        difference = float((parameter.detach().double().cpu() - wanted).abs().max())
        narrow = goes_by_muon(parameter, config) and probe.device.type != "cpu"  # Muon iterates in bfloat16 there
        if difference > (0.3 if narrow else 0.05) * rate_of(parameter, config.learning_rate, config):
            return Problem(
                f"two updates with known gradients move {name} by {step:.2e}, and {difference:.2e} away from where "
                f"optim.name={config.name} with the configured numbers brings it",
                "AdamW or Muon as docs/concepts/semantics.md (section 5) writes them, and nothing else",
            )
    return None


@check("OPT006", "gradients are not clipped as configured", needs=("DRF001", "LOS006"))
def clipping(probe: Probe) -> Problem | None:
    recorded: list[float] = []
    drafter = _twin(probe)

    def record(*_: object) -> None:
        gradients = [p.grad for p in drafter.model.parameters() if p.grad is not None]
        recorded.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))

    drafter.optimizer.register_step_pre_hook(record)
    full = _step(probe, drafter, clip_norm=1e12)
    _step(probe, drafter, clip_norm=1e-3)
    _step(probe, drafter, clip_norm=1e12)
    if len(recorded) == 3 and abs(recorded[1] - 1e-3) <= 1e-5 and abs(recorded[0] / full - 1) < 1e-3:
        return None
    return Problem(
        f"norms that reached the optimiser {[f'{r:.3g}' for r in recorded]} with clip_norm 1e12, 1e-3, 1e12; the first "
        f"was reported as {full:.3g}",
        "clip the norm of the whole gradient once per step, after the division",
    )


@check("OPT007", "a resumed run is not the run that was interrupted", needs=("DRF001", "DRF008", "OPT001"))
def resume(probe: Probe) -> Problem | None:
    drafter, resumed = _twin(probe), _twin(probe)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "state"
        _step(probe, drafter)
        _step(probe, drafter)
        _much_later(probe, drafter)
        wanted = _late_progress(probe.block_size)
        random = torch.random.get_rng_state()
        checkpoint.write_checkpoint(folder, drafter.checkpoint(wanted, "of data"))
        found = checkpoint.read_checkpoint(folder)
        with torch.random.fork_rng():
            torch.random.manual_seed(99)
            resumed.restore(found, folder)
            other_random = not torch.equal(torch.random.get_rng_state(), random)
        lost = _lost(_remembered(drafter), _remembered(resumed))
        _step(probe, drafter)
        _step(probe, resumed)
    exact = 0.0 if probe.device.type == "cpu" else 1e-6
    lost += _lost(dict(drafter.model.named_parameters()), dict(resumed.model.named_parameters()), exact)
    if lost:
        return Problem(
            f"2 steps, a checkpoint and 1 step give something else than 3 steps in {len(lost)} tensors {lost[:3]}",
            "save and restore weights, both moments and update counts, in float32 and by name",
        )
    if other_random:
        return Problem("torch's generator does not come back from a checkpoint", "save and restore random states")
    return _forgotten(found, checkpoint.Checkpoint(wanted, drafter.config, drafter.model.config, "of data", {}, {}, {}))


def _much_later(probe: Probe, drafter: Drafter) -> None:
    """The optimiser as after 100,001 updates, with moments that no narrower format holds."""
    generator = probe.generator(17)
    for state in drafter.optimizer.state.values():
        for name, value in state.items():
            if not isinstance(value, Tensor):
                state[name] = 100_001
            elif value.ndim == 0:
                value.fill_(100_001)
            else:
                value.copy_((0.5 + torch.rand(value.shape, generator=generator)) * 1e-4)


def _remembered(drafter: Drafter) -> dict[str, Tensor]:
    """Weights and everything that the optimiser keeps, by name."""
    named = dict(drafter.model.state_dict())
    for name, parameter in drafter.model.named_parameters():
        kept = drafter.optimizer.state[parameter]
        named |= {f"{key} of {name}": torch.as_tensor(value) for key, value in kept.items() if value is not None}
    return named


def _lost(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], exact: float = 0.0) -> list[str]:
    """Names of tensors that are missing, of another dtype, or have other values."""
    pairs = ((name, found.get(name), tensor) for name, tensor in wanted.items())
    return [
        name
        for name, ours, tensor in pairs
        if ours is None or ours.dtype != tensor.dtype or not torch.allclose(ours, tensor, rtol=0.0, atol=exact)
    ]


def _late_progress(block_size: int) -> TrainState:
    """Numbers that would not survive a narrower format."""
    zero, values = StepMetrics.zero(block_size), list[Any]()
    for i, field in enumerate(fields(zero)):
        kind = type(getattr(zero, field.name))
        values.append(torch.arange(block_size).double() + 2.0**40 + i if kind is Tensor else kind(2**40 + i + 1 / 3))
    window = StepMetrics(*values)
    return TrainState(window, 100_001, 2**33 + 3, 2**40 + 5, 1e9 + 1 / 3, 99_999, 1 / 3, 99_998)


def _forgotten(found: checkpoint.Checkpoint, wanted: checkpoint.Checkpoint) -> Problem | None:
    """All that a checkpoint says besides its tensors: progress, open sums of the log, settings, shape, data."""
    for name in ("run_config", "drafter_config", "data_fingerprint"):
        if getattr(found, name) != getattr(wanted, name):
            return Problem(f"{name} comes back from a checkpoint as another", "save and restore what the run is")
    ours, theirs = (vars(item.state) | vars(item.state.window) for item in (found, wanted))
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if isinstance(value, Tensor) else name == "window" or ours[name] == value
        if not same:
            return Problem(
                f"{name} {value} comes back from a checkpoint as {ours[name]}", "save and restore all progress"
            )
    return None


@check("OPT008", "training changes the target", needs=("DRF001",))
def target_untouched(probe: Probe) -> Problem | None:
    target = probe.subject.target.model
    shared = _in_memory_of(target, probe.subject.draft_model)
    if shared:
        return Problem(
            f"{len(shared)} of the drafter's tensors lie in the target's own memory, first {shared[0]}",
            "copy the target's weights: load_state_dict without assign",
        )
    before = {name: p.detach().sum(dtype=torch.float64).item() for name, p in target.named_parameters()}
    drafter = _twin(probe)
    _step(probe, drafter)
    _step(probe, drafter)
    changed = [n for n, p in target.named_parameters() if p.detach().sum(dtype=torch.float64).item() != before[n]]
    if not changed:
        return None
    return Problem(
        f"two steps changed {len(changed)} of its tensors {changed[:3]}", "requires_grad_(False) on the target"
    )


def _in_memory_of(target: nn.Module, drafter: nn.Module) -> list[str]:
    """Names of the drafter's parameters that move a parameter of the target when they move."""
    held = {p.untyped_storage().data_ptr() for p in target.parameters()}
    return [name for name, p in drafter.named_parameters() if p.untyped_storage().data_ptr() in held]


@check("OPT009", "the run does not fit into memory")
def memory(probe: Probe) -> Problem | None:
    run = probe.subject.run
    estimate = estimate_run(run.config, run.shape, TargetSizes.of(run.target), Workload.of_data(run.data, run.config))
    needed, available = estimate.target_bytes + estimate.drafter_bytes, memory_of(probe.device)
    probe.notes.append(estimate.sentence())
    if needed <= available:
        return None
    return Problem(
        f"about {needed / 1e9:.1f} GB are needed, {available / 1e9:.1f} GB are there",
        f"most of it is for {estimate.largest.name}: {estimate.largest.setting} changes that",
        "warning",
    )


def _twin(probe: Probe) -> Drafter:
    """A drafter of the run's own making that may be moved; the run's is left alone."""
    drafter = probe.subject.run.drafter.twin()
    drafter.model.train()
    return drafter


def _step(probe: Probe, drafter: Drafter, clip_norm: float | None = None) -> float:
    """One step of the run on the probe's row; returns the gradient norm that it reports."""
    return probe.subject.train_step(drafter, [probe.row], [probe.anchor_positions], clip_norm=clip_norm).grad_norm
