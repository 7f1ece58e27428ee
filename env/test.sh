#!/usr/bin/env bash
# Everything a change must pass: lint, format, types, import rules, tests. Sets the environment up first.
#
#   bash env/test.sh           all tests that need neither a Slurm cluster nor a GPU
#   bash env/test.sh --fast    without those marked slow: no engine, no trainer, no whole run
#   bash env/test.sh --all     with every case of the fault matrix, and those for Slurm and GPUs where this machine has them
set -euo pipefail
cd "$(dirname "$0")/.."

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

case ${1:-} in
  "") marks="not slurm and not gpu and not matrix" setup=() ;;
  --fast) marks="not slow and not slurm and not gpu and not matrix" setup=(--no-models) ;;
  --all)
    marks="not never"
    command -v sbatch >/dev/null || marks+=" and not slurm"
    has_gpu || marks+=" and not gpu"
    setup=()
    ;;
  *) echo "env/test.sh: $1 is not an option; use --fast or --all" >&2; exit 2 ;;
esac

failed=()
stage() {
  local name=$1 started=$SECONDS
  shift
  if "$@"; then
    printf '%-8s ok      %4d s\n' "$name" $((SECONDS - started))
  else
    failed+=("$name")
    printf '%-8s FAILED  %4d s   %s\n' "$name" $((SECONDS - started)) "$*"
  fi
}

SECONDS=0
stage setup bash env/setup.sh ${setup[@]+"${setup[@]}"}
[ ${#failed[@]} = 0 ] || exit 1
export PATH="$PWD/.venv/bin:$PATH"
# Without this each process starts a thread a core and the tests wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
stage lint ruff check
stage format ruff format --check
stage types pyright
stage imports lint-imports
stage tests pytest -m "$marks"
if [ ${#failed[@]} != 0 ]; then
  echo "FAILED: ${failed[*]} ($SECONDS s)"
  exit 1
fi
echo "all passed ($SECONDS s)"
