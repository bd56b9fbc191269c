"""The records that cross the borders between the stages, in the order in which they are made.

    Sample -> CapturedSample -> PackedBatch        (-> StepMetrics, see draft/loss.py)

Each is frozen and checks its shapes once, when it is built, so that no stage has to check again.

Shape letters, used in names across the package:
    S  positions of a packed row       L  captured layers          D  hidden size
    A  anchors                         P  block size               Q  queries, A * P
    N  attention heads                 H  head dimension           V  vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor


def _expect(record: object, field: str, *sizes: int | str, dtype: torch.dtype | None = None) -> None:
    """Raise for a tensor of a record that has other sizes than these, where a name stands for any, or another dtype."""
    found: Tensor = getattr(record, field)
    fits = found.ndim == len(sizes) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(found.shape, sizes, strict=True)
    )
    if not fits or dtype not in (None, found.dtype):
        wanted = f"[{', '.join(map(str, sizes))}] {'' if dtype is None else _name(dtype)}".rstrip()
        raise ValueError(f"{type(record).__name__}.{field} is {_form(found)}, expected {wanted}")


def _expect_one(record: object, field: str, other: str) -> None:
    """Raise unless one of two fields is given, and not both."""
    if (getattr(record, field) is None) == (getattr(record, other) is None):
        name = f"{type(record).__name__}.{field}"
        raise ValueError(f"{name} is given together with or without {other}, expected exactly one of the two")


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {_name(tensor.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        _expect(self, "input_ids", "S", dtype=torch.int64)
        _expect(self, "loss_mask", *self.input_ids.shape, dtype=torch.bool)

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
        _expect(self, "hidden_states_packed", 1, "S", "L*D")
        _, length, width = self.hidden_states_packed.shape
        _expect(self, "verifier_last_hidden_packed", 1, length, "D")
        if width % self.verifier_last_hidden_packed.shape[2]:
            found = _form(self.verifier_last_hidden_packed)
            raise ValueError(
                f"HiddenStates.verifier_last_hidden_packed is {found}, expected [1, {length}, D] with D a divisor of "
                f"{width}"
            )


def taught_positions(loss_mask_S: Tensor) -> Tensor:
    """[S] bool of one document: where the next token is supervised, so that some slot may ask what the target says."""
    return torch.cat([loss_mask_S[1:], torch.zeros_like(loss_mask_S[:1])])


@dataclass(frozen=True)
class CapturedSample:
    """A sample with the target's states at each of its tokens.

    Attributes:
        sample: the tokens.
        hidden_states_SLD: [S, L*D], see `HiddenStates.hidden_states_packed`.
        target_ids_S: [S] int64, the target's own greedy next token at each of `taught_positions`, -1 elsewhere, if the
            target side computed it.
        verifier_last_hidden_SD: [S, D], the last decoder layer's output, if the drafter side is to compute it.
            Exactly one of the two is present.
    """

    sample: Sample
    hidden_states_SLD: Tensor
    target_ids_S: Tensor | None = None
    verifier_last_hidden_SD: Tensor | None = None

    def __post_init__(self) -> None:
        length = len(self.sample)
        _expect(self, "hidden_states_SLD", length, "L*D")
        _expect_one(self, "target_ids_S", "verifier_last_hidden_SD")
        if self.target_ids_S is not None:
            _expect(self, "target_ids_S", length, dtype=torch.int64)
        if self.verifier_last_hidden_SD is not None:
            _expect(self, "verifier_last_hidden_SD", length, "D")


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
        target_ids: [1, S] int64, -1 as above, or None; verifier_last_hidden_packed: [1, S, D] or None. Exactly one is
            given.
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
        _expect(self, "input_ids", 1, "S")
        row = self.input_ids.shape
        for name in ("loss_mask", "document_ids", "position_ids"):
            _expect(self, name, *row)
        _expect(self, "hidden_states_packed", *row, "L*D")
        _expect_one(self, "target_ids", "verifier_last_hidden_packed")
        if self.target_ids is not None:
            _expect(self, "target_ids", *row)
        if self.verifier_last_hidden_packed is not None:
            _expect(self, "verifier_last_hidden_packed", *row, "D")

    def num_bytes(self) -> int:
        """Bytes of all tensors, for the queue's bound."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by field name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}
