#!/usr/bin/env bash
# What only a CUDA machine can show: GPU tests, a run of each mode, flex against grouped attention. About five minutes.
#   scripts/gpu_check.sh [OUT]        needs an environment with a CUDA torch and this package (`pip install -e '.[dev]'`)
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-gpu-check}"
python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device: nothing to check here"; print(torch.cuda.get_device_name())'
python -m pytest -m gpu
draftline prepare --target tiny --data draftline/assets/tiny/prompts.jsonl --regenerate --max-new-tokens 160 \
  --batch-size 128 --heldout 40 --out "$out/data"
for words in "pipeline.mode=inline train.attention=grouped" \
  "pipeline.mode=inline train.attention=flex" \
  "pipeline.mode=threads train.attention=flex pipeline.send=last_hidden"; do
  name="${words//[^a-z]/-}"
  # shellcheck disable=SC2086  # the words are separate settings
  draftline train --recipe quickstart --target tiny --data "$out/data" --out "$out/$name" train.max_steps=200 $words
  tail -n 1 "$out/$name/metrics.jsonl"
done
draftline export "$out/$name" --target tiny --dtype float32 --out "$out/drafter"
draftline evaluate --target tiny --draft "$out/drafter" --prompts "$out/data/heldout/prompts.jsonl" --json "$out/evaluate.json"
