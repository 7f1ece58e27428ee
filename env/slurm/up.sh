#!/usr/bin/env bash
# A Slurm cluster of four nodes on one machine, for tests and CI: installs what is missing, starts what is not running.
#
#   bash env/slurm/up.sh
#
# Nodes trainer0, trainer1, rollout0 and rollout1 have 4 CPUs and 2 pretended GPUs each, a network interface eth0, and
# /tmp, /dev/shm and processes of their own. All of it lives in ${TOWLINE_SLURM:-/var/tmp/towline-slurm}, where shared/
# is for what all nodes shall see. Under /tmp nodes see only this project, its Python, and the folders of
# $TOWLINE_SLURM_SHARE (with colons between them); call this again to add some. Needs root and Debian 12.
set -euo pipefail
source "$(dirname "$0")/cluster.sh"
source "$here/install.sh"
source "$here/daemons.sh"
source "$here/share.sh"

need_root
mkdir -p "$folder"/{etc,run,log,spool,state,dev,db,shared}
chmod 755 "$folder" "$folder"/run
chmod 1777 "$folder/shared"
lock_cluster
install_packages

start_network
# What runs was started with the configuration that is there.
alive slurmctld || write_configuration
for part in munged mariadbd slurmdbd slurmctld; do
  if alive $part; then
    say $part running
  else
    start_$part
    say $part started
  fi
done

started=()
for node in "${nodes[@]}"; do
  alive "$node" || started+=("$node")
  start_node "$node"
done
show_in_nodes "${nodes[@]}"
for node in "${nodes[@]}"; do
  wait_for 60 usable_again "$node" || fail "$node is $(node_state "$node"): see $folder/log/slurmd.$node.log"
done
say nodes "ready: ${nodes[*]}${started[*]:+ (started: ${started[*]})}"
echo "export SLURM_CONF=$SLURM_CONF"
