#!/usr/bin/env bash
# Says whether the development cluster is running, and which parts are not.
#
#   bash env/slurm/status.sh
set -euo pipefail
source "$(dirname "$0")/cluster.sh"

down=()
for part in munged mariadbd slurmdbd slurmctld "${nodes[@]}"; do alive "$part" || down+=("$part"); done
case ${#down[@]} in
  0) echo "running in $folder" ;;
  8) echo "stopped" ;;
  *) echo "running in $folder, but for ${down[*]}" ;;
esac
