"""Target loops in threads of their own, the drafter loop in the main thread, a bounded queue between them.

    target loop 1..N: take the next plan -> capture -> pack -> off the device -> queue.put
    drafter loop:     queue.get -> stage -> step

Plans are handed out in order and rows are consumed in order, so the weights do not depend on N or on who is fast.
PyTorch leaves the interpreter lock during its kernels; that is what the stages overlap in.

Each loop has its own copy of the target's modules (hooks of two threads on one module would mix their states); copies
on one device share the weights. However the run ends, every thread has been joined when the engine is left.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from draftline.config import TargetConfig
from draftline.data.sampler import RowPlan
from draftline.engine.process import set_intra_op_threads
from draftline.engine.worker import STACKS_FILE, WorkerTerms, write_stacks
from draftline.records import PackedBatch, Samples
from draftline.targets.model import Target, build_target, load_target, resolve_device
from draftline.transfer.pack import CaptureLoop, make_row
from draftline.transfer.queue import HiddenStatesQueue
from draftline.transfer.stage import PipelineStatistics, leave_device


class ThreadsEngine:
    """Runs one thread per target loop while the block it is the context manager of runs.

    Args:
        loops: target loops, none of which shares a module with another or with the drafter's side.
        samples: training data; read from all threads.
        plans: rows to make, in order of their sequence numbers.
        first_row: sequence number of the first of them.
        queue_bytes: most bytes of rows that wait.
        destination: the drafter's device.
        worker: threads of each loop (see `process`), and what is done about one that hangs.
    """

    def __init__(
        self,
        *,
        loops: Sequence[CaptureLoop],
        samples: Samples,
        plans: Iterator[RowPlan],
        first_row: int,
        queue_bytes: int,
        destination: torch.device,
        worker: WorkerTerms,
    ) -> None:
        self._samples = samples
        self._plans = plans
        self._loops = loops
        self._queue_bytes = queue_bytes
        self._destination = destination
        self._settings = worker
        self._queue = HiddenStatesQueue(queue_bytes, first_row, worker.patience, self._say_late)
        self._lock = threading.Lock()
        self._running = len(loops)
        self._tokens = 0
        self._busy_seconds = 0.0
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=f"target-loop-{number}", daemon=True)
            for number, loop in enumerate(loops)
        ]

    def __enter__(self) -> ThreadsEngine:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the loops after the row each has in hand, and wait for them."""
        self._queue.close()
        for thread in self._threads:
            thread.join()

    def get(self) -> PackedBatch | None:
        """The next row in order; waits for it. None at the end.

        Raises:
            PipelineError: a target loop failed; its exception is the cause.
        """
        return self._queue.get()

    def _say_late(self) -> None:
        """No row came for too long: a thread cannot be replaced, but it can be seen where it stands."""
        said = f"no row for {self._settings.patience:g} seconds, still waiting"
        if self._settings.report is not None:
            write_stacks(self._settings.report, "a target loop", b"(it is a thread of this process)\n")
            said += f"; where all threads stand: {self._settings.report / STACKS_FILE}"
        self._settings.say(said)

    def get_nowait(self) -> PackedBatch | None:
        """The next row if it is already here.

        Raises:
            PipelineError: a target loop failed; its exception is the cause.
        """
        return self._queue.get_nowait()

    def statistics(self) -> PipelineStatistics:
        """A snapshot; may be taken from any thread."""
        queue = self._queue.statistics()
        with self._lock:
            return PipelineStatistics(
                target_loops=len(self._threads),
                target_tokens=self._tokens,
                target_busy_seconds=self._busy_seconds,
                target_wait_seconds=queue.put_wait_seconds,
                drafter_wait_seconds=queue.get_wait_seconds,
                queue_rows=queue.rows,
                queue_bytes=queue.num_bytes,
            )

    def _run(self, loop: CaptureLoop) -> None:
        """Body of one thread."""
        set_intra_op_threads(self._settings.threads)
        try:
            self._make_rows(loop)
        except BaseException as error:  # the border of the thread: the main thread raises it
            self._queue.fail(error)
        self._leave()

    def _make_rows(self, loop: CaptureLoop) -> None:
        """Make rows until there are no more plans, or nobody wants rows."""
        while (plan := self._next_plan()) is not None:
            start = time.perf_counter()
            batch = leave_device(make_row(plan, self._samples, loop), self._destination)
            self._count(batch, time.perf_counter() - start)
            if not self._queue.put(batch):
                return

    def _count(self, batch: PackedBatch, seconds: float) -> None:
        with self._lock:
            self._busy_seconds += seconds
            self._tokens += batch.input_ids.numel()

    def _next_plan(self) -> RowPlan | None:
        with self._lock:
            return next(self._plans, None)

    def _leave(self) -> None:
        """The last loop that ends tells the consumer that no more rows come."""
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._queue.close()


def share_weights(target: Target) -> Target:
    """A second target on the same device whose modules are new and whose parameters are the same memory.

    Buffers are copied: some rotary embeddings rewrite theirs during a forward. Costs no weights, only modules.
    """
    parameters: dict[int, object] = {id(parameter): parameter for parameter in target.model.parameters()}
    model = copy.deepcopy(target.model, parameters)
    return build_target(target.name, model, target.tokenizer)


def loop_targets(target: Target, config: TargetConfig, devices: Sequence[str]) -> list[Target]:
    """One target per device named, no two of which (nor `target` itself) share a module.

    Args:
        target: already loaded; serves the loops on its own device.
        config: how to load it on other devices, once for each.

    Raises:
        TargetError: a device cannot be used, or the target does not fit on it.
    """
    loaded = {target.device: target}
    for name in devices:
        device = resolve_device(name)
        if device not in loaded:
            loaded[device] = load_target(config.model_copy(update={"device": name}))
    return [share_weights(loaded[resolve_device(name)]) for name in devices]
