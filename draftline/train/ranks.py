"""What the processes of one run do together. One process alone is the case in which nothing is exchanged.

    rows        dealt in turn from the one order, see `data/sampler.py`
    gradient    summed over all ranks, then divided once by the global count, as over the rows of one process
    figures     sums and counts, summed over all ranks
    the rest    done by the first rank (audit, evaluation, files); the others take over what it found

Gradients are summed by a plain all-reduce behind the last row. The wrapper DDP divides by the number of ranks, which is
right only where all have the same count, and it waits for a backward of every rank, which one without a supervised slot
does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor, nn

from draftline.config import RunConfig, TrainConfig, flatten
from draftline.draft.loss import StepMetrics
from draftline.errors import ConfigError, UpdateError

T = TypeVar("T")

PLACES = (
    "data.path",
    "data.heldout_path",
    "target.name",
    "target.device",
    "target.chat_template",
    "train.device",
    "drafter.init_from",
    "pipeline.states_path",
    "pipeline.target_devices",
    "pipeline.threads_per_loop",
)
"""Settings that may differ between ranks: they say where something is on a machine, and what is there is compared."""


_LONGEST_VALUE = 30


class Ranks:
    """One process that trains alone; a subclass has the exchange.

    Attributes:
        rank: of this process, from 0; the first is the one that writes and says something.
        count: how many there are.
        sharded: each rank keeps a share of the drafter, so that all have to call it equally often; whoever shards it
            (FSDP) sums its gradients.
    """

    rank = 0
    count = 1
    sharded = False

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks: the same bits on each."""

    def first(self, work: Callable[[], T]) -> T:
        """What the first rank finds; the others wait for it, however long it takes, as long as it lives."""
        return work()

    def gather(self, value: T) -> list[T]:
        """What each rank has, by rank."""
        return [value]

    def share_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first rank."""

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and says something."""
        return self.rank == 0

    def numbers(self, number: float) -> list[float]:
        """What each rank gives, by rank; for every step."""
        numbers = torch.zeros(self.count, dtype=torch.float64)
        numbers[self.rank] = number
        self.sum_([numbers])
        return numbers.tolist()

    def any(self, wish: bool) -> bool:
        """Whether one of the ranks wants something; all hear the same."""
        return any(self.numbers(wish))

    def turns(self, rows: int) -> int:
        """How often the drafter is called in a step in which this rank has so many rows."""
        return int(max(self.numbers(rows))) if self.sharded else rows

    def sum_metrics(self, metrics: StepMetrics) -> StepMetrics:
        """Figures of all ranks."""
        if self.count == 1:
            return metrics
        values = [getattr(metrics, field.name) for field in fields(metrics)]
        parts = [torch.as_tensor(value, dtype=torch.float64).flatten() for value in values]
        flat = torch.cat(parts)
        self.sum_([flat])
        sums = flat.split([len(part) for part in parts])
        return StepMetrics(
            *(
                part if isinstance(value, Tensor) else type(value)(part.item())
                for part, value in zip(sums, values, strict=True)
            )
        )

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of all ranks; one whose rows have taught nothing adds zeros."""
        if self.count == 1 or self.sharded:
            return
        trained = list(parameters)
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.sum_([parameter.grad for parameter in trained if parameter.grad is not None])

    def check_settings(self, config: RunConfig, code: Mapping[str, str | None]) -> None:
        """Refuse ranks whose settings or code differ, and more ranks than a step has rows for; raises as `compare`."""
        if self.count == 1:
            return
        settings = flatten(config.model_dump(mode="json"))
        facts = {name: str(value) for name, value in settings.items() if name not in PLACES}
        self.compare({**facts, **{f"code {name}": str(value) for name, value in code.items()}})
        check_rows(config.train, self.count)

    def check_replicas(self, checksum: Callable[[], str]) -> None:
        """Raise an `UpdateError` if the ranks have not computed the same weights."""
        sums = [] if self.count == 1 or self.sharded else self.gather(checksum())
        unlike = [rank for rank, found in enumerate(sums) if found != sums[0]]
        if unlike:
            raise UpdateError(
                f"rank {unlike[0]} has computed other weights than rank 0: leave its device out, and continue from the "
                "last checkpoint with --resume"
            )

    def sentence(self, train: TrainConfig) -> str:
        """One line for people."""
        kept = "a share of it on each" if self.sharded else "a whole one on each"
        rows = train.rows_per_step / self.count
        return f"{self.count} ranks train one drafter ({kept}), {rows:g} of {train.rows_per_step} rows a step each"

    def compare(self, facts: Mapping[str, str]) -> None:
        """Refuse ranks that would not train one run.

        Args:
            facts: what has to be the same on all, in words, by name.

        Raises:
            ConfigError: on all ranks, naming the first that differs from rank 0, and in what.
        """
        wanted, *others = self.gather(dict(facts))
        for rank, found in enumerate(others, 1):
            for name in (*wanted, *found):
                ours, theirs = wanted.get(name, "nothing"), found.get(name, "nothing")
                if ours != theirs:
                    raise ConfigError(
                        f"rank {rank} has {name} {_short(theirs)}, rank 0 has {_short(ours)}: start all ranks with the "
                        "same command, code, target and data"
                    )


def check_rows(train: TrainConfig, ranks: int) -> None:
    """Raise a `ConfigError` for more ranks than a step has rows for."""
    rows = train.rows_per_step
    if rows < ranks:
        raise ConfigError(
            f"train.rows_per_step = {rows} leaves {ranks - rows} of {ranks} ranks without a row: set "
            f"train.rows_per_step={ranks} (of all ranks together), or start {rows} rank(s)"
        )


def _short(value: str) -> str:
    """A value in a line: of fingerprints the beginning is enough."""
    return value if len(value) <= _LONGEST_VALUE else f"{value[:12]}.."


ALONE = Ranks()
"""The one rank of a run without others."""
