#!/usr/bin/env bash
# Stops the development cluster; with --purge, its folder is removed as well.
#
#   bash env/slurm/down.sh [--purge]
set -euo pipefail
source "$(dirname "$0")/cluster.sh"
source "$here/daemons.sh"

[[ ${1:-} =~ ^(--purge)?$ ]] || fail "$1 is not an option; use --purge"
need_root
[ -d "$folder/run" ] || exit 0
lock_cluster
for node in "${nodes[@]}"; do stop_node "$node"; done
for part in slurmctld slurmdbd mariadbd munged; do stop $part; done
[ "$(network_owner)" != "$folder" ] || ip link delete $bridge
rm -f "$folder/run/shown"
say stopped "$folder"
if [ "${1:-}" = --purge ]; then
  rm -rf "${folder:?}"/{etc,run,log,spool,state,dev,db,shared}
  rmdir "$folder" || true
  say removed "$folder"
fi
