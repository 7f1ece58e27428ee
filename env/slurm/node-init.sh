#!/usr/bin/env bash
# The first process of a node, in its own net, uts, ipc, pid and mount namespace: when it dies, all of the node dies.
set -euo pipefail
source "$(dirname "$0")/cluster.sh"
source "$here/share.sh"

# A function, so that all of it is read before /tmp, where this file may lie, is covered.
boot() {
  local name=$1 pid
  # /proc is still the machine's, and so is the pid it tells.
  read -r pid _ </proc/self/stat
  record "$name" "$pid"
  mount -t proc proc /proc
  hostname "$name"
  mount --bind "$folder/etc/hosts" /etc/hosts
  mount --bind "$folder/etc/nsswitch.conf" /etc/nsswitch.conf
  # Each node has its own: PMIx, MPI and Python's multiprocessing keep files there that are named alike on all nodes.
  mount -t tmpfs -o mode=1777 shm /dev/shm
  mount -t tmpfs -o mode=755 run /run
  hide_tmp
  mkdir -p "$folder/spool/$name"
  until ip route get $host_address &>/dev/null; do sleep 0.05; done
  slurmd -D -N "$name" &
  # Meanwhile bash reaps the processes that lost their parents.
  wait $!
  exit
}
boot "$1"
