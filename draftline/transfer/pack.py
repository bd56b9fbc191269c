"""From a plan to a packed row: conversations are captured and laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftline.data.sampler import RowPlan
from draftline.records import CapturedSample, PackedBatch, Sample, Samples


class CaptureLoop(Protocol):
    """The target's half of the pipeline, as `TargetForwardLoop` provides it."""

    def capture(self, samples: Sequence[Sample]) -> list[CapturedSample]:
        """States of each sample, in the order given."""


def make_row(plan: RowPlan, samples: Samples, loop: CaptureLoop) -> PackedBatch:
    """Read, capture and pack one row.

    A row never shares a target forward with another row, so it is the same whichever loop makes it.
    """
    return pack(plan, loop.capture([samples[sample_id] for sample_id in plan.sample_ids]))


def make_rows(plans: Iterable[RowPlan], samples: Samples, loop: CaptureLoop) -> Iterator[PackedBatch]:
    """Rows one after another, each made when it is asked for."""
    return (make_row(plan, samples, loop) for plan in plans)


def pack(plan: RowPlan, captured: Sequence[CapturedSample]) -> PackedBatch:
    """Concatenate what was captured for a row, in the order of its plan.

    Documents are numbered from 0 and positions restart in each, so that the drafter's attention, rotary positions and
    anchors never cross from one conversation into the next. The result lies on the device of the captured states.
    """
    found = tuple(item.sample.sample_id for item in captured)
    if found != plan.sample_ids:
        raise ValueError(f"row {plan.sequence_number} is to hold samples {plan.sample_ids}, captured were {found}")
    device = captured[0].hidden_states_SLD.device
    lengths = torch.tensor([len(item.sample) for item in captured])
    return PackedBatch(
        sequence_number=plan.sequence_number,
        step=plan.step,
        last_of_step=plan.last_of_step,
        epoch=plan.epoch,
        sample_ids=plan.sample_ids,
        input_ids=_row([item.sample.input_ids for item in captured], device),
        loss_mask=_row([item.sample.loss_mask for item in captured], device),
        document_ids=_row([torch.arange(len(captured)).repeat_interleave(lengths)], device),
        position_ids=_row([torch.arange(int(length)) for length in lengths], device),
        hidden_states_packed=_row([item.hidden_states_SLD for item in captured], device),
        target_ids=_optional_row([item.target_ids_S for item in captured], device),
        verifier_last_hidden_packed=_optional_row([item.verifier_last_hidden_SD for item in captured], device),
    )


def _row(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """[S1, ...], [S2, ...], ... -> [1, S1 + S2 + ..., ...]."""
    return torch.cat(list(parts)).to(device)[None]


def _optional_row(parts: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if len(present) != len(parts):
        raise ValueError(f"{len(present)} of {len(parts)} samples of a row carry what all or none must carry")
    return _row(present, device)
