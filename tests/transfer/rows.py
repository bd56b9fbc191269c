"""Small packed rows for tests of whatever carries them."""

from __future__ import annotations

import torch

from draftline.records import PackedBatch


def make_row(sequence_number: int, tokens: int = 4, width: int = 3) -> PackedBatch:
    """A row whose states hold its sequence number."""
    return PackedBatch(
        sequence_number=sequence_number,
        step=sequence_number,
        last_of_step=True,
        epoch=0,
        sample_ids=(sequence_number,),
        input_ids=torch.arange(tokens)[None],
        loss_mask=torch.ones(1, tokens, dtype=torch.bool),
        document_ids=torch.zeros(1, tokens, dtype=torch.int64),
        position_ids=torch.arange(tokens)[None],
        hidden_states_packed=torch.full((1, tokens, width), float(sequence_number)),
        target_ids=torch.arange(tokens)[None],
    )
