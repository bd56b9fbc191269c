"""What a device can do: from its maker's data sheet, or measured here in a few seconds.

A data sheet states the peak of dense bfloat16 products; training reaches a share of it, the efficiency, which is
stated beside every figure and can be set. This machine is not looked up: one row goes through the target, and twice
through a step of the drafter, with random weights of the real widths, so that what is not a product is measured too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from draftline.config import DFlashConfig, LossConfig, RunConfig
from draftline.data.sampler import RowPlan
from draftline.draft.block import FrozenTarget
from draftline.engine.process import intra_op_threads
from draftline.errors import ConfigError
from draftline.plan.sizes import TargetSizes, drawn_target
from draftline.plan.work import (
    Conversations,
    Workload,
    drafter_operations,
    matrices_of,
    target_operations,
    update_operations,
)
from draftline.records import CapturedSample, Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target
from draftline.train.step import Drafter
from draftline.transfer.pack import pack


@dataclass(frozen=True)
class Device:
    """One accelerator, or this machine.

    Attributes:
        name: as the option names it.
        memory_bytes: all of it.
        target_rate, drafter_rate: operations per second that each half reaches.
        bytes_per_second: of its memory; None where that is part of the measured rates.
        source: where the figures come from.
    """

    name: str
    memory_bytes: int
    target_rate: float
    drafter_rate: float
    bytes_per_second: float | None
    source: str


@dataclass(frozen=True)
class Sheet:
    """What a data sheet says.

    Attributes:
        name: of the product.
        peak: dense bfloat16 products with float32 sums, operations per second; without sparsity.
        bytes_per_second: of its memory.
        memory_bytes: of it.
        source: the document.
    """

    name: str
    peak: float
    bytes_per_second: float
    memory_bytes: float
    source: str


ACCELERATORS = {
    "a100-40gb": Sheet("A100 40 GB PCIe", 312e12, 1.555e12, 40e9, "NVIDIA A100 Tensor Core GPU datasheet"),
    "a100": Sheet("A100 80 GB SXM", 312e12, 2.039e12, 80e9, "NVIDIA A100 Tensor Core GPU datasheet"),
    "l4": Sheet("L4", 121e12, 0.300e12, 24e9, "NVIDIA L4 Tensor Core GPU datasheet (half of the figure with sparsity)"),
    "l40s": Sheet("L40S", 362e12, 0.864e12, 48e9, "NVIDIA L40S datasheet"),
    "rtx-4090": Sheet("GeForce RTX 4090", 165e12, 1.008e12, 24e9, "NVIDIA Ada GPU architecture white paper"),
    "h100": Sheet("H100 SXM", 989e12, 3.35e12, 80e9, "NVIDIA H100 Tensor Core GPU datasheet (half of sparsity)"),
    "h200": Sheet("H200 SXM", 989e12, 4.8e12, 141e9, "NVIDIA H200 Tensor Core GPU datasheet (half of sparsity)"),
    "b200": Sheet("B200 SXM", 2.25e15, 7.7e12, 180e9, "NVIDIA HGX B200 datasheet (half of sparsity)"),
    "mi300x": Sheet("Instinct MI300X", 1.307e15, 5.3e12, 192e9, "AMD Instinct MI300X data sheet"),
    "mi325x": Sheet("Instinct MI325X", 1.307e15, 6.0e12, 256e9, "AMD Instinct MI325X data sheet"),
}
"""Accelerators by the name that `--accelerator` takes."""

Clock = Callable[[], float]
"""Seconds since some moment."""

PROBED_PARAMETERS = 300_000_000
"""A larger model is measured with two of its layers."""
_PROBED_OPERATIONS = 1.5e11
"""Of each half: about two seconds of a slow core."""
_SHORTEST = 32
"""Tokens below which a row is no measure any more."""


def accelerator(name: str, efficiency: float) -> Device:
    """A device of the table, at a share of its peak.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"--accelerator {name}: not in the table; give here, or one of {', '.join(ACCELERATORS)}")
    sheet = ACCELERATORS[name]
    rate = sheet.peak * efficiency
    source = f"{sheet.source}; {efficiency:.0%} of {sheet.peak / 1e12:,.0f} TFLOP/s in bfloat16"
    return Device(sheet.name, int(sheet.memory_bytes), rate, rate, sheet.bytes_per_second, source)


