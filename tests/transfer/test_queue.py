"""Order, bound, closing and failure of the queue, with real threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from draftline.errors import PipelineError
from draftline.transfer.queue import HiddenStatesQueue
from tests.transfer.rows import make_row

ROW_BYTES = make_row(0).num_bytes()


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(timeout=10)
    assert not thread.is_alive()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("producers", [1, 2, 4])
@pytest.mark.parametrize("max_bytes", [1, ROW_BYTES, 3 * ROW_BYTES, 1 << 30])
def test_rows_leave_in_order_whoever_made_them_and_within_the_bound(producers: int, max_bytes: int) -> None:
    queue, count = HiddenStatesQueue(max_bytes, first=5), 60
    numbers, lock = iter(range(5, 5 + count)), threading.Lock()
    delays = random.Random(producers)

    def produce() -> None:
        while True:
            with lock:
                number, delay = next(numbers, None), delays.random() * 0.002
            if number is None:
                return
            time.sleep(delay)
            assert queue.put(make_row(number))

    threads = [start(produce) for _ in range(producers)]
    seen, most = [], 0
    for _ in range(count):
        most = max(most, queue.statistics().num_bytes)
        row = queue.get()
        assert row is not None
        seen.append(row.sequence_number)
    for thread in threads:
        join(thread)
    assert seen == list(range(5, 5 + count))
    assert most <= max_bytes + ROW_BYTES
    assert queue.statistics().num_bytes == 0


def test_the_next_row_passes_a_queue_that_is_full_of_later_rows() -> None:
    queue = HiddenStatesQueue(2 * ROW_BYTES)
    assert queue.put(make_row(1))
    assert queue.put(make_row(2))
    late = start(lambda: queue.put(make_row(3)))
    time.sleep(0.05)
    assert queue.statistics().rows == 2, "row 3 must wait for room"
    assert queue.put(make_row(0)), "row 0 is what the consumer waits for"
    assert [row.sequence_number for _ in range(4) if (row := queue.get())] == [0, 1, 2, 3]
    join(late)


def test_a_row_larger_than_the_bound_passes_alone() -> None:
    queue = HiddenStatesQueue(max_bytes=ROW_BYTES)
    assert queue.put(make_row(0, tokens=100))
    blocked = start(lambda: queue.put(make_row(1)))
    time.sleep(0.05)
    assert queue.statistics().rows == 1
    assert queue.get() is not None
    join(blocked)
    assert queue.statistics().rows == 1


def test_close_releases_a_blocked_producer_and_lets_the_consumer_empty_the_queue() -> None:
    queue, taken = HiddenStatesQueue(max_bytes=1), []
    queue.put(make_row(0))
    blocked = start(lambda: taken.append(queue.put(make_row(1))))
    wait_for(lambda: queue.statistics().rows == 1)
    queue.close()
    join(blocked)
    assert taken == [False]
    first = queue.get()
    assert first is not None
    assert first.sequence_number == 0
    assert queue.get() is None


def test_close_releases_a_waiting_consumer() -> None:
    queue, got = HiddenStatesQueue(max_bytes=1), []
    waiting = start(lambda: got.append(queue.get()))
    time.sleep(0.02)
    queue.close()
    join(waiting)
    assert got == [None]


def test_a_gap_in_a_closed_queue_is_an_error_and_not_the_end() -> None:
    queue = HiddenStatesQueue(max_bytes=1 << 20)
    queue.put(make_row(1))
    queue.close()
    with pytest.raises(PipelineError, match="row 0 never came"):
        queue.get()


def test_a_failure_wakes_both_sides_at_once_with_its_cause() -> None:
    cause = OSError("the target\nis gone")
    for side in ("get", "put"):
        queue, caught = HiddenStatesQueue(max_bytes=1), []

        def work(queue: HiddenStatesQueue = queue, caught: list[PipelineError] = caught, side: str = side) -> None:
            try:
                if side == "put":
                    queue.put(make_row(1))
                    queue.put(make_row(2))
                else:
                    queue.get()
            except PipelineError as error:
                caught.append(error)

        thread = start(work)
        time.sleep(0.02)
        queue.fail(cause)
        queue.fail(ValueError("a consequence"))
        join(thread)
        assert caught[0].__cause__ is cause
        assert "OSError: the target" in str(caught[0])
        assert "\n" not in str(caught[0])


def test_a_failure_overtakes_rows_that_are_already_there() -> None:
    queue = HiddenStatesQueue(max_bytes=1 << 20)
    queue.put(make_row(0))
    queue.fail(RuntimeError("x"))
    with pytest.raises(PipelineError):
        queue.get()
    with pytest.raises(PipelineError):
        queue.get_nowait()


def test_get_nowait_never_waits_and_keeps_the_order() -> None:
    queue = HiddenStatesQueue(max_bytes=1 << 20)
    assert queue.get_nowait() is None
    queue.put(make_row(1))
    assert queue.get_nowait() is None
    queue.put(make_row(0))
    assert [row.sequence_number for _ in range(2) if (row := queue.get_nowait())] == [0, 1]


def test_a_row_handed_over_twice_is_refused() -> None:
    queue = HiddenStatesQueue(max_bytes=1 << 20)
    queue.put(make_row(0))
    with pytest.raises(ValueError, match="row 0"):
        queue.put(make_row(0))
    queue.get()
    with pytest.raises(ValueError, match="row 0"):
        queue.put(make_row(0))


def test_waiting_is_counted_on_the_side_that_waited() -> None:
    queue = HiddenStatesQueue(max_bytes=1 << 20)
    late = start(lambda: (time.sleep(0.1), queue.put(make_row(0))))
    queue.get()
    join(late)
    statistics = queue.statistics()
    assert statistics.get_wait_seconds > 0.05
    assert statistics.put_wait_seconds < 0.05


def test_waiting_costs_no_processor_time() -> None:
    queue = HiddenStatesQueue(max_bytes=1)
    start(lambda: (time.sleep(0.5), queue.close()))
    before = time.process_time()
    queue.get()
    assert time.process_time() - before < 0.2
