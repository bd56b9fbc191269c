"""Which tokens a drafter with a reduced vocabulary can say: the most frequent ones of the answers it is trained on.

The head is often the drafter's largest matrix product. What is left out can never be drafted, so each left-out token
of an answer costs a rejected block: `coverage` bounds what the drafter can reach.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.errors import ConfigError, DataError
from draftline.records import Samples

_SAMPLES_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class ReducedVocabulary:
    """Tokens that a drafter can say.

    Attributes:
        kept_ids: [Vd] int64, increasing.
        coverage: share of the supervised tokens of the training data that are among them.
    """

    kept_ids: Tensor
    coverage: float

    def sentence(self) -> str:
        """One line for people."""
        return f"the drafter can say {len(self.kept_ids)} tokens, {self.coverage:.2%} of those in the training answers"


def count_supervised(samples: Samples, sample_ids: Sequence[int] | NDArray[np.int64], vocab_size: int) -> Tensor:
    """How often each token is supervised in some conversations, [V] int64; reads them once.

    Raises:
        DataError: a token is not a row of the target's table.
    """
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for start in range(0, len(sample_ids), _SAMPLES_AT_ONCE):
        group = [samples[int(sample_id)] for sample_id in sample_ids[start : start + _SAMPLES_AT_ONCE]]
        supervised = torch.cat([sample.input_ids[sample.loss_mask] for sample in group])
        if supervised.numel() and int(supervised.max()) >= vocab_size:
            raise DataError(
                f"the data has token {int(supervised.max())}, the target knows 0..{vocab_size - 1}: "
                "prepare the data with this target"
            )
        counts_V += torch.bincount(supervised, minlength=vocab_size)
    return counts_V


def reduce_vocabulary(counts_V: Tensor, size: int, always: Collection[int]) -> ReducedVocabulary:
    """The `size` most frequent tokens, the smaller id first where two are equally frequent, and those of `always`.

    Tokens that never occur fill up from id 0, as in speculators 0.9.

    Args:
        counts_V: how often each token occurs.
        always: kept whatever their count: an answer whose end cannot be drafted ends in a rejected block each time.

    Raises:
        ConfigError: `always` alone is more than `size`.
    """
    if len(always) > size:
        raise ConfigError(
            f"drafter.draft_vocab_size {size} is less than the {len(always)} tokens that end an answer: raise it"
        )
    rank_V = counts_V.clone()
    rank_V[torch.tensor(sorted(always), dtype=torch.int64)] = counts_V.sum() + 1
    kept_ids = rank_V.sort(descending=True, stable=True).indices[:size].sort().values
    return ReducedVocabulary(kept_ids, coverage_of(counts_V, kept_ids))


def coverage_of(counts_V: Tensor, kept_ids: Tensor) -> float:
    """Share of counted tokens that are among the kept ones; NaN where nothing was counted."""
    total = int(counts_V.sum())
    return int(counts_V[kept_ids].sum()) / total if total else float("nan")
