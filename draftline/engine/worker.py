"""A process that works for another one: started clean, handed one object, asked for one answer after another.

The object (a job) is pickled, but for the parameters of its modules: these are moved into shared memory and mapped by
the worker, so that however many processes run a target, its weights are in memory once. On a CUDA device they stay
where they are and travel as handles.

A worker is not a copy of its parent at some moment: nobody's locks, threads or CUDA context come along. On a CPU it is
forked from a server that has imported what a target needs and done nothing else, which takes milliseconds where a new
interpreter takes seconds; with an accelerator it is a new interpreter.

A worker that is killed, or gives no answer for too long, is replaced, and asked again what it was asked: answers depend
on the question alone. That is said, and happens a few times in a row at most. A worker ends with its parent, whatever
kills that; Ctrl-C and SIGTERM are its parent's business, who needs its answers to finish a step.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.multiprocessing import get_context
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedTokenizerBase

from draftline.engine.process import set_intra_op_threads
from draftline.errors import ConfigError, PipelineError
from draftline.progress import say
from draftline.transfer.shared import Mapping, anonymous_memory, rounded

MOST_RESTARTS = 3
"""Times that a worker is replaced without having given an answer in between."""

STACKS_FILE = "stacks.txt"
"""In a run folder: where everything stood when a target loop hung."""

_STACK_SECONDS, _STACK_BYTES = 2.0, 1 << 20
"""How long a worker that hangs is waited for to say where, and the most that is kept of it."""


class _SharedWeights:
    """Parameters that were moved into shared memory, for as long as they live."""

    def __init__(self) -> None:
        self._end = 0
        self._offsets = WeakIdKeyDictionary()
        self._lock = threading.Lock()
        self.descriptor = -1

    def place(self, parameter: nn.Parameter) -> int:
        """Where a CPU parameter lies in the memory; it is moved there the first time, so that there is still one."""
        with self._lock:
            offset, address = self._offsets.get(parameter, (0, 0))
            if address == parameter.data_ptr():
                return offset
            if self.descriptor < 0:
                self.descriptor = anonymous_memory("weights")
            offset, size = self._end, rounded(parameter.numel() * parameter.element_size())
            self._end += size
            mapping = Mapping(self.descriptor, offset, size)
            held = mapping.array()
            weakref.finalize(held, mapping.drop_pages).atexit = False
            moved = _as_parameter(held, parameter.dtype, parameter.shape)
            parameter.data = moved.copy_(parameter.data)
            self._offsets[parameter] = (offset, parameter.data_ptr())
            return offset


_WEIGHTS = _SharedWeights()


def _as_parameter(array: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    used = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(array)[:used].view(dtype).view(tuple(shape))


class _Pickler(pickle.Pickler):
    """Leaves parameters where they are, and tokenizers behind: no worker reads text."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, PreTrainedTokenizerBase):
            return ("nothing",)
        if not isinstance(obj, nn.Parameter) or not obj.numel() or not obj.is_contiguous():
            return None
        if obj.device.type == "cuda":
            return ("handle", *reduce_tensor(obj.detach()))
        return ("shared", _WEIGHTS.place(obj), obj.dtype, tuple(obj.shape)) if obj.device.type == "cpu" else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, job: bytes, weights: int) -> None:
        super().__init__(io.BytesIO(job))
        self._weights = weights
        self._loaded: dict[Any, nn.Parameter] = {}

    def persistent_load(self, pid: Any) -> Any:
        kind, *rest = pid
        if kind == "nothing":
            return None
        if kind == "handle":
            rebuild, arguments = rest
            return nn.Parameter(rebuild(*arguments), requires_grad=False)
        offset, dtype, shape = rest
        if offset not in self._loaded:  # one that is tied to another is the same here too
            size = rounded(int(np.prod(shape)) * dtype.itemsize)
            array = Mapping(self._weights, offset, size).array()
            self._loaded[offset] = nn.Parameter(_as_parameter(array, dtype, shape), requires_grad=False)
        return self._loaded[offset]


