#!/usr/bin/env bash
# Resolve cpu.in and cuda.in again into their lock files. Needs uv; run after changing an .in file.
set -euo pipefail
cd "$(dirname "$0")"
resolve() {
  uv pip compile --quiet --no-config --python-version 3.11 --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "bash env/lock.sh" "$@"
}
links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
resolve cpu.in --override cpu-overrides.txt ${links:+--find-links "$links"} -o cpu.lock
resolve cuda.in -o cuda.lock
# Without its local label the pin takes whichever build of this version the user's index or folder offers.
sed -i 's/^torch==\([0-9.]*\)+cpu/torch==\1/' cpu.lock
