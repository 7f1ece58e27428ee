#!/usr/bin/env bash
# Sets up, trains SmolLM2-135M-Instruct by GRPO on this machine's CPU, and shows the result. Safe to run again: each
# run has a folder of its own under runs/.
#
#   bash env/demo.sh [-o KEY=VALUE ...]     values of jobs/experiments/last-number.toml for this run
set -euo pipefail
cd "$(dirname "$0")/.."

SECONDS=0
bash env/setup.sh
set_up=$SECONDS
echo
SECONDS=0
TOWLINE_ALLOW_LOGIN=1 .venv/bin/towline run jobs/experiments/last-number.toml "$@"
echo
printf 'set-up %d s, training %d min %d s\n' "$set_up" $((SECONDS / 60)) $((SECONDS % 60))
