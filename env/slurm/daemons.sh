# How each part of the cluster is started; read by the scripts beside it. Starting what runs already does nothing.
# shellcheck shell=bash

render() { # TEMPLATE FILE
  sed -e "s#@FOLDER@#$folder#g" -e "s#@HOST@#$(hostname -s)#g" -e "s#@ADDRESS@#$host_address#g" \
    -e "s#@SLURMCTLD_PORT@#$slurmctld_port#g" -e "s#@SLURMD_PORT@#$slurmd_port#g" \
    -e "s#@SLURMDBD_PORT@#$slurmdbd_port#g" "$1" >"$2.new"
  chmod "$3" "$2.new"
  mv "$2.new" "$2"
}

write_configuration() {
  render "$here/slurm.conf.in" "$folder/etc/slurm.conf" 644
  render "$here/slurmdbd.conf.in" "$folder/etc/slurmdbd.conf" 600
  cat >"$folder/etc/gres.conf" <<END
AutoDetect=off
NodeName=${nodes[0]},${nodes[1]},${nodes[2]},${nodes[3]} Name=gpu Type=fake File=$folder/dev/gpu[0-1]
END
  # What the nodes see as /etc/hosts; the machine's own stays as it is.
  {
    echo "127.0.0.1 localhost"
    echo "$host_address $(hostname -s)"
    local node
    for node in "${nodes[@]}"; do echo "${address[$node]} $node"; done
  } >"$folder/etc/hosts"
  # With DNS in this list, every look-up inside a node waits ten seconds for a resolver it cannot reach.
  sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$folder/etc/nsswitch.conf"
  # Slurm asks of a GPU only that it is a character device: /dev/null will do.
  local gpu
  for gpu in "$folder"/dev/gpu{0,1}; do
    [ -c "$gpu" ] || mknod -m 666 "$gpu" c 1 3
  done
}

# The folder whose cluster uses the network between the nodes: the alias says so. Nothing while there is no network.
network_owner() { { ip link show $bridge 2>/dev/null || true; } | sed -n 's/^ *alias //p'; }

start_network() {
  local owner
  owner=$(network_owner)
  [ "$owner" != "$folder" ] || return 0
  [ -z "$owner" ] ||
    fail "the cluster of $owner is running, and there is room for one: TOWLINE_SLURM=$owner bash env/slurm/down.sh"
  ip link add $bridge type bridge
  ip link set $bridge alias "$folder"
  ip address add $host_address/24 dev $bridge
  ip link set $bridge up
}

start_munged() {
  alive munged && return
  if [ ! -s "$folder/etc/munge.key" ]; then
    (umask 077 && head -c 128 /dev/urandom >"$folder/etc/munge.key")
  fi
  rm -f "$folder/run/munge.sock"*
  # --force: it finds fault with folders that others than root may write to, such as /var/tmp.
  start munged munged --foreground --force --key-file="$folder/etc/munge.key" --socket="$folder/run/munge.sock" \
    --pid-file="$folder/run/munged.own.pid" --log-file="$folder/log/munged.log" --seed-file="$folder/run/munged.seed"
  wait_for 10 test -S "$folder/run/munge.sock" || fail "munged did not start: see $folder/log/munged.out"
}

sql() { mariadb --no-defaults --socket="$folder/run/mariadb.sock" "$@"; }

start_mariadbd() {
  alive mariadbd && return
  if [ ! -d "$folder/db/mysql" ]; then
    mariadb-install-db --no-defaults --user=root --datadir="$folder/db" --auth-root-authentication-method=socket \
      --skip-test-db >"$folder/log/mariadb-install.out" 2>&1
  fi
  start mariadbd mariadbd --no-defaults --user=root --datadir="$folder/db" --socket="$folder/run/mariadb.sock" \
    --pid-file="$folder/run/mariadbd.own.pid" --skip-networking --innodb-buffer-pool-size=64M \
    --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0
  wait_for 30 sql -e "create database if not exists slurm_acct_db" 2>/dev/null ||
    fail "mariadbd did not start: see $folder/log/mariadbd.out"
}

start_slurmdbd() {
  alive slurmdbd && return
  start slurmdbd slurmdbd -D
  wait_for 30 answers $host_address $slurmdbd_port || fail "slurmdbd did not start: see $folder/log/slurmdbd.log"
  accounts_are_set_up || set_up_accounts
}

accounts_are_set_up() { sacctmgr -nP show qos onejob 2>/dev/null | grep -q onejob; }

# Jobs need no --account: towline is everybody's default.
set_up_accounts() {
  {
    sacctmgr -i add cluster towline
    sacctmgr -i add account towline cluster=towline
    local user
    for user in root ${SUDO_USER:+"$SUDO_USER"}; do
      sacctmgr -i add user "$user" account=towline cluster=towline
      sacctmgr -i modify user "$user" set defaultaccount=towline
    done
    sacctmgr -i add qos onejob set maxjobsperuser=1
  } >"$folder/log/sacctmgr.out" 2>&1 || fail "could not set accounts up: see $folder/log/sacctmgr.out"
}

controller_answers() { scontrol ping 2>/dev/null | grep -q 'is UP'; }

start_slurmctld() {
  alive slurmctld && return
  start slurmctld slurmctld -D
  wait_for 30 controller_answers || fail "slurmctld did not start: see $folder/log/slurmctld.log"
}

# The node's first process tells its pid, then waits for the network: only with the pid can we bring it a cable.
start_node() { # NODE
  alive "$1" && return
  rm -f "$folder/run/$1.pid"
  unplug "$1"
  # Its own /proc and mounts are made by node-init.sh, which first reads in the old ones who it is.
  start "unshare.$1" unshare --net --uts --ipc --pid --mount --fork "$here/node-init.sh" "$1"
  wait_for 10 alive "$1" || fail "$1 did not start: see $folder/log/unshare.$1.out"
  local pid
  pid=$(pid_of "$1")
  ip link add "tl-$1" type veth peer name eth0 netns "$pid"
  ip link set "tl-$1" master $bridge up
  nsenter --target "$pid" --net sh -e -c "
    ip link set lo up
    ip address add ${address[$1]}/24 dev eth0
    ip link set eth0 up
    ip route add default via $host_address"
}

unplug() { ip link delete "tl-$1" 2>/dev/null || true; } # NODE

stop_node() { # NODE
  stop "$1" KILL
  stop "unshare.$1"
  unplug "$1"
}

node_state() { sinfo -h -N -n "$1" -p main -o %T; } # NODE

# Ready for jobs, or at work.
usable() { [[ $(node_state "$1") =~ ^(idle|mixed|allocated|completing)$ ]]; } # NODE

# A node that was taken out, or whose loss was noticed before it came back, has to be let in again.
usable_again() { # NODE
  usable "$1" && return
  [[ $(node_state "$1") =~ ^(down|drained|draining)$ ]] && scontrol update nodename="$1" state=resume 2>/dev/null
  return 1
}
