# Names, places and processes of the development cluster; read by the scripts beside it.
# shellcheck shell=bash

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
folder=$(realpath -m "${TOWLINE_SLURM:-/var/tmp/towline-slurm}")
export SLURM_CONF=$folder/etc/slurm.conf

bridge=towline0
host_address=10.77.0.1
nodes=(trainer0 trainer1 rollout0 rollout1)
declare -A address=([trainer0]=10.77.0.11 [trainer1]=10.77.0.12 [rollout0]=10.77.0.21 [rollout1]=10.77.0.22)
slurmctld_port=6817
slurmd_port=6818
slurmdbd_port=6819

fail() {
  echo "env/slurm/${0##*/}: $*" >&2
  exit 1
}

need_root() {
  [ "$EUID" = 0 ] || fail "needs root, for network namespaces and mounts: run it as root, or with sudo -E"
}

# One script at a time changes the cluster. Descriptor 9 holds the lock until the script ends; no daemon inherits it.
lock_cluster() {
  mkdir -p "$folder/run"
  exec 9>"$folder/run/lock"
  flock -w 120 9 || fail "another script has held $folder/run/lock for two minutes"
}

began=$EPOCHREALTIME
say() {
  local now=$EPOCHREALTIME
  local tenths=$(((${now/./} - ${began/./}) / 100000))
  printf '%3d.%d s  %-10s %s\n' $((tenths / 10)) $((tenths % 10)) "$1" "$2"
}

wait_for() { # SECONDS COMMAND...
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < until)) || return 1
    sleep 0.05
  done
}

# A process is known by its pid and its start, as a pid alone may by now be another's.
start_of() { # PID
  local stat
  { stat=$(<"/proc/$1/stat"); } 2>/dev/null || return 1
  local -a fields
  read -ra fields <<<"${stat##*) }"
  [[ ${fields[0]} != [ZX] ]] && echo "${fields[19]}"
}

record() { # NAME PID
  echo "$2 $(start_of "$2")" >"$folder/run/$1.pid.new"
  mv "$folder/run/$1.pid.new" "$folder/run/$1.pid"
}

pid_of() { # NAME: prints the pid while the process lives
  local pid started
  { read -r pid started <"$folder/run/$1.pid"; } 2>/dev/null || return 1
  [ "$(start_of "$pid")" = "$started" ] && echo "$pid"
}

alive() { pid_of "$1" >/dev/null; }
dead() { ! alive "$1"; }

# Daemons get an environment of their own: what the caller exports is no business of other people's jobs.
start() { # NAME COMMAND...
  local name=$1
  shift
  env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 TOWLINE_SLURM="$folder" SLURM_CONF="$SLURM_CONF" \
    MYSQL_UNIX_PORT="$folder/run/mariadb.sock" \
    setsid "$@" >>"$folder/log/$name.out" 2>&1 </dev/null 9>&- &
  record "$name" $!
}

# Not by pid file alone: a process that is gone, or never was ours, is left alone.
stop() { # NAME [SIGNAL]
  local pid
  if pid=$(pid_of "$1"); then
    kill "-${2:-TERM}" "$pid"
    wait_for 10 dead "$1" || kill -KILL "$pid"
  fi
  rm -f "$folder/run/$1.pid"
}

answers() { # ADDRESS PORT
  (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null
}
