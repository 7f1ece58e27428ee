#!/usr/bin/env bash
# Everything a change must pass: lint, format, types, import rules, tests. Sets the environment up first.
#
#   bash env/test.sh           all tests that need no GPU; those for Slurm on the development cluster of env/slurm,
#                              which it installs and starts where it is root
#   bash env/test.sh --fast    without those marked slow: no engine, no trainer, no whole run
#   bash env/test.sh --all     with every case of the fault matrix, and those for GPUs where this machine has one
set -euo pipefail
cd "$(dirname "$0")/.."

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

can_have_cluster() { [ "$(id -u)" = 0 ] && { command -v slurmctld || command -v apt-get; } >/dev/null; }

case ${1:-} in
  "") slow="slow and not gpu and not matrix" slurm=yes setup=() ;;
  --fast) slow="" slurm=no setup=(--no-models) ;;
  --all)
    if has_gpu; then slow="slow or matrix or gpu"; else slow="(slow or matrix) and not gpu"; fi
    slurm=yes setup=()
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
# A file to a process, side by side: what starts a run or a world of ranks waits for much of its time.
# In the order of the folders: whole runs, which are few and long, must not come last.
side_by_side=(--numprocesses 2 --dist loadfile --no-loadscope-reorder)
stage fast pytest -m "not slow and not slurm and not gpu and not matrix" "${side_by_side[@]}"
[ -z "$slow" ] || stage slow pytest -m "($slow) and not slurm" "${side_by_side[@]}" \
    --timeout 900 -o faulthandler_timeout=800 --durations=20
if [ $slurm = yes ] && can_have_cluster; then
  was_running=$(bash env/slurm/status.sh)
  stage cluster bash env/slurm/up.sh
  stage slurm pytest -m slurm --durations=20
  [[ $was_running == *running* ]] || bash env/slurm/down.sh
elif [ $slurm = yes ]; then
  printf '%-8s left out: the development cluster needs root and Debian packages (env/slurm/up.sh)\n' slurm
fi
if [ ${#failed[@]} != 0 ]; then
  echo "FAILED: ${failed[*]} ($SECONDS s)"
  exit 1
fi
echo "all passed ($SECONDS s)"
