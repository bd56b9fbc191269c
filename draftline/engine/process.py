"""What a run sets in its process: how many intra-op threads each of its loops uses, and what signals do.

`torch.set_num_threads` sets the number for the Python thread that calls it, and the number with which threads that
have not used torch yet begin: at its first use of torch a thread takes the number that was set last, by whichever
thread. So every loop sets its own, after a first use; from then on a number set elsewhere does not move it.

More threads than cores is many times slower, not a little: OpenMP threads wait for each other by spinning, and on two
busy cores one thread per loop was ten times faster than two. Results of matrix products may differ in the last bit
between numbers of threads, so runs are comparable bit for bit where this number is the same; it is printed and saved.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from draftline.train.ranks import ALONE, Ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def available_cores() -> int:
    """Cores that this process may use, or fewer where the user has limited torch (OMP_NUM_THREADS)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, torch.get_num_threads())


def threads_per_loop(cores: int, wanted: int | None) -> int:
    """Intra-op threads of each target loop and of the drafter loop.

    Half the cores, one half for each side of the pipeline. The number of target loops does not enter, nor the mode, so
    that runs which differ in nothing else give the same bits. A wish beyond the cores is cut to what they carry.
    """
    return max(1, cores // 2) if wanted is None else min(wanted, cores)


def set_intra_op_threads(count: int) -> None:
    """Use a number of threads in this Python thread from now on."""
    torch.get_num_threads()  # a first use of torch: a later one would forget the number
    torch.set_num_threads(count)


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Use a number of threads in this Python thread for the time of a block."""
    before = torch.get_num_threads()
    set_intra_op_threads(count)
    try:
        yield
    finally:
        set_intra_op_threads(before)


@contextmanager
def stop_on_signals(ranks: Ranks = ALONE) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether a stop was asked for during the block, by Ctrl-C or SIGTERM.

    The first asks the run to stop after its step; a second one ends it at once. Ranks all stop after the same step, and
    hear a second one as the first: what started them sends it to the others as soon as one of them has ended.
    Only the main thread of a process can take signals; elsewhere it hears none.
    """
    asked = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if asked.is_set():
            if ranks.count == 1:
                raise KeyboardInterrupt
            return
        asked.set()
        if ranks.count == 1:
            print("stopping after this step; once more to stop at once", file=sys.stderr, flush=True)
        elif ranks.leads:
            print("stopping after this step", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: ranks.any(asked.is_set())
        return
    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield lambda: ranks.any(asked.is_set())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
