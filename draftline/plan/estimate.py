"""Memory of each half by item, disk, bytes on the wire and time of a run. The one estimate of the house.

`draftline plan` shows all of it before anything exists, `train` a line of it, and the audit compares it with what is
there. Activations are counted as autograd keeps them: per slot and layer six rows of the residual stream, five of the
queries and two of the keys, four of the MLP; per group of anchors a copy of the keys and a mask.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from draftline.config import DFlashConfig, RunConfig, sent_beside_states, slots_per_chunk
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError, StorageError
from draftline.plan.devices import Device
from draftline.plan.sizes import TargetSizes
from draftline.plan.work import (
    Conversations,
    Workload,
    drafter_operations,
    matrices_of,
    supervised_slots,
    target_operations,
    update_operations,
)
from draftline.train.run_folder import RunFolder

_FLOAT = 4
"""Bytes of a weight, gradient or moment of the drafter."""
_LOGITS_COPIES, _TEACHER_COPIES = 2, 4
"""Logits of a chunk and their gradient; the target's logits and probabilities, and two tables that compare them."""
_CHECKPOINTS_BESIDE = 2
"""`best`, and the one that is being written."""
_IDS_BYTES, _BOOL_BYTES = 8, 1
_SAMPLE_BYTES = 16
"""Length and checksum of a conversation on disk."""
_GROUP = 16
"""Anchors that share a product on a CPU."""


@dataclass(frozen=True)
class Item:
    """One thing that memory is needed for.

    Attributes:
        name: what it is.
        num_bytes: how much.
        setting: what lowers it.
    """

    name: str
    num_bytes: int
    setting: str


@dataclass(frozen=True)
class RunEstimate:
    """What a run will take, from shapes alone.

    Attributes:
        parameters: of the drafter.
        target, drafter, host: memory of each half, and rows that wait, by item.
        row_tokens: of the longest row.
        wire_bytes: of one token on its way from the target to the drafter.
        capture_bytes: all states of the data on disk, as `pipeline.states_path` keeps them.
        checkpoint_bytes: one checkpoint on disk.
        checkpoints: how many exist at the same time at most.
        states_on_disk: whether `pipeline.states_path` is set.
    """

    parameters: int
    target: tuple[Item, ...]
    drafter: tuple[Item, ...]
    host: tuple[Item, ...]
    row_tokens: int
    wire_bytes: int
    capture_bytes: int
    checkpoint_bytes: int
    checkpoints: int
    states_on_disk: bool

    @property
    def disk_bytes(self) -> int:
        """Of checkpoints, in the run folder."""
        return self.checkpoint_bytes * self.checkpoints

    @property
    def target_bytes(self) -> int:
        return _sum(self.target)

    @property
    def drafter_bytes(self) -> int:
        return _sum(self.drafter)

    @property
    def host_bytes(self) -> int:
        return _sum(self.host)

    @property
    def largest(self) -> Item:
        """The item that most memory goes into."""
        return max((*self.target, *self.drafter, *self.host), key=lambda item: item.num_bytes)

    def apart(self, sizes: TargetSizes) -> RunEstimate:
        """The same with a device for each half: the drafter's has a copy of the target's table and head."""
        copied = Item("the target's table and head", sizes.borrowed_bytes, "target.dtype")
        return replace(self, drafter=(*self.drafter, copied))

    def sentence(self) -> str:
        """One line for people."""
        return (
            f"drafter of {self.parameters / 1e6:,.1f}M parameters; memory: {size(self.target_bytes)} for the target, "
            f"{size(self.drafter_bytes)} for the drafter, up to {size(self.host_bytes)} queued; most of it for "
            f"{self.largest.name} ({size(self.largest.num_bytes)}); disk: {size(self.disk_bytes)} in "
            f"{self.checkpoints} checkpoints"
        )


@dataclass(frozen=True)
class TimeEstimate:
    """How long a run takes on given devices; the audit before it is not counted.

    Attributes:
        capture_seconds: every conversation once through the target, held-out ones included, on one device.
        target_seconds: target's half of the whole run on one device.
        drafter_seconds: drafter's half.
        evaluation_seconds: held-out figures, in which both halves wait.
        train_seconds: of the whole run, from the first step to the last.
        loops: target loops that the run has.
        overlapped: whether the halves work at the same time.
    """

    capture_seconds: float
    target_seconds: float
    drafter_seconds: float
    evaluation_seconds: float
    train_seconds: float
    loops: int
    overlapped: bool

    @property
    def loops_per_drafter(self) -> float:
        """Target loops, each on a device of its own, that keep one drafter busy."""
        return self.target_seconds / self.drafter_seconds if self.drafter_seconds else 0.0


