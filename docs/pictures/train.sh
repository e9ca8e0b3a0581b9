#!/usr/bin/env bash
# Draws `trainer train` that resumes a run: trains a small model on the documents of this repository, kills trainer and daemon,
# and records the next start. About two minutes on two cores.
#
#   docs/pictures/train.sh > docs/pictures/train.svg      programs from BIN_DIR (default target/release)
set -euo pipefail
cd "$(dirname "$0")/../.."

PATH=$(realpath "${BIN_DIR:-target/release}"):$PATH
draw=$(realpath docs/pictures/terminal.py)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/drive" "$dir/text"
cp docs/*.md "$dir/text"
cd "$dir"
cat > run.toml <<'TOML'
train_micro_batch_size_per_gpu = 4
bf16.enabled = false
optimizer.params.lr = 1e-3
scheduler = { type = "cosine", params = { warmup_ratio = 0.1 } }
zero_optimization.offload_param = { device = "nvme", nvme_path = "drive" }
zero_optimization.offload_optimizer = { device = "nvme", nvme_path = "drive" }
model = { hidden_size = 256, intermediate_size = 512, num_hidden_layers = 4, num_attention_heads = 4 }
data = { files = ["text"], validation_fraction = 0.05 }
train = { steps = 120, seq_len = 128, eval_every = 60, log_every = 20, checkpoint_every = 60, run_dir = "runs/docs" }
TOML
trainer train run.toml > first.log 2>&1 &
until [ "$(grep -c . runs/docs/metrics.jsonl 2>/dev/null)" -ge 50 ] 2>/dev/null; do
  kill -0 $! || { cat first.log >&2; exit 1; }
  sleep 0.1
done
kill -9 $!
wait $! 2>/dev/null || true
script -qec "trainer train run.toml" /dev/null | sed "s#$dir/##g" | "$draw" --from model '$ trainer train run.toml'
