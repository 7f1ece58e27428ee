#!/usr/bin/env bash
# A node is lost, or comes back.
#
#   bash env/slurm/node.sh crash|boot|status NODE
#
# crash is a loss of power: the cable is cut first, so that nobody is told, then every process of the node dies.
set -euo pipefail
source "$(dirname "$0")/cluster.sh"
source "$here/daemons.sh"
source "$here/share.sh"

[ $# = 2 ] || fail "use: node.sh crash|boot|status NODE"
node=$2
[ -n "${address[$node]:-}" ] || fail "$node is not a node; there are ${nodes[*]}"

registered_since() { # TIME
  local shown
  shown=$(scontrol -o show node "$node" | sed -n 's/.* SlurmdStartTime=\([^ ]*\).*/\1/p')
  [[ $shown > $1 || $shown == "$1" ]]
}

case $1 in
  crash)
    need_root
    lock_cluster
    stop_node "$node"
    say "$node" crashed
    ;;
  boot)
    need_root
    lock_cluster
    if dead "$node"; then
      printf -v now '%(%FT%T)T' -1
      start_node "$node"
      show_in_nodes "$node"
      # Until then its state is that of before the crash, when that has not been noticed.
      wait_for 60 registered_since "$now" || fail "$node did not register: see $folder/log/slurmd.$node.log"
    fi
    wait_for 60 usable_again "$node" || fail "$node is $(node_state "$node"): see $folder/log/slurmd.$node.log"
    say "$node" "$(node_state "$node")"
    ;;
  status)
    if alive "$node"; then up=up; else up=dead; fi
    echo "$node $up $(node_state "$node")"
    ;;
  *) fail "$1 is not a command; use crash, boot or status" ;;
esac
