#!/bin/bash
# The first program of a node, before kind's own entrypoint.
set -eu
# The kubelet sets these, and they are the machine's: let it write into files of the node's own.
hide() {
  local file=/run/weightsync-sysctl/$1
  mkdir -p "${file%/*}"
  echo "$2" > "$file"
  mount --bind "$file" "/proc/sys/$1"
}
hide vm/overcommit_memory 1
hide vm/panic_on_oom 0
hide kernel/panic 10
hide kernel/panic_on_oops 1
hide kernel/keys/root_maxkeys 1000000
hide kernel/keys/root_maxbytes 25000000
# With cgroup v1 Docker gives a node no v2 cgroup of its own, so the systemds of all nodes would share one.
if [ ! -f /sys/fs/cgroup/cgroup.controllers ]; then
  set -- "$@" systemd.unified_cgroup_hierarchy=0 systemd.legacy_systemd_cgroup_controller=1
fi
exec "$@"