def estimate_run(
    config: RunConfig, shape: DFlashConfig, sizes: TargetSizes, work: Workload, ranks: int = 1
) -> RunEstimate:
    """Memory and disk of a run; of several ranks the memory of each.

    Args:
        shape: of the drafter.
        sizes: of the target, in the precision in which it runs.
        work: the data.
        ranks: how many train.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DFlashDraftModel(shape).parameters())
    tokens = max(config.train.tokens_per_row if len(work.row) > 1 else 0, work.longest, work.row.tokens)
    beside = sizes.hidden * sizes.itemsize if sent_beside_states(config) == "last_hidden" else _IDS_BYTES
    states = len(shape.target_layer_ids) * sizes.hidden * sizes.itemsize
    layers, kept = len(shape.target_layer_ids), states
    if config.pipeline.states_dtype in ("bfloat16", "fp8"):
        kept = layers * (2 * sizes.hidden if config.pipeline.states_dtype == "bfloat16" else sizes.hidden + _FLOAT)
    wire = states + beside + 3 * _IDS_BYTES + _BOOL_BYTES
    muon = sum(a * b * count for (a, b), count in matrices_of(shape).items()) if config.optim.name == "muon" else 0
    captured = work.training.tokens + work.heldout.tokens
    queue = config.pipeline.queue_bytes if config.pipeline.mode in ("threads", "processes") else 0
    return RunEstimate(
        parameters=parameters,
        target=_target_items(config, sizes, tokens, states + beside),
        drafter=_drafter_items(config, shape, work, (parameters, 2 * parameters - muon), tokens * wire, ranks),
        host=(Item("rows that wait", min(queue, work.rows * tokens * wire), "pipeline.queue_bytes"),) if queue else (),
        row_tokens=tokens,
        wire_bytes=wire,
        capture_bytes=captured * (kept + beside) + (len(work.training) + len(work.heldout)) * _SAMPLE_BYTES,
        checkpoint_bytes=_FLOAT * (3 * parameters - muon),
        checkpoints=config.train.keep_last + _CHECKPOINTS_BESIDE,
        states_on_disk=config.pipeline.states_path is not None,
    )


def _target_items(config: RunConfig, sizes: TargetSizes, row_tokens: int, state_bytes: int) -> tuple[Item, ...]:
    together = min(config.pipeline.target_batch_tokens, row_tokens)
    inner = max(3 * sizes.mlp, 4 * sizes.attention_width) + 3 * sizes.hidden
    states, forward = row_tokens * state_bytes, together * inner * sizes.itemsize
    logits = 0
    if sent_beside_states(config) == "target_ids":
        rows = sizes.head // sizes.hidden
        logits = min(row_tokens, slots_per_chunk(rows)) * rows * sizes.itemsize
    behind = Item("logits of a chunk, and a copy of the states", states + logits, "loss.chunk_size")
    return (
        Item("weights", sizes.weight_bytes, "target.dtype"),
        Item("states of a row", states, "train.tokens_per_row"),
        # one after the other: what a forward needs is free before its states are copied and ids are read off
        max(Item("a forward", forward, "pipeline.target_batch_tokens"), behind, key=lambda item: item.num_bytes),
    )


def _drafter_items(
    config: RunConfig, shape: DFlashConfig, work: Workload, numbers: tuple[int, int], row_bytes: int, ranks: int
) -> tuple[Item, ...]:
    """Of the half that trains; `numbers`: parameters, and what the optimiser keeps of them."""
    parameters, moments = numbers
    kept = ranks if config.train.sharding == "fsdp" else 1
    low, anchors = config.train.precision == "bfloat16", config.train.num_anchors
    tables = _LOGITS_COPIES + (_TEACHER_COPIES if config.loss.teaches_distribution else 0)
    slots = int(supervised_slots(shape, work.row, anchors))
    chunk_slots = min(config.loss.chunk_size or slots_per_chunk(shape.head_rows), slots)
    logits = tables * chunk_slots * shape.head_rows * _FLOAT
    chunk = Item("logits of a chunk", logits, "loss.chunk_size")
    gradients = Item("gradients", _FLOAT * parameters, "drafter.num_layers")
    together = _FLOAT * parameters if kept > 1 else 0  # put together for a row, beside the share
    return (
        Item("weights", _FLOAT * parameters // kept + together, "drafter.num_layers"),
        Item("moments of the optimiser", _FLOAT * moments // kept, "train.sharding" if kept < ranks else "optim.name"),
        Item("rows in hand", row_bytes, "train.tokens_per_row"),
        Item("activations", activation_bytes(shape, work.row, anchors, low), "train.num_anchors"),
        # one after the other: gradients come into being while activations are given back
        max(chunk, gradients, key=lambda item: item.num_bytes),
    )


def activation_bytes(shape: DFlashConfig, row: Conversations, num_anchors: int, low: bool) -> int:
    """What a step of one row keeps between forward and backward.

    Args:
        low: products in bfloat16, whose operands are kept in it; the residual stream stays float32.
    """
    depth, width, inner = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    anchors = row.anchors(num_anchors)
    slots, tokens = int(anchors.sum()) * shape.block_size, row.tokens
    narrow = 2 if low else _FLOAT
    stream = slots * width * (depth * (28 if low else 6 * _FLOAT) + _FLOAT) + tokens * width * 3 * _FLOAT
    layer = slots * (4 * inner * narrow + queries * (3 if low else 5) * _FLOAT + 2 * keys * _FLOAT)
    layer += 2 * tokens * keys * _FLOAT
    groups = -(-anchors // _GROUP)
    start, answers = row.lengths - row.supervised, row.supervised
    seen = groups * start + answers * (groups + 1) / 2 + anchors * shape.block_size
    block = shape.block_size * anchors / groups.clip(min=1)
    layer += int((seen * (2 * keys + block)).sum()) * narrow
    weights = sum(a * b * count for (a, b), count in matrices_of(shape).items()) * narrow if low else 0
    loss = 3 * slots * width * _FLOAT  # what the head is given, and the gradient of that
    return int(stream + depth * layer + weights + loss)


def estimate_time(
    config: RunConfig,
    shape: DFlashConfig,
    sizes: TargetSizes,
    work: Workload,
    device: Device,
    devices: int,
    ranks: int = 1,
) -> TimeEstimate:
    """Time of a run; of several ranks each half's time is that of one of them, and what they exchange is not counted.

    Args:
        device: what each half runs on.
        devices: how many of them: with one the halves share it, else one is the drafter's and the others capture.
        ranks: how many train, each on devices of its own.
    """

    def captured(conversations: Conversations) -> float:
        return target_operations(sizes, config, conversations) / device.target_rate

    def learned(conversations: Conversations, learn: bool = True) -> float:
        return drafter_operations(shape, config, sizes, conversations, learn=learn) / device.drafter_rate

    once = captured(work.training) + captured(work.heldout)
    update = update_operations(shape, config.optim) / device.drafter_rate
    if device.bytes_per_second is not None:  # weights, gradients and moments are read and written once
        update += 7 * _FLOAT * sum(a * b * n for (a, b), n in matrices_of(shape).items()) / device.bytes_per_second
    longest = -(-config.train.rows_per_step // ranks) / config.train.rows_per_step  # of a step's rows, on one rank
    drafter = work.passes * learned(work.training) * longest + work.steps * update
    on_disk = config.pipeline.states_path is not None
    target = once if on_disk else work.passes * captured(work.training) * longest
    each = learned(work.heldout, learn=False) + captured(work.walked) + (0.0 if on_disk else captured(work.heldout))
    evaluation = work.evaluations(config.train.eval_every) * each
    mode, apart = config.pipeline.mode, devices > 1
    loops = max(1, devices - 1) if apart and mode != "inline" else config.pipeline.target_loops
    # threads of one interpreter on the cores of one processor are counted as taking turns
    overlapped = not on_disk and (mode == "processes" or (mode == "threads" and apart))
    halves = max(target / loops, drafter) if overlapped else target + drafter
    return TimeEstimate(once, target, drafter, evaluation, halves + evaluation, loops, overlapped)


def check_disk(folder: Path, estimate: RunEstimate) -> None:
    """Refuse to start or continue a run whose checkpoints do not fit beside what else is on the disk.

    Raises:
        StorageError: less is free where `folder` will be than the run needs.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    own = sum(file.stat().st_size for file in RunFolder(folder).checkpoints.glob("*/*"))
    free = shutil.disk_usage(existing).free + own
    if free < estimate.disk_bytes:
        raise StorageError(
            f"{folder} needs {size(estimate.disk_bytes)} for checkpoints and {size(free)} are free: "
            "free space, lower train.keep_last, or name a folder on another disk"
        )


def check_memory(needs: Iterable[Item], available: int, where: str) -> None:
    """Refuse what cannot fit, by the items of one device.

    Raises:
        ConfigError: more is needed than the device has in all.
    """
    items = tuple(needs)
    if _sum(items) > available:
        largest = max(items, key=lambda item: item.num_bytes)
        raise ConfigError(
            f"the run needs about {size(_sum(items))} on {where}, which has {size(available)}: most of it for "
            f"{largest.name} ({size(largest.num_bytes)}), which {largest.setting} changes; see `draftline plan`"
        )


def size(count: float) -> str:
    """Bytes for people, with three digits."""
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "kB"))
    return f"{count / unit:,.{max(0, 3 - len(str(int(count / unit))))}f} {name}"


def duration(seconds: float) -> str:
    """Time for people."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def to_json(estimate: RunEstimate, time: TimeEstimate) -> dict[str, Any]:
    """Plain values."""
    return {**asdict(estimate), **asdict(time), "loops_per_drafter": time.loops_per_drafter}


def _sum(items: Iterable[Item]) -> int:
    return sum(item.num_bytes for item in items)
