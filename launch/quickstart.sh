#!/usr/bin/env bash
# From a fresh clone to a trained, validated model: no GPU, no download of data or weights.
# Makes .venv, demo images, shards, and trains with two ranks. A second call reuses what is there.
#
#   bash launch/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh
set_up requirements.txt
python=.venv/bin/python

$python -m common.demo_data demo/images
if [[ ! -e demo/shards/train/info.json || ! -e demo/shards/val/info.json ]]; then
    $python -m common.make_shards demo/images demo/shards --val_fraction 0.2 --samples_per_shard 100 -w 2
fi
output=runs/quickstart/$(date +%Y%m%d-%H%M%S)
$python -m torch.distributed.run --standalone --nproc_per_node=2 train_ddp.py \
    -s demo/shards/train --val_path demo/shards/val --sampling exact --arch tiny --image_size 64 \
    -b 32 -w 1 --n_epochs 12 -lr 0.003 --schedule cosine --warmup_epochs 1 --seed 0 --trace save --output "$output" "$@"

$python - "$output" <<'END'
import json, sys
output = sys.argv[1]
rows = [json.loads(line) for line in open(f"{output}/metrics.jsonl")]
print(f"\nvalidation top-1: {[row for row in rows if row['kind'] == 'val'][-1]['top1']:.1f} %   (a constant guess: 16.7 %)")
print(f"""files of the run: {output}

next:
  source .venv/bin/activate
  python -m common.trace {output} --plot trace.png         # proof of what was read
  python train_single.py -s demo/shards/train --val_path demo/shards/val --arch tiny --image_size 64 -lr 0.003
  tensorboard --logdir runs""")
END
