"""`draftline plan`: what a run will take, before anything exists."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from draftline.config import RunConfig, find_recipe, load_run_config
from draftline.errors import ConfigError
from draftline.options import PlanCommand
from draftline.progress import table
from draftline.storage import write_text

if TYPE_CHECKING:
    from rich.table import Table

    from draftline.config import DFlashConfig, PipelineConfig
    from draftline.plan.devices import Device
    from draftline.plan.estimate import Item, RunEstimate, TimeEstimate
    from draftline.plan.sizes import TargetSizes
    from draftline.plan.work import Workload


def plan(options: PlanCommand) -> None:
    """Say what a run will take: memory by item, disk, bytes on the wire, time. Needs no weights."""
    from rich.console import Console

    from draftline.plan.estimate import to_json

    recipe = find_recipe(options.recipe or "default")
    config = load_run_config(options.config, [*options.flags.words(), *options.settings], recipe)
    estimate, time, device, work, shape = planned(options, config)
    console = Console()
    for shown in (
        _memory_table(estimate, device, options.devices),
        _rest_table(estimate, time, work),
    ):
        console.print(shown)
    for line in _remarks(options, estimate, time, device, shape):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if options.json_file is not None:
        record = {"target": config.target.name, "device": device.name, "source": device.source}
        write_text(options.json_file, json.dumps({**record, **to_json(estimate, time)}, indent=2) + "\n")


def planned(
    options: PlanCommand, config: RunConfig
) -> tuple[RunEstimate, TimeEstimate, Device, Workload, DFlashConfig]:
    """Everything that is shown.

    Raises:
        ConfigError: neither data nor a mean length is given, or the accelerator is not known.
        TargetError: the target's configuration cannot be read.
        DataError: the data cannot be read.
    """
    from draftline.engine.process import available_cores, threads_per_loop
    from draftline.plan.devices import accelerator, measure_here
    from draftline.plan.estimate import estimate_run, estimate_time
    from draftline.plan.sizes import TargetSizes, described_target
    from draftline.targets.drafter_shape import resolve_drafter_config
    from draftline.train.ranks import check_rows

    here = options.accelerator == "here"
    device = None if here else accelerator(options.accelerator, options.efficiency)  # before anything is read
    work = workload(options, config)
    described = described_target(config.target)
    shape = resolve_drafter_config(described, config.drafter, None)
    narrow = config.target.dtype in ("bfloat16", "float16") or (config.target.dtype == "auto" and not here)
    sizes = TargetSizes.of(described, itemsize=2 if narrow else 4)
    if not here and config.train.precision == "auto":
        config = config.model_copy(update={"train": config.train.model_copy(update={"precision": "bfloat16"})})
    if device is None:
        threads = threads_per_loop(available_cores(), config.pipeline.threads_per_loop)
        device = measure_here(config, described, shape, work, threads)
    config = config.model_copy(update={"pipeline": _with_mode(options, config, sizes, work)})
    check_rows(config.train, options.ranks)
    estimate = estimate_run(config, shape, sizes, work, options.ranks)
    time = estimate_time(config, shape, sizes, work, device, options.devices, options.ranks)
    return estimate if options.devices == 1 else estimate.apart(sizes), time, device, work, shape


def _with_mode(options: PlanCommand, config: RunConfig, sizes: TargetSizes, work: Workload) -> PipelineConfig:
    """The pipeline in the mode that the run would choose."""
    from draftline.engine.process import available_cores
    from draftline.plan.work import choose_mode, target_operations
    from draftline.targets.model import resolve_device

    here = options.accelerator == "here"
    mode, _ = choose_mode(
        config.pipeline,
        two_devices=options.devices > 1,
        accelerator=not here or resolve_device(config.target.device).type != "cpu",
        cores=available_cores(),
        operations=work.passes * target_operations(sizes, config, work.training),
    )
    return config.pipeline.model_copy(update={"mode": mode})


def workload(options: PlanCommand, config: RunConfig) -> Workload:
    """The conversations of the run: as prepared, or so many of one length."""
    from draftline.data.dataset import open_data
    from draftline.data.split import choose_conversations
    from draftline.plan.work import Workload

    if options.mean_length is not None:
        return Workload.of_mean(options.mean_length, options.conversations, options.answer_share, config)
    if config.data.path is None:
        raise ConfigError("nothing says how long the conversations are: give --data, or --mean-length and how many")
    return Workload.of_data(choose_conversations(config, *open_data(config)), config)


def _memory_table(estimate: RunEstimate, device: Device, devices: int) -> Table:
    from draftline.plan.estimate import size

    def lines(part: str, items: Iterable[Item]) -> list[tuple[str, str, str]]:
        return [(f"{part}: {item.name}", size(item.num_bytes), item.setting) for item in items]

    rows = [*lines("target", estimate.target), ("target", size(estimate.target_bytes), "")]
    rows += [*lines("drafter", estimate.drafter), ("drafter", size(estimate.drafter_bytes), "")]
    rows += lines("host", estimate.host)
    if devices == 1:
        rows.append(("both on one device", size(estimate.target_bytes + estimate.drafter_bytes), ""))
    return table(f"memory ({device.name}: {size(device.memory_bytes)})", ("item", "bytes", "setting"), rows)


def _rest_table(estimate: RunEstimate, time: TimeEstimate, work: Workload) -> Table:
    from draftline.plan.estimate import duration, size

    rows = [
        ("conversations, tokens of a pass", f"{len(work.training):,}, {work.training.tokens:,}"),
        ("rows, steps", f"{work.rows:,}, {work.steps:,}"),
        ("parameters of the drafter", f"{estimate.parameters:,}"),
        ("bytes per token on the wire", f"{estimate.wire_bytes:,}"),
        ("disk: all states", size(estimate.capture_bytes) + ("" if estimate.states_on_disk else " (not kept)")),
        (f"disk: {estimate.checkpoints} checkpoints", size(estimate.disk_bytes)),
        ("capture, once", duration(time.capture_seconds)),
        ("training: target's half", duration(time.target_seconds)),
        ("training: drafter's half", duration(time.drafter_seconds)),
        ("training: held-out figures", duration(time.evaluation_seconds)),
        (
            f"training ({'overlapped' if time.overlapped else 'in turns'}, {time.loops} target loop(s))",
            duration(time.train_seconds),
        ),
        ("target loops per drafter", f"{time.loops_per_drafter:.2f}"),
    ]
    return table("disk and time", ("what", "how much"), rows)


def _remarks(
    options: PlanCommand, estimate: RunEstimate, time: TimeEstimate, device: Device, shape: DFlashConfig
) -> list[str]:
    from draftline.plan.estimate import size

    largest = estimate.largest
    lines = [
        f"largest: {largest.name}, {size(largest.num_bytes)}; {largest.setting} lowers it",
        f"rates: {device.target_rate / 1e12:,.3g} TFLOP/s for the target, {device.drafter_rate / 1e12:,.3g} for the "
        f"drafter ({device.source})",
    ]
    halves = [estimate.target_bytes, estimate.drafter_bytes]
    most = sum(halves) if options.devices == 1 else max(halves)
    if most > device.memory_bytes:
        lines.append(f"does not fit: {size(most)} are needed, {device.name} has {size(device.memory_bytes)}")
    if options.devices > 1 and not time.overlapped:
        lines.append("the halves take turns: set pipeline.mode=threads to use the other devices meanwhile")
    if options.ranks > 1:
        moved = size(4 * estimate.parameters)
        lines.append(
            f"{options.ranks} ranks: memory and time are those of each; {moved} of gradients are summed a step"
        )
    if options.mean_length is not None and shape.block_size > options.mean_length:
        lines.append(f"conversations of {options.mean_length} tokens are shorter than a block of {shape.block_size}")
    return [*lines, "not counted: the audit before the first step, loading, answers that the target writes"]
