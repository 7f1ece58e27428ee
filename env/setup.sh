#!/usr/bin/env bash
# Makes .venv at the project's root from a lock file, installs towline into it, then makes the demonstration's models
# and data. A second run finds the work done. No root needed.
#
#   bash env/setup.sh [--cuda] [--no-models]
#
#   --cuda        env/cuda.lock (NVIDIA GPUs) instead of env/cpu.lock
#   --models      make what is missing of models/ and data/ (default)
#   --no-models   only the environment
set -euo pipefail
cd "$(dirname "$0")/.."

lock=env/cpu.lock
models=yes
for option in "$@"; do
  case $option in
    --cuda) lock=env/cuda.lock ;;
    --models) models=yes ;;
    --no-models) models=no ;;
    *) echo "env/setup.sh: $option is not an option; use --cuda, --models or --no-models" >&2; exit 2 ;;
  esac
done

venv_python=.venv/bin/python
SECONDS=0

say() { printf '%-10s%s\n' "$1" "$2"; }

# The locks are resolved for 3.11; later versions are tried after it.
find_python() {
  local name
  for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  echo "env/setup.sh: found no Python 3.11 or later with the venv module. On Debian or Ubuntu:
  apt-get install python3 python3-venv
elsewhere, load a Python module or name an interpreter: PYTHON=/path/to/python3.11 bash env/setup.sh" >&2
  return 2
}

make_venv() {
  "$venv_python" -c '' 2>/dev/null && return
  local python
  python=$(find_python)
  say python "$("$python" --version) at $python"
  "$python" -m venv --clear .venv
}

# An mpirun inside .venv (put on PATH by `activate`) is ours, not the machine's.
machine_has_mpirun() {
  local found
  found=$(type -ap mpirun | grep -v "^$PWD/.venv/" | head -n 1) && [ -n "$found" ]
}

install_packages() {
  say packages "installing from ${locks[*]} with ${uv:-pip}"
  if [ -n "$uv" ]; then
    # `sync`, since `uv pip install` of a lock file adds dependencies that the lock leaves out on purpose. uv does not
    # read pip's folder of wheels, where a CPU build of torch may lie.
    local links=""
    [ "$lock" = env/cuda.lock ] || links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
    local -a flags=()
    local link
    for link in $links; do flags+=(--find-links "$link"); done
    uv pip sync --quiet --compile-bytecode --python "$venv_python" ${flags[@]+"${flags[@]}"} "${locks[@]}"
  else
    # -qq: with one -q pip still warns of every index of its configuration that lacks a package.
    "$venv_python" -m pip install -qq --no-deps $(printf -- '-r %s ' "${locks[@]}")
  fi
}

install_towline() {
  if [ -n "$uv" ]; then
    uv pip install --quiet --python "$venv_python" --no-deps --no-build-isolation -e .
  else
    "$venv_python" -m pip install -qq --no-deps --no-build-isolation -e .
  fi
}

check_mpi() {
  local world
  world=$(OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 .venv/bin/mpirun -n 2 --oversubscribe \
    "$venv_python" -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)' 2>&1 | tail -n 1)
  if [ "$world" = 2 ]; then
    say mpi "Open MPI of env/mpi.lock in .venv: two processes make a world of 2"
  else
    say mpi "FAILED: two processes should make a world of 2, mpirun said: $world
          mend: install Open MPI with the system's packages or load its module and run this again"
    return 1
  fi
}

# True when the stamp holds this value already.
stamped() { [ "$(cat ".venv/.towline-$1" 2>/dev/null)" = "$2" ]; }
stamp() { echo "$2" > ".venv/.towline-$1"; }
digest() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

uv=$(command -v uv >/dev/null && echo uv || true)
locks=("$lock")
machine_has_mpirun || locks+=(env/mpi.lock)

make_venv
packages=$(digest "${locks[@]}")
if ! stamped packages "$packages"; then
  rm -f .venv/.towline-project
  install_packages
  [ "${#locks[@]}" = 1 ] || check_mpi
  stamp packages "$packages"
fi
# The scripts of an editable install are written from pyproject.toml; the code itself needs no new install.
project=$(digest pyproject.toml)
if ! stamped project "$project"; then
  install_towline
  stamp project "$project"
fi
say towline "$("$venv_python" --version), ${locks[*]}, in .venv ($SECONDS s)"

if [ "$models" = yes ]; then
  "$venv_python" env/prepare.py
  say models "models/ and data/ are complete ($SECONDS s)"
fi
