# Which folders below /tmp the nodes see; read by the scripts beside it.
#
# Each node has its own /tmp, as on a real cluster, but a checkout of the project and its Python may lie in the
# machine's: in a node, the machine's /tmp is /run/machine-tmp, and what is needed of it is mounted where it was.
# shellcheck shell=bash

hide_tmp() {
  mkdir /run/machine-tmp
  mount --rbind /tmp /run/machine-tmp
  mount -t tmpfs -o mode=1777 tmp /tmp
  # The cluster's own folder must stay.
  [[ $folder/ != /tmp/* ]] || show "$folder"
}

# Runs in the node. A folder that was made anew since it was mounted is mounted again.
show() { # FOLDER...
  local path
  for path in "$@"; do
    [ "$path" -ef "/run/machine-tmp/${path#/tmp/}" ] && continue
    mkdir -p "$path"
    mount --rbind "/run/machine-tmp/${path#/tmp/}" "$path"
  done
}

# The project, its environment, that one's interpreter, by the names they are called by and by their real ones.
needed_folders() {
  local venv=$project/.venv path home
  local -a found=("$project" "$(realpath "$project")")
  if [ -e "$venv/pyvenv.cfg" ]; then
    home=$(sed -n 's/^home *= *//p' "$venv/pyvenv.cfg")
    found+=("$(realpath "$venv")" "$(dirname "$home")" "$(dirname "$(dirname "$(realpath "$venv/bin/python")")")")
  fi
  local -a more
  IFS=: read -ra more <<<"${TOWLINE_SLURM_SHARE:-}"
  for path in "${found[@]}" ${more[@]+"${more[@]}"}; do
    [[ $path != /tmp/* ]] || echo "$path"
  done
}

# What one caller needs, a node that boots for another must have as well.
remember_needed() {
  local list=$folder/run/shown path
  { needed_folders; cat "$list" 2>/dev/null || true; } | sort -u | while IFS= read -r path; do
    [ ! -d "$path" ] || echo "$path"
  done >"$list.new"
  mv "$list.new" "$list"
}

show_in_nodes() { # NODE...
  local -a needed
  remember_needed
  mapfile -t needed <"$folder/run/shown"
  [ ${#needed[@]} = 0 ] && return
  local node
  for node in "$@"; do
    nsenter --target "$(pid_of "$node")" --mount bash -e -c "$(declare -f show); show \"\$@\"" show "${needed[@]}" ||
      fail "$node cannot be shown ${needed[*]}"
  done
}
