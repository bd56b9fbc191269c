"""Precision is a setting: products in bfloat16 on a CPU too, weights and labels as they are in float32."""

from __future__ import annotations

import pytest
import torch

from draftline.config import load_run_config
from draftline.run import Run, assemble
from tests.engine.tiny_target import tiny_target
from tests.run.small_run import SETTINGS, small_data


def small(*words: str) -> Run:
    return assemble(load_run_config(None, [*SETTINGS, *words]), tiny_target(), small_data(words=words))


@pytest.mark.parametrize(("words", "dtype"), [((), torch.float32), (("train.precision=bfloat16",), torch.bfloat16)])
def test_products_are_in_the_precision_that_is_set(words: tuple[str, ...], dtype: torch.dtype) -> None:
    run, seen = small(*words), list[torch.dtype]()
    run.drafter.model.fc.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    with run.engine(0) as engine:
        batch = engine.get()
        assert batch is not None
        run.drafter.step([batch])
    assert seen == [dtype]
    assert {p.dtype for p in run.drafter.model.parameters()} == {torch.float32}
    moments = {v.dtype for state in run.drafter.optimizer.state.values() for v in state.values()}
    assert moments == {torch.float32}


def test_labels_do_not_depend_on_what_is_sent() -> None:
    """In the drafter's autocast the head would say other tokens where two logits are close."""
    counts = []
    for send in ("target_ids", "last_hidden"):
        run = small("train.precision=bfloat16", f"pipeline.send={send}", "train.num_anchors=40")
        with run.engine(0) as engine:
            batches = [engine.get() for _ in range(8)]
        metrics = [run.drafter.measure(batch) for batch in batches if batch is not None]
        counts.append([(m.loss_sum, m.correct_target_P.tolist()) for m in metrics])
    assert counts[0] == counts[1]