def pickled(job: object) -> bytes:
    """A job as a worker gets it.

    Raises:
        ConfigError: a part of it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(job)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"the target cannot be handed to a process ({reason}): set pipeline.mode=threads") from error
    return buffer.getvalue()


class Stopped(Exception):
    """The worker was stopped by its owner."""


class _Lost(Exception):
    """The worker is gone, or gives no answer; the text says which, after its name."""


@dataclass(frozen=True)
class WorkerTerms:
    """What all workers of an engine have in common.

    Attributes:
        threads: intra-op threads of each.
        device_type: of what it runs on.
        patience: seconds without an answer after which a worker counts as hanging.
        report: folder for the stacks of one that hangs; none: nowhere.
        say: gets one line about each that is replaced.
    """

    threads: int
    device_type: str
    patience: float
    report: Path | None = None
    say: Callable[[str], None] = say


class Worker:
    """The parent's side of a worker. All but `stop` is called by one thread.

    Args:
        name: in messages, and as the operating system's tools see it.
        job: as `pickled` gives it.
        settings: see there.
    """

    def __init__(self, name: str, job: bytes, settings: WorkerTerms) -> None:
        self.name, self.restarts = name, 0
        self._job, self._settings = job, settings
        self._asked: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._stopped = False
        self._process: BaseProcess | None = None
        self._lock = threading.Lock()
        self._fruitless = 0

    @property
    def pid(self) -> int | None:
        """Of the process that works now."""
        return self._process.pid if self._process is not None else None

    def begin(self) -> None:
        """Start the process. It is ready when it gives its first answer."""
        context: Any = get_context("spawn" if self._settings.device_type == "cuda" else "forkserver")
        if self._settings.device_type != "cuda":
            models = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
            context.set_forkserver_preload(["draftline.engine.processes", *models])
        self._connection, there = context.Pipe()
        process = context.Process(target=_work, args=(there, self._settings.threads), name=self.name, daemon=True)
        with self._lock:
            if self._stopped:
                raise Stopped
            process.start()
            self._process = process
        there.close()
        self._stacks, self._channels = anonymous_memory("stacks"), self.channels()
        weights = _WEIGHTS.descriptor if _WEIGHTS.descriptor >= 0 else self._stacks
        with suppress(_Lost), self._gone():  # one that is gone already shows when its answer is waited for
            send_handle(self._connection, weights, process.pid)
            send_handle(self._connection, self._stacks, process.pid)
            self._connection.send_bytes(self._job)
            for descriptor in self._channels:
                send_handle(self._connection, descriptor, process.pid)

    def channels(self) -> tuple[int, ...]:
        """Descriptors that the job gets when it begins, closed when it ends; new ones for each process."""
        return ()

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the job without an answer."""
        with suppress(_Lost), self._gone():
            self._connection.send((method, arguments))

    def ask(self, method: str, *arguments: Any) -> None:
        """Call a method of the job; the answers come in the order of the questions."""
        self._asked.append((method, arguments))
        with suppress(_Lost), self._gone():  # what is lost shows when the answer is waited for
            self._connection.send((method, arguments))

    def answer(self) -> Any:
        """What the oldest question without an answer gave; waits for it, and replaces a worker that is lost.

        Raises:
            Stopped: `stop` was called.
            PipelineError: it was lost too often.
            Whatever the job raises.
        """
        while True:
            try:
                with self._gone():
                    kind, content = self._receive()
            except _Lost as error:
                self._replace(str(error))
                continue
            self._asked.popleft()
            self._fruitless = 0
            if kind == "failed":
                raise content
            return content

    def stop(self) -> None:
        """End the process; nothing of it is left. May be called from any thread, more than once."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is not None:
            process.kill()
            process.join()

    def close(self) -> None:
        """Let go of what a process that has ended was reached through; nobody asks or waits any more."""
        if self._process is not None:
            self._connection.close()
            for descriptor in (self._stacks, *self._channels):
                os.close(descriptor)
            self._process = None

    def _receive(self) -> Any:
        assert self._process is not None, "begin comes first"
        ready = wait([self._connection, self._process.sentinel], self._settings.patience)
        if self._connection in ready:
            return self._connection.recv()
        if ready:
            raise EOFError
        self._dump_stacks()
        raise _Lost(f"gave nothing for {self._settings.patience:g} seconds")

    def _gone(self) -> _Gone:
        return _Gone(self)

    def _how(self) -> str:
        """How the process ended, in words."""
        assert self._process is not None, "begin comes first"
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def _replace(self, how: str) -> None:
        assert self._process is not None, "begin comes first"
        said = f"{self.name} (process {self.pid}) {how}"
        self._process.kill()
        self._process.join()
        self.close()
        self._fruitless += 1
        if self._fruitless > MOST_RESTARTS:
            raise PipelineError(
                f"{said}, {self._fruitless} times in a row: see what killed it (out of memory? lower "
                "pipeline.target_loops or pipeline.target_batch_tokens), and continue with --resume"
            )
        self.restarts += 1
        self._settings.say(f"{said}: started again, what it had in hand is done again")
        self.begin()
        for method, arguments in self._asked:
            with suppress(_Lost), self._gone():
                self._connection.send((method, arguments))

    def _dump_stacks(self) -> None:
        """Write where every thread of both processes is into the run folder."""
        if self._settings.report is None or self.pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline, seen = time.monotonic() + _STACK_SECONDS, b""
        while time.monotonic() < deadline and not seen.endswith(b"\n"):
            time.sleep(0.05)
            seen = os.pread(self._stacks, _STACK_BYTES, 0)
        write_stacks(self._settings.report, f"{self.name} (process {self.pid})", seen)


class _Gone:
    """A block in which the process may be found gone: then `_Lost`, or `Stopped` if it was stopped."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._worker._stopped and isinstance(error, EOFError | OSError | _Lost):
            raise Stopped from error
        if isinstance(error, EOFError | OSError):
            raise _Lost(self._worker._how()) from error


def write_stacks(folder: Path, who: str, seen: bytes = b"") -> None:
    """Add to `STACKS_FILE` where all threads of this process are, and what another said of its own."""
    with (folder / STACKS_FILE).open("ab") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {who} hangs\n".encode())
        file.write(seen or b"(it does not say where)\n")
        file.write(b"\nthe process that waits for it\n")
        file.flush()
        faulthandler.dump_traceback(file)
        file.write(b"\n")


# In the worker.


def _work(connection: Connection, threads: int) -> None:
    """What a worker does from its first to its last moment."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        weights, stacks = recv_handle(connection), recv_handle(connection)
        faulthandler.register(signal.SIGUSR1, os.fdopen(stacks, "wb", buffering=0), all_threads=True)
        set_intra_op_threads(threads)
        received = connection.recv_bytes()
        job = _answer(_Unpickler(received, weights).load)
        if job[0] == "done":
            job[1].open(connection)
        while True:
            method, arguments = connection.recv()
            answer = _answer(getattr(job[1], method), *arguments) if job[0] == "done" else job
            if answer != ("done", None):
                connection.send(answer)
    except (EOFError, OSError):  # the parent has closed its end, or is gone
        return


def _answer(method: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        return "done", method(*arguments)
    except Exception as error:  # the border of the process: the parent raises it
        return "failed", _portable(error)


def _portable(error: Exception) -> Exception:
    """The error as it can be sent: itself where it survives that, else its name and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # errors of libraries may refuse in any way
        return PipelineError(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return error


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has one"
    wait([parent.sentinel])
    os._exit(1)
