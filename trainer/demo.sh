#!/usr/bin/env bash
# Shows everything on a processor, in about eight minutes:
#   1. offloadd serves a store on two device files;
#   2. a byte-level Llama of 11 M parameters trains through it on this repository's text, parameters and optimizer on "nvme";
#   3. a second run with the same settings is killed with -9 in the middle of a step, trainer and daemon both, and started
#      again: its losses equal those of the run that was not killed.
#
#   trainer/demo.sh [RUN.toml]     default configs/demo.toml; DEMO_DIR (default target/demo) must be on a drive with O_DIRECT
set -euo pipefail
cd "$(dirname "$0")/.."

run=${1:-configs/demo.toml}
dir=$(realpath -m "${DEMO_DIR:-target/demo}")
bin=${BIN_DIR:-target/release}
compare_steps=12 kill_after=6

rm -rf "$dir"; mkdir -p "$dir"
socket=$(mktemp -d)/offloadd.sock # unix socket paths are short: 107 bytes
cat > "$dir/offloadd.toml" <<EOF
socket = "$socket"
devices = ["$dir/drive0.tiles", "$dir/drive1.tiles"]
arena_bytes_max = "512MiB"
EOF

daemon=
trap '[ -z "$daemon" ] || kill "$daemon" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$(dirname "$socket")"' EXIT

start_daemon() {
  "$bin/offloadd" serve --config "$dir/offloadd.toml" >> "$dir/offloadd.log" 2>&1 &
  daemon=$!
  for ((i = 0; i < 300; i++)); do
    [ -S "$socket" ] && return
    kill -0 "$daemon" 2>/dev/null || { cat "$dir/offloadd.log"; exit 1; }
    sleep 0.1
  done
  echo "offloadd did not start within 30 s; see $dir/offloadd.log"; exit 1
}
train=("$bin/trainer" train "$run" --set offload.socket="$socket" --set zero_optimization.offload_param.nvme_path="$dir"
  --set zero_optimization.offload_optimizer.nvme_path="$dir")
steps_done() { [ -f "$dir/killed/metrics.jsonl" ] && wc -l < "$dir/killed/metrics.jsonl" || echo 0; }

echo "== a store on two device files"
"$bin/offloadd" format --config "$dir/offloadd.toml" --size 1GiB
start_daemon

echo; echo "== training, parameters and optimizer on nvme"
"${train[@]}" --set train.run_dir="$dir/run"

echo; echo "== the same again, killed in the middle of a step"
"${train[@]}" --set train.run_dir="$dir/killed" --set train.stop_after=$compare_steps > "$dir/killed.log" 2>&1 &
trainer=$!
while [ "$(steps_done)" -lt $kill_after ]; do
  kill -0 $trainer 2>/dev/null || { cat "$dir/killed.log"; exit 1; }
  sleep 0.05
done
sleep 0.4 # into the next step
kill -9 $trainer "$daemon"; wait $trainer "$daemon" 2>/dev/null || true
rm -f "$socket"
echo "killed trainer and daemon with -9 after $(steps_done) steps; starting both again"
start_daemon
"${train[@]}" --set train.run_dir="$dir/killed" --set train.stop_after=$compare_steps

echo; echo "== losses of the two runs"
python3 - "$dir" $compare_steps <<'EOF'
import json, sys
directory, steps = sys.argv[1], int(sys.argv[2])
whole, killed = ([json.loads(line) for line in open(f"{directory}/{name}/metrics.jsonl")] for name in ("run", "killed"))
print("step   not killed           killed and resumed")
for a, b in zip(whole[:steps], killed, strict=True):
    print(f"{a['step']:4}   {a['loss']!r:20} {b['loss']!r:20} {'' if a['loss'] == b['loss'] else '  DIFFERENT'}")
assert [m["loss"] for m in whole[:steps]] == [m["loss"] for m in killed], "the resumed run differs"
last = [m["loss"] for m in whole[-10:]]
print(f"equal, bit for bit. Loss of the whole run: {whole[0]['loss']:.3f} to {sum(last) / len(last):.3f} (last ten of {len(whole)} steps), "
      f"{sum(m['step_s'] for m in whole):.0f} s")
if len(whole) >= 240:
    assert sum(last) / len(last) < 2.2, "it learned less than it should"
EOF
