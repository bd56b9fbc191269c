"""The estimate against counting by hand, against tensors that are really there, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftline.config import PipelineConfig, RunConfig, TrainConfig, load_run_config
from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashDraftModel
from draftline.errors import ConfigError, StorageError
from draftline.plan import estimate as estimate_module
from draftline.plan.devices import accelerator
from draftline.plan.estimate import (
    Item,
    activation_bytes,
    check_disk,
    check_memory,
    duration,
    estimate_run,
    estimate_time,
    size,
)
from draftline.plan.sizes import TargetSizes
from draftline.plan.work import Conversations, Workload
from draftline.run import assemble
from draftline.targets.loop import TargetForwardLoop
from draftline.transfer.store import StatesStore, fill_store, loop_identity
from tests.engine.tiny_target import tiny_target
from tests.run.small_run import SETTINGS, small_data
from tests.train.tiny_drafter import tiny_config, tiny_drafter


def sizes() -> TargetSizes:
    return TargetSizes.of(tiny_target())


def test_bytes_are_those_counted_by_hand() -> None:
    config = RunConfig(
        train=TrainConfig(tokens_per_row=100, keep_last=2),
        pipeline=PipelineConfig(mode="threads", queue_bytes=12345),
    )
    parameters = sum(p.numel() for p in tiny_drafter().parameters())
    work = Workload.of_mean(25, 10, 0.5, config)
    estimate, target = estimate_run(config, tiny_config(), sizes(), work), sizes()
    named = {item.name: item.num_bytes for item in estimate.drafter}
    assert estimate.parameters == parameters
    assert named["weights"] == 4 * parameters
    assert named["moments of the optimiser"] == 8 * parameters
    assert estimate.wire_bytes == 2 * target.hidden * 4 + 8 + 3 * 8 + 1
    assert named["rows in hand"] == 100 * estimate.wire_bytes
    assert estimate.host_bytes == 12345
    assert estimate.disk_bytes == 4 * 12 * parameters
    assert "\n" not in estimate.sentence()
    muon = load_run_config(None, ["optim.name=muon"], config)
    fewer = estimate_run(muon, tiny_config(), sizes(), work)
    assert fewer.checkpoint_bytes < estimate.checkpoint_bytes


def test_states_on_disk_are_as_large_as_the_store(tmp_path: Path) -> None:
    config, data = load_run_config(None, SETTINGS), small_data()
    run = assemble(config, tiny_target(), data)
    samples = [
        replace(data.training[int(i)], sample_id=n) for n, i in enumerate([*data.training_ids, *data.heldout_ids])
    ]
    loop, lengths = TargetForwardLoop(run.target, run.shape.target_layer_ids), np.array([len(one) for one in samples])
    for kept in ("target", "bfloat16", "fp8"):
        narrow = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"states_dtype": kept})})
        estimate = estimate_run(narrow, run.shape, sizes(), Workload.of_data(data, narrow))
        identity = loop_identity(loop, "x", None if kept == "target" else kept)
        store = StatesStore(tmp_path / kept, identity, lengths, 1)
        fill_store(store, store.missing(), loop, samples)
        header = 1500
        stored = sum(f.stat().st_size - header for f in (tmp_path / kept).glob("shard-*"))
        assert estimate.capture_bytes == pytest.approx(stored, abs=500 * store.num_shards)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    ("documents", "length", "answer", "changes"),
    [
        (4, 128, 80, {}),
        (1, 300, 200, {"hidden_size": 96, "intermediate_size": 64}),
        (3, 90, 30, {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}),
    ],
)
def test_activations_are_what_autograd_keeps(
    documents: int, length: int, answer: int, changes: dict[str, int], low: bool
) -> None:
    """Against the storages of all tensors that a forward saves for its backward, weights and inputs left out."""
    wide = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "num_hidden_layers": 2, **changes}
    shape = tiny_config().model_copy(update={**wide, "layer_types": ("full_attention",) * wide["num_hidden_layers"]})
    model = DFlashDraftModel(shape)
    positions = torch.arange(length).repeat(documents)
    anchors = torch.cat([torch.arange(length - answer, length - 1) + n * length for n in range(documents)])
    layout = BlockLayout.of_row(anchors, positions, shape.block_size)
    width = shape.hidden_size
    states = torch.randn(1, len(positions), width * len(shape.target_layer_ids))
    slots = torch.randn(1, len(anchors) * shape.block_size, width)
    given = {t.untyped_storage().data_ptr() for t in (states, slots, *model.parameters())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=low):
        model(states, slots, layout)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    row = Conversations(np.full(documents, length), np.full(documents, answer))
    loss = 3 * len(anchors) * shape.block_size * width * 4
    assert activation_bytes(shape, row, 999, low) - loss == pytest.approx(found, rel=0.1)


def test_devices_of_their_own_make_halves_overlap() -> None:
    config = RunConfig(pipeline=PipelineConfig(mode="threads"))
    work, device = Workload.of_mean(100, 500, 0.5, config), accelerator("h100", 0.4)
    alone = estimate_time(config, tiny_config(), sizes(), work, device, devices=1)
    two = estimate_time(config, tiny_config(), sizes(), work, device, devices=2)
    assert alone.train_seconds == pytest.approx(
        alone.target_seconds + alone.drafter_seconds + alone.evaluation_seconds, rel=1e-9
    )
    longer = max(two.target_seconds, two.drafter_seconds)
    assert two.train_seconds == pytest.approx(longer + two.evaluation_seconds, rel=1e-9)
    half = estimate_time(config, tiny_config(), sizes(), work, accelerator("h100", 0.2), devices=1)
    assert half.target_seconds == pytest.approx(2 * alone.target_seconds)
    once = config.model_copy(update={"pipeline": PipelineConfig(states_path=Path("states"))})
    kept = estimate_time(once, tiny_config(), sizes(), work, device, devices=1)
    assert kept.target_seconds == kept.capture_seconds


def test_ranks_share_rows_and_what_fsdp_cuts() -> None:
    train = TrainConfig(rows_per_step=8)
    config = RunConfig(train=train)
    work, device = Workload.of_mean(100, 5000, 0.5, config), accelerator("h100", 0.4)
    one, four, three = (
        estimate_time(config, tiny_config(), sizes(), work, device, devices=1, ranks=ranks) for ranks in (1, 4, 3)
    )
    assert four.target_seconds == pytest.approx(one.target_seconds / 4)
    assert three.target_seconds == pytest.approx(one.target_seconds * 3 / 8)  # the longest share of eight rows
    assert four.evaluation_seconds == one.evaluation_seconds  # on one rank, while the others wait
    assert four.drafter_seconds > one.drafter_seconds / 4  # each rank makes the whole update
    whole, same = (estimate_run(config, tiny_config(), sizes(), work, ranks) for ranks in (1, 4))
    assert same.drafter_bytes == whole.drafter_bytes
    config = RunConfig(train=train.model_copy(update={"sharding": "fsdp"}))
    shared = {item.name: item.num_bytes for item in estimate_run(config, tiny_config(), sizes(), work, 4).drafter}
    kept = {item.name: item.num_bytes for item in whole.drafter}
    assert shared["moments of the optimiser"] == kept["moments of the optimiser"] // 4
    assert shared["weights"] == kept["weights"] + kept["weights"] // 4  # the share, and all of them for a row


def test_a_drafter_with_a_device_of_its_own_has_a_copy_of_table_and_head() -> None:
    config = RunConfig()
    together = estimate_run(config, tiny_config(), sizes(), Workload.of_mean(10, 9, 0.5, config))
    target = tiny_target()
    parts = (target.embedding, target.head.lm_head)
    copied = sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
    assert together.apart(sizes()).drafter_bytes - together.drafter_bytes == copied
    assert together.apart(sizes()).target_bytes == together.target_bytes


def test_what_cannot_fit_is_refused_with_what_lowers_it() -> None:
    items = (Item("weights", 10_000_000, "target.dtype"), Item("activations", 30_000_000, "train.num_anchors"))
    check_memory(items, 40_000_000, "cpu")
    with pytest.raises(ConfigError, match=r"40\.0 MB on cpu, which has 39\.0 MB.*activations.*train\.num_anchors"):
        check_memory(items, 39_000_000, "cpu")


def test_an_accelerator_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"--accelerator h1000: not in the table; give here, or one of .*h100"):
        accelerator("h1000", 0.4)


def test_a_disk_that_is_too_small_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = estimate_run(RunConfig(), tiny_config(), sizes(), Workload.of_mean(10, 9, 0.5, RunConfig()))
    check_disk(tmp_path / "not" / "yet" / "there", estimate)

    class Full:
        free = estimate.disk_bytes - 1

    monkeypatch.setattr(estimate_module.shutil, "disk_usage", lambda _path: Full)
    with pytest.raises(StorageError, match=r"lower train\.keep_last"):
        check_disk(tmp_path / "run", estimate)
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000001" / "x").write_text("1")  # what a run has written is its own
    check_disk(tmp_path / "run", estimate)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.00 kB"), (1234, "1.23 kB"), (96.2e6, "96.2 MB"), (1.1e9, "1.10 GB"), (38e12, "38.0 TB")]
)
def test_sizes_have_three_digits(count: float, text: str) -> None:
    assert size(count) == text


def test_durations() -> None:
    assert (duration(59.94), duration(3661)) == ("59.9 s", "1:01:01")
