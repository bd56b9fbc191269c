"""How many threads a loop gets, and for whom a setting holds; the first signal asks, the second ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from draftline.engine.process import (
    available_cores,
    intra_op_threads,
    set_intra_op_threads,
    stop_on_signals,
    threads_per_loop,
)


@pytest.mark.parametrize(
    ("cores", "wanted", "expected"), [(1, None, 1), (2, None, 1), (16, None, 8), (16, 2, 2), (16, 100, 16), (2, 8, 2)]
)
def test_half_the_cores_for_every_loop_unless_fewer_are_wished_for(
    cores: int, wanted: int | None, expected: int
) -> None:
    """The number of target loops does not enter: runs with 1 and with 4 must give the same bits."""
    assert threads_per_loop(cores, wanted) == expected


def test_a_setting_holds_for_its_own_thread_and_for_its_block() -> None:
    """What `process` says about torch: each Python thread has its own number."""
    seen: dict[str, int] = {}
    ready, go_on = threading.Event(), threading.Event()

    def loop() -> None:
        set_intra_op_threads(3)
        ready.set()
        go_on.wait(timeout=10)
        seen["loop"] = torch.get_num_threads()

    before = torch.get_num_threads()
    thread = threading.Thread(target=loop)
    with intra_op_threads(2):
        thread.start()
        ready.wait(timeout=10)
        seen["main"] = torch.get_num_threads()
        with intra_op_threads(1):
            go_on.set()
            thread.join()
    assert seen == {"main": 2, "loop": 3}
    assert torch.get_num_threads() == before
    assert available_cores() >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_second_ends_at_once(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), number)
        assert stop_requested()
        assert "stopping after this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
