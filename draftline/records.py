"""The records that cross the borders between the stages, in the order in which they are made.

    Sample -> CapturedSample -> PackedBatch -> StepMetrics

Each is frozen and checks its shapes once, when it is built, so that no stage has to check again.

Shape letters, used in names across the package:
    S  positions of a packed row       L  captured layers          D  hidden size
    A  anchors                         P  block size               Q  queries, A * P
    N  attention heads                 H  head dimension           V  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor


def _require(condition: bool, record: str, field: str, found: object, wanted: str) -> None:
    """Raise for a field of a record that does not have the wanted form."""
    if not condition:
        raise ValueError(f"{record}.{field} is {found}, expected {wanted}")


@dataclass(frozen=True)
class Sample:
    """One conversation as token ids.

    Attributes:
        sample_id: position in the prepared data set; seeds the draw of anchors.
        input_ids: [S] int64, exactly what the target's chat template gives.
        loss_mask: [S] bool, true on tokens that the assistant wrote.
    """

    sample_id: int
    input_ids: Tensor
    loss_mask: Tensor

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.loss_mask
        _require(ids.ndim == 1 and ids.dtype == torch.int64, "Sample", "input_ids", _form(ids), "[S] int64")
        _require(mask.dtype == torch.bool, "Sample", "loss_mask", mask.dtype, "bool")
        _require(mask.shape == ids.shape, "Sample", "loss_mask", tuple(mask.shape), f"{tuple(ids.shape)}")

    def __len__(self) -> int:
        return self.input_ids.shape[0]


class Samples(Protocol):
    """Tokenised conversations by number, as a prepared data set gives them."""

    def __getitem__(self, sample_id: int) -> Sample: ...


@dataclass(frozen=True)
class HiddenStates:
    """What one forward of the target leaves behind for the real tokens of a batch.

    Named fields and not a tuple: both tensors have the same type, and with one captured layer even the same
    shape, so that a tuple unpacked in the wrong order trains without an error.

    Attributes:
        hidden_states_packed: [1, S, L*D], outputs of the captured layers side by side, for the drafter's `fc`.
        verifier_last_hidden_packed: [1, S, D], output of the last decoder layer before the final norm, for the
            training targets.
    """

    hidden_states_packed: Tensor
    verifier_last_hidden_packed: Tensor

    def __post_init__(self) -> None:
        states, last = self.hidden_states_packed, self.verifier_last_hidden_packed
        _require(
            states.ndim == 3 and states.shape[0] == 1,
            "HiddenStates",
            "hidden_states_packed",
            _form(states),
            "[1, S, L*D]",
        )
        _require(
            last.ndim == 3 and last.shape[:2] == states.shape[:2] and states.shape[2] % last.shape[2] == 0,
            "HiddenStates",
            "verifier_last_hidden_packed",
            _form(last),
            f"[1, {states.shape[1]}, D] with D a divisor of {states.shape[2]}",
        )


@dataclass(frozen=True)
class CapturedSample:
    """A sample with the target's states at each of its tokens.

    Attributes:
        sample: the tokens.
        hidden_states_SLD: [S, L*D], see `HiddenStates.hidden_states_packed`.
        target_ids_S: [S] int64, the target's own greedy next token at each position, if the target side computed it.
        verifier_last_hidden_SD: [S, D], the last decoder layer's output, if the drafter side is to compute it.
            Exactly one of the two is present.
    """

    sample: Sample
    hidden_states_SLD: Tensor
    target_ids_S: Tensor | None = None
    verifier_last_hidden_SD: Tensor | None = None

    def __post_init__(self) -> None:
        length = len(self.sample)
        states, ids, last = self.hidden_states_SLD, self.target_ids_S, self.verifier_last_hidden_SD
        _require(
            states.ndim == 2 and states.shape[0] == length,
            "CapturedSample",
            "hidden_states_SLD",
            _form(states),
            f"[{length}, L*D]",
        )
        _require(
            (ids is None) != (last is None),
            "CapturedSample",
            "target_ids_S",
            "given together with or without verifier_last_hidden_SD",
            "exactly one of the two",
        )
        if ids is not None:
            _require(
                ids.shape == (length,) and ids.dtype == torch.int64,
                "CapturedSample",
                "target_ids_S",
                _form(ids),
                f"[{length}] int64",
            )
        if last is not None:
            _require(
                last.ndim == 2 and last.shape[0] == length,
                "CapturedSample",
                "verifier_last_hidden_SD",
                _form(last),
                f"[{length}, D]",
            )


@dataclass(frozen=True)
class PackedBatch:
    """One packed row: the real tokens of several samples, one after another, without padding.

    A row is one micro-batch; an optimiser step sums the rows that carry its number.

    Attributes:
        sequence_number: place of the row in the sampler's order, from 0; rows are consumed in this order.
        step: optimiser step (from 0) that the row belongs to.
        last_of_step: whether the optimiser moves after this row.
        epoch: pass over the data (from 0); with the seed and the sample id it determines the anchors.
        sample_ids: one id per document, in row order.
        input_ids, document_ids, position_ids: [1, S] int64. Documents count from 0, positions restart in each.
        loss_mask: [1, S] bool.
        hidden_states_packed: [1, S, L*D].
        target_ids: [1, S] int64 or None; verifier_last_hidden_packed: [1, S, D] or None; exactly one is given.
    """

    sequence_number: int
    step: int
    last_of_step: bool
    epoch: int
    sample_ids: tuple[int, ...]
    input_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor
    hidden_states_packed: Tensor
    target_ids: Tensor | None = None
    verifier_last_hidden_packed: Tensor | None = None

    def __post_init__(self) -> None:
        row = self.input_ids.shape
        _require(len(row) == 2 and row[0] == 1, "PackedBatch", "input_ids", _form(self.input_ids), "[1, S]")
        for name in ("loss_mask", "document_ids", "position_ids"):
            tensor: Tensor = getattr(self, name)
            _require(tensor.shape == row, "PackedBatch", name, _form(tensor), f"{tuple(row)}")
        states, ids, last = self.hidden_states_packed, self.target_ids, self.verifier_last_hidden_packed
        _require(
            states.ndim == 3 and states.shape[:2] == row,
            "PackedBatch",
            "hidden_states_packed",
            _form(states),
            f"[1, {row[1]}, L*D]",
        )
        _require(
            (ids is None) != (last is None),
            "PackedBatch",
            "target_ids",
            "given together with or without verifier_last_hidden_packed",
            "exactly one of the two",
        )
        if ids is not None:
            _require(ids.shape == row, "PackedBatch", "target_ids", _form(ids), f"{tuple(row)}")
        if last is not None:
            _require(
                last.ndim == 3 and last.shape[:2] == row,
                "PackedBatch",
                "verifier_last_hidden_packed",
                _form(last),
                f"[1, {row[1]}, D]",
            )

    def num_bytes(self) -> int:
        """Bytes of all tensors, for the queue's bound."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class StepMetrics:
    """Sums and counts of one or more micro-batches; they are added, and divided only when read.

    Attributes:
        loss_sum: sum over supervised slots of weight * loss (nats).
        weight_sum: sum of the weights w_k of supervised slots.
        slots_P: [P] float64, supervised slots by position in the block (slot 0 is the anchor).
        correct_target_P: [P] float64, slots whose argmax is the target's own next token.
        correct_data_P: [P] float64, slots whose argmax is the token in the data.
        run_correct_P: [P] float64, slots that are right and so are all earlier slots of their block.
        run_slots_P: [P] float64, supervised slots all of whose earlier slots are right (the conditional denominator).
        streak_sum: sum over blocks of the leading run of right slots, bonus token not counted.
        blocks: number of blocks with at least one supervised slot.
        tokens: row positions seen.
    """

    loss_sum: float
    weight_sum: float
    slots_P: Tensor
    correct_target_P: Tensor
    correct_data_P: Tensor
    run_correct_P: Tensor
    run_slots_P: Tensor
    streak_sum: float
    blocks: int
    tokens: int

    def __add__(self, other: StepMetrics) -> StepMetrics:
        return StepMetrics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @staticmethod
    def zero(block_size: int) -> StepMetrics:
        """The neutral element of addition."""
        nothing_AP = torch.zeros(0, block_size, dtype=torch.bool)
        return StepMetrics.of_blocks(
            correct_target_AP=nothing_AP,
            correct_data_AP=nothing_AP,
            supervised_AP=nothing_AP,
            loss_sum=0.0,
            weight_sum=0.0,
            tokens=0,
        )

    @staticmethod
    def of_blocks(
        *,
        correct_target_AP: Tensor,
        correct_data_AP: Tensor,
        supervised_AP: Tensor,
        loss_sum: float,
        weight_sum: float,
        tokens: int,
    ) -> StepMetrics:
        """Count the outcome of blocks: three [A, P] bool tables, of which only supervised slots matter."""
        right_AP = correct_target_AP & supervised_AP
        first = _first_predicting_slot(supervised_AP)
        run_AP = torch.zeros_like(right_AP)
        run_AP[:, first:] = right_AP[:, first:].cumprod(dim=1).bool()
        reached_AP = supervised_AP.clone()
        reached_AP[:, first + 1 :] &= run_AP[:, first:-1]
        return StepMetrics(
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            slots_P=_count(supervised_AP),
            correct_target_P=_count(right_AP),
            correct_data_P=_count(correct_data_AP & supervised_AP),
            run_correct_P=_count(run_AP),
            run_slots_P=_count(reached_AP),
            streak_sum=float(run_AP.sum().item()),
            blocks=int(supervised_AP.any(dim=1).sum().item()),
            tokens=tokens,
        )

    @staticmethod
    def total(parts: Iterable[StepMetrics], block_size: int) -> StepMetrics:
        """Sum of any number of parts, none included."""
        return sum(parts, StepMetrics.zero(block_size))

    @property
    def slots(self) -> int:
        """Supervised slots."""
        return int(self.slots_P.sum().item())

    @property
    def accuracy(self) -> float:
        """Share of supervised slots whose argmax is the target's own next token; NaN without slots."""
        return _ratio(self.correct_target_P.sum().item(), self.slots)

    @property
    def data_accuracy(self) -> float:
        """Share of supervised slots whose argmax is the token in the data; NaN without slots."""
        return _ratio(self.correct_data_P.sum().item(), self.slots)

    @property
    def streak(self) -> float:
        """Mean leading run of right slots over blocks at random anchors, bonus not counted; NaN without blocks."""
        return _ratio(self.streak_sum, self.blocks)

    @property
    def accuracy_by_position(self) -> list[float]:
        """Unconditional accuracy of each of the P slots, NaN where nothing was supervised (slot 0 by default)."""
        return _ratios(self.correct_target_P, self.slots_P)

    @property
    def conditional_accuracy_by_position(self) -> list[float]:
        """Accuracy of each slot given that all earlier slots of its block are right."""
        return _ratios(self.run_correct_P, self.run_slots_P)


def _first_predicting_slot(supervised_AP: Tensor) -> int:
    """0 if the anchor predicts too, else 1: supervised slots always begin at the first slot that predicts."""
    return 0 if supervised_AP[:, 0].any() else 1


def _count(table_AP: Tensor) -> Tensor:
    return table_AP.sum(dim=0).to(torch.float64).cpu()


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def _ratios(numerator_P: Tensor, denominator_P: Tensor) -> list[float]:
    return [_ratio(n, d) for n, d in zip(numerator_P.tolist(), denominator_P.tolist(), strict=True)]


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
