"""Both engines give the same rows, and neither leaves a thread behind, however it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from draftline.data.sampler import RowPlan, Sampler
from draftline.engine.inline import InlineEngine
from draftline.engine.process import intra_op_threads
from draftline.engine.threads import ThreadsEngine, share_weights
from draftline.engine.worker import WorkerTerms
from draftline.errors import PipelineError
from draftline.records import PackedBatch
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target
from draftline.transfer.pack import CaptureLoop
from draftline.transfer.stage import DeviceStage, RowSource
from tests.engine.tiny_target import TARGET_LAYER_IDS, FailingLoop, SlowLoop, tiny_samples, tiny_target

SAMPLES = tiny_samples(12)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def plans(first: int = 0) -> Iterator[RowPlan]:
    sampler = Sampler(
        sample_ids=list(range(len(SAMPLES))),
        lengths=[len(sample) for sample in SAMPLES],
        tokens_per_row=40,
        rows_per_step=2,
        epochs=3,
        max_steps=None,
        seed=3,
    )
    return sampler.plans(first)


def capture_loop(target: Target) -> TargetForwardLoop:
    return TargetForwardLoop(target, TARGET_LAYER_IDS)


def threads_engine(loops: Sequence[CaptureLoop], first: int = 0, queue_bytes: int = 20_000) -> ThreadsEngine:
    return ThreadsEngine(
        loops=loops,
        samples=SAMPLES,
        plans=plans(first),
        first_row=first,
        queue_bytes=queue_bytes,
        destination=torch.device("cpu"),
        worker=WorkerTerms(threads=1, device_type="cpu", patience=60.0),
    )


def rows_of(source: RowSource) -> list[PackedBatch]:
    return list(DeviceStage(source, torch.device("cpu")))


def assert_same_rows(left: list[PackedBatch], right: list[PackedBatch]) -> None:
    assert [row.sequence_number for row in left] == [row.sequence_number for row in right]
    for one, other in zip(left, right, strict=True):
        assert one.sample_ids == other.sample_ids
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), (one.sequence_number, name)


def target_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("target-loop")]


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("delays", [[[0.0]], [[0.0], [0.01]], [[0.02, 0.0, 0.0], [0.0], [0.0, 0.01], [0.005]]])
def test_threads_give_the_rows_of_inline_bit_for_bit(target: Target, delays: list[list[float]], first: int) -> None:
    with intra_op_threads(1):
        inline = rows_of(InlineEngine(loop=capture_loop(target), samples=SAMPLES, plans=plans(first)))
    loops = [SlowLoop(capture_loop(share_weights(target)), delay) for delay in delays]
    with threads_engine(loops, first) as engine:
        threaded = rows_of(engine)
        statistics = engine.statistics()
    assert_same_rows(inline, threaded)
    assert statistics.target_tokens == sum(row.input_ids.numel() for row in inline)
    assert statistics.target_loops == len(delays)
    assert not target_threads()


@pytest.mark.parametrize("loops", [1, 3])
def test_a_failing_loop_reaches_the_consumer_with_its_cause(target: Target, loops: int) -> None:
    cause = RuntimeError("the device fell off the bus")
    good = [SlowLoop(capture_loop(share_weights(target)), [0.005]) for _ in range(loops - 1)]
    failing = FailingLoop(capture_loop(share_weights(target)), 2, cause)
    with pytest.raises(PipelineError, match="fell off the bus") as caught, threads_engine([*good, failing]) as engine:
        rows_of(engine)
    assert caught.value.__cause__ is cause
    assert not target_threads()


def test_leaving_early_stops_blocked_loops(target: Target) -> None:
    """The queue holds one row, so all loops but one wait for room when the consumer goes."""
    loops = [capture_loop(share_weights(target)) for _ in range(3)]
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError), threads_engine(loops, queue_bytes=1) as engine:
        assert 1 / (engine.get() is None), "a row came, and the drafter breaks"
    assert not target_threads()
    assert time.monotonic() - start < 10


def test_waiting_for_the_target_is_the_drafters(target: Target) -> None:
    with threads_engine([SlowLoop(capture_loop(share_weights(target)), [0.05])]) as engine:
        rows = rows_of(engine)
        assert engine.statistics().drafter_wait_seconds > 0.5 * 0.05 * len(rows)
        assert engine.statistics().target_wait_seconds < 0.05


def test_waiting_for_room_is_the_targets(target: Target) -> None:
    first_three = sum(len(SAMPLES[sample_id]) for plan in islice(plans(0), 3) for sample_id in plan.sample_ids)
    with threads_engine([capture_loop(share_weights(target))], queue_bytes=1) as engine:
        engine.get()
        while engine.statistics().target_tokens < first_three:
            time.sleep(0.01)
        time.sleep(0.5)  # one row waits in the queue, and the loop holds another, for which there is no room
        engine.get()
        engine.get()
        assert engine.statistics().target_wait_seconds > 0.1


def test_replicas_share_weights_but_no_module(target: Target) -> None:
    replica = share_weights(target)
    pairs = list(zip(target.model.parameters(), replica.model.parameters(), strict=True))
    assert all(left.data_ptr() == right.data_ptr() for left, right in pairs)
    assert not set(map(id, target.model.modules())) & set(map(id, replica.model.modules()))


def test_a_loop_that_gives_no_row_for_long_is_shown_where_it_stands(target: Target, tmp_path: Path) -> None:
    said = list[str]()
    loop = SlowLoop(capture_loop(share_weights(target)), [0.0] * 5 + [1.5] + [0.0] * 99)
    terms = WorkerTerms(threads=1, device_type="cpu", patience=0.5, report=tmp_path, say=said.append)
    with ThreadsEngine(
        loops=[loop],
        samples=SAMPLES,
        plans=plans(),
        first_row=0,
        queue_bytes=20_000,
        destination=torch.device("cpu"),
        worker=terms,
    ) as engine:
        assert len(rows_of(engine)) > 20
    assert said
    assert all("no row for 0.5 seconds, still waiting" in line for line in said)
    assert "in capture" in (tmp_path / "stacks.txt").read_text()