def memory_here() -> int:
    """Bytes of this machine, or of what a container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


def memory_of(device: torch.device) -> int:
    """Bytes of a device of this machine."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else memory_here()


def measure_here(
    config: RunConfig,
    described: Target,
    shape: DFlashConfig,
    work: Workload,
    threads: int,
    clock: Clock = time.perf_counter,
) -> Device:
    """This machine's processors, measured with random weights of the run's widths. A few seconds.

    Args:
        described: the target without its weights.
        threads: intra-op threads of each half.
        clock: seconds that pass, or those of the processor alone, which other work on the machine does not change.
    """
    small = sum(p.numel() for p in described.model.parameters()) <= PROBED_PARAMETERS
    simple = config.model_copy(update={"loss": LossConfig(weights=config.loss.weights)})  # ids are sent, one head
    with intra_op_threads(threads):
        target = drawn_target(config.target, None if small else 2)
        target_rate = _target_rate(simple, target, shape.target_layer_ids if small else (0,), work, clock)
        drafter_rate = _drafter_rate(simple, target, shape, work, clock)
    source = f"measured here, {threads} thread(s) for each half" + ("" if small else ", two layers of the target")
    return Device("this machine", memory_here(), target_rate, drafter_rate, None, source)


def _target_rate(config: RunConfig, target: Target, layers: Sequence[int], work: Workload, clock: Clock) -> float:
    sizes = TargetSizes.of(target)
    row = _affordable(work.row, lambda some: target_operations(sizes, config, some))
    loop = TargetForwardLoop(target, layers, "target_ids", config.pipeline.target_batch_tokens)
    samples = _drawn_samples(row, target.vocab_size)
    return target_operations(sizes, config, row) / _seconds(lambda: loop.capture(samples), clock)


def _drafter_rate(config: RunConfig, target: Target, shape: DFlashConfig, work: Workload, clock: Clock) -> float:
    layer_numbers = (sum(a * b * n for (a, b), n in matrices_of(shape).items())) / shape.num_hidden_layers
    depth = max(1, min(shape.num_hidden_layers, int(PROBED_PARAMETERS / layer_numbers)))
    probed = shape.model_copy(
        update={"num_hidden_layers": depth, "layer_types": shape.layer_types[-depth:], "draft_vocab_size": None}
    )
    sizes, device, count = TargetSizes.of(target), torch.device("cpu"), config.train.rows_per_step
    row = _affordable(work.row, lambda some: drafter_operations(probed, config, sizes, some))
    frozen = FrozenTarget.of(target, None, like=torch.zeros((), device=device))
    drafter = Drafter(config=config, shape=probed, total_steps=9, frozen=frozen, device=device)
    captured = [_drawn_states(sample, probed) for sample in _drawn_samples(row, target.vocab_size)]
    rows = [pack(RowPlan(n, 0, n == count - 1, 0, tuple(range(len(row)))), captured) for n in range(count)]
    operations = count * drafter_operations(probed, config, sizes, row) + update_operations(probed, config.optim)
    return operations / _seconds(lambda: drafter.step(rows), clock)


def _affordable(row: Conversations, operations: Callable[[Conversations], float]) -> Conversations:
    """A row that a probe can pay for: fewer conversations, then a shorter one."""
    while operations(row) > _PROBED_OPERATIONS and (len(row) > 1 or row.lengths[0] > 2 * _SHORTEST):
        if len(row) > 1:
            row = row.of(range(len(row) // 2))
        else:
            row = Conversations(row.lengths // 2, np.maximum(row.supervised // 2, 2))
    return row


def _drawn_samples(row: Conversations, vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            number,
            torch.randint(vocab_size, (int(length),), generator=generator),
            torch.arange(int(length)) >= int(length - supervised),
        )
        for number, (length, supervised) in enumerate(zip(row.lengths, row.supervised, strict=True))
    ]


def _drawn_states(sample: Sample, shape: DFlashConfig) -> CapturedSample:
    states_SLD = torch.randn(len(sample), len(shape.target_layer_ids) * shape.hidden_size)
    return CapturedSample(sample, states_SLD, target_ids_S=sample.input_ids % shape.head_rows)


def _seconds(work: Callable[[], object], clock: Clock) -> float:
    """Of the faster of two calls after a first one, which pays for what is done once."""
    work()
    taken = []
    for _ in range(2):
        start = clock()
        work()
        taken.append(clock() - start)
    return min(taken)
