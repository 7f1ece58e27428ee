#!/usr/bin/env bash
# The controller dies at once, or starts again with the state it saved last.
#
#   bash env/slurm/controller.sh kill|start
set -euo pipefail
source "$(dirname "$0")/cluster.sh"
source "$here/daemons.sh"

need_root
lock_cluster
case ${1:-} in
  kill) stop slurmctld KILL && say slurmctld killed ;;
  start) start_slurmctld && say slurmctld running ;;
  *) fail "use: controller.sh kill|start" ;;
esac
