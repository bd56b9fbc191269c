"""Staging: the same rows in the same order, on CPU without a copy, on CUDA one row ahead."""

from __future__ import annotations

import pytest
import torch

from draftline.records import PackedBatch
from draftline.transfer.stage import DeviceStage, leave_device
from tests.transfer.rows import make_row


class ListSource:
    """Rows from a list; `get_nowait` finds one only at every second call, as with a slow target."""

    def __init__(self, rows: list[PackedBatch]) -> None:
        self._rows = rows
        self._asked = 0

    def get(self) -> PackedBatch | None:
        return self._rows.pop(0) if self._rows else None

    def get_nowait(self) -> PackedBatch | None:
        self._asked += 1
        return self.get() if self._asked % 2 else None


def test_on_cpu_rows_pass_through_without_a_copy() -> None:
    rows = [make_row(n) for n in range(3)]
    staged = list(DeviceStage(ListSource(list(rows)), torch.device("cpu")))
    for row, passed in zip(rows, staged, strict=True):
        assert passed.hidden_states_packed.data_ptr() == row.hidden_states_packed.data_ptr()
    assert leave_device(rows[0], torch.device("cpu")) is rows[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("start_on_gpu", [False, True])
def test_on_cuda_rows_arrive_whole_and_in_order(start_on_gpu: bool) -> None:
    device = torch.device("cuda", 0)
    rows = [make_row(n, tokens=1000 + n) for n in range(7)]
    if start_on_gpu:
        rows = list(DeviceStage(ListSource(rows), device))
        rows = [leave_device(row, torch.device("cpu")) for row in rows]
        assert all(row.hidden_states_packed.is_pinned() for row in rows)
    staged = list(DeviceStage(ListSource(list(rows)), device))
    assert [row.sequence_number for row in staged] == list(range(7))
    for number, row in enumerate(staged):
        assert all(tensor.device == device for tensor in row.tensors().values())
        assert (row.hidden_states_packed == number).all()
