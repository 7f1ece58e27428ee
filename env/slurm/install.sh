# Installs what the cluster is made of, where it is missing; read by up.sh.
# shellcheck shell=bash

# Slurm's plugins for pmix and pmi2 come with slurmd, the libraries they load do not: and the one for pmix is asked for by
# the name that only the package for developers has.
packages=(slurmctld slurmd slurm-client slurmdbd mariadb-server munge libpmix-dev libpmi2-0 iproute2 util-linux)

missing_packages() {
  local package
  for package in "${packages[@]}"; do
    # The list of files is there while a package is; dpkg-query would take longer than all other checks of up.sh.
    local info=/var/lib/dpkg/info/$package
    [ -e "$info.list" ] || compgen -G "$info:*.list" >/dev/null || echo "$package"
  done
}

install_packages() {
  local -a missing
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} = 0 ] && return
  command -v apt-get >/dev/null ||
    fail "needs these packages of Debian 12, and found no apt-get to install them: ${missing[*]}"
  say packages "installing ${missing[*]}"
  # Debian starts a service as it is installed, unless this file says no.
  local policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  local log=$folder/log/apt.log
  apt_install "${missing[@]}" >"$log" 2>&1 ||
    { apt-get update >>"$log" 2>&1 && apt_install "${missing[@]}" >>"$log" 2>&1; } ||
    { tail -n 5 "$log" >&2; fail "apt-get could not install ${missing[*]}: see $log"; }
  say packages installed
}

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@"; }
