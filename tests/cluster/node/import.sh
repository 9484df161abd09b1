#!/bin/sh
# Put image archives into the store of a node root's containerd: import.sh ROOT ARCHIVES. Runs in mount, network and
# pid namespaces of its own, so all that it starts and mounts ends with it. Writes ARCHIVES/imported.
set -eu
root=$1 archives=$2
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
mount --bind "$archives" "$root/mnt"
chroot "$root" containerd &
daemon=$!
tries=0
until chroot "$root" ctr version > /dev/null 2>&1; do
  tries=$((tries + 1))
  [ $tries -lt 150 ] || { echo "containerd did not answer"; exit 1; }
  kill -0 $daemon || { echo "containerd ended"; exit 1; }
  sleep 0.2
done
for archive in "$archives"/*.tar; do
  # Pinned: the kubelet's garbage collection must not take what cannot be pulled.
  chroot "$root" ctr -n k8s.io images import --label=io.cri-containerd.pinned=pinned --all-platforms --no-unpack \
    --digests "/mnt/${archive##*/}"
done
chroot "$root" ctr -n k8s.io images list -q > "$archives/imported"
kill $daemon
wait $daemon || true
