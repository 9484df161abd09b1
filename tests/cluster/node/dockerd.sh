#!/bin/bash
# Process 1 of the namespaces (mount, pid, network, uts, ipc, cgroup) of a Docker engine of our own:
# dockerd.sh FOLDER [DOCKERD ARGUMENT...]. It changes nothing of the machine outside, and all ends with this process.
set -eu
folder=$1
shift
hostname weightsync
mount --make-rprivate /
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
  umount -R -l /sys/fs/cgroup
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  # Controllers can only be handed down from a group without processes.
  mkdir -p /sys/fs/cgroup/init
  for process in $(cat /sys/fs/cgroup/cgroup.procs); do
    echo "$process" > /sys/fs/cgroup/init/cgroup.procs || true
  done
  for controller in $(cat /sys/fs/cgroup/cgroup.controllers); do
    echo "+$controller" > /sys/fs/cgroup/cgroup.subtree_control
  done
else
  mapfile -t hierarchies < <(cut -d: -f2 /proc/self/cgroup)
  umount -R -l /sys/fs/cgroup
  mount -t sysfs sysfs /sys # that of the new network namespace
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  for controllers in "${hierarchies[@]}"; do
    # A hierarchy can only be mounted with all of its controllers; v2 beside v1 is left out.
    case $controllers in
      "") continue ;;
      name=*) options=none,$controllers ;;
      *) options=$controllers ;;
    esac
    target=/sys/fs/cgroup/${controllers#name=}
    mkdir "$target"
    mount -t cgroup -o "$options" cgroup "$target"
    for controller in ${controllers//,/ }; do
      [ -e "/sys/fs/cgroup/${controller#name=}" ] || ln -s "$target" "/sys/fs/cgroup/$controller"
    done
  done
fi
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/tmp
mount --make-rshared /
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
TMPDIR=/run/tmp dockerd --data-root "$folder/data" --exec-root /run/docker-exec --pidfile /run/docker.pid \
  --host "unix://$folder/docker.sock" --storage-driver overlay2 --exec-opt native.cgroupdriver=cgroupfs "$@" &
daemon=$!
trap 'kill $daemon; wait $daemon || true; exit 0' TERM
# dockerd's containers leave orphans here: wait for the daemon only, again after each signal.
while kill -0 $daemon 2> /dev/null; do wait $daemon || true; done
