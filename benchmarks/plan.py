"""What `draftline plan` says against what really happens: memory by half, disk and time, side by side.

    python -m benchmarks.plan [--target tiny] [--recipe quickstart] --data DATA [section.key=value ..]

Time is that of the processor, because other work on the machine does not change it; it is measured before and after
the run that it is compared with. Memory is the peak of the process above what it had before the target was loaded, on
Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import tempfile
import time
from pathlib import Path

from draftline.audit.life import drawn_data
from draftline.config import RunConfig, find_recipe, load_run_config
from draftline.data.dataset import open_data
from draftline.data.split import choose_conversations
from draftline.engine.process import intra_op_threads
from draftline.plan.devices import measure_here
from draftline.plan.estimate import estimate_run, estimate_time
from draftline.plan.sizes import TargetSizes, described_target
from draftline.plan.work import Workload
from draftline.run import assemble, train
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import load_target

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory(name: str) -> int:
    """A line of this process' status, in bytes: VmRSS now, VmHWM at most."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin again."""
    CLEAR.write_text("5")


def planned(config: RunConfig, work: Workload) -> tuple[dict[str, float], dict[str, float]]:
    """Memory and disk in bytes, and processor seconds."""
    described = described_target(config.target)
    shape = resolve_drafter_config(described, config.drafter, None)
    sizes = TargetSizes.of(described, itemsize=4)
    device = measure_here(config, described, shape, work, threads=1, clock=time.process_time)
    estimate, taken = estimate_run(config, shape, sizes, work), estimate_time(config, shape, sizes, work, device, 1)
    memory_of = {"target": estimate.target_bytes, "drafter": estimate.drafter_bytes, "states": estimate.capture_bytes}
    seconds = {"capture": taken.capture_seconds, "train": taken.train_seconds}
    return {**memory_of, "checkpoint": estimate.checkpoint_bytes}, seconds


def warm_up(config: RunConfig) -> None:
    """Let libraries take what they keep: a run of one step on a few drawn conversations."""
    words = ["train.max_steps=1", "train.num_anchors=1", f"target.name={json.dumps(config.target.name)}"]
    small = load_run_config(None, words, config)
    target = load_target(small.target)
    with tempfile.TemporaryDirectory() as folder:
        train(assemble(small, target, drawn_data(target, None)), Path(folder) / "run")
    del target
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was given back is not to be found free by the run that is measured


def main() -> None:
    """Print planned, measured and their ratio as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    words = [f"target.name={args.target}", f"data.path={args.data}", "pipeline.mode=inline", *args.settings]
    config = load_run_config(None, words, find_recipe(args.recipe))
    data = choose_conversations(config, *open_data(config))
    work = Workload.of_data(data, config)
    sizes, first = planned(config, work)
    measured: dict[str, float] = {}
    warm_up(config)
    before = memory("VmRSS")
    target = load_target(config.target)
    forget_peak()
    run = assemble(config, target, data)
    with intra_op_threads(1), tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        for conversations, ids in ((data.training, data.training_ids), (data.heldout, data.heldout_ids)):
            loop = run.capture_loop()
            for number in range(0, len(ids), 32):
                loop.capture([conversations[int(i)] for i in ids[number : number + 32]])
        measured["capture"] = time.process_time() - start
        start = time.process_time()
        train(run, Path(folder) / "run")
        measured["train"] = time.process_time() - start
        checkpoint = Path(folder) / "run" / "last"
        measured["checkpoint"] = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    measured["both halves"] = memory("VmHWM") - before
    second = planned(config, work)[1]
    said = {name: (value + second[name]) / 2 for name, value in first.items()}
    said |= {"checkpoint": sizes["checkpoint"], "both halves": sizes["target"] + sizes["drafter"]}
    ratios = {name: round(said[name] / value, 3) for name, value in measured.items()}
    spread = {name: round(second[name] / value, 3) for name, value in first.items()}
    print(
        json.dumps({"planned": said, "measured": measured, "ratio": ratios, "second plan to first": spread}, indent=2)
    )


if __name__ == "__main__":
    main()
