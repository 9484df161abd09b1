#!/bin/bash
# The node's part of the cluster network, once: routes to the other nodes' pods, masquerading, the CNI configuration.
# Runs chrooted into the node by the DaemonSet of cni.yaml. $1: a service account's token; NODE_NAME, POD_SUBNET and
# CONTROL_PLANE_ENDPOINT are in the environment.
set -euo pipefail
config=/etc/cni/net.d/10-weightsync.conflist
own=
nodes=$(kubectl --kubeconfig=/dev/null --server="https://$CONTROL_PLANE_ENDPOINT" --token="$1" --request-timeout=10s \
  --certificate-authority=/etc/kubernetes/pki/ca.crt get nodes -o json |
  jq -r '.items[] | select(.spec.podCIDR) | .metadata.name as $name | .spec.podCIDR as $pods
    | .status.addresses[]? | select(.type == "InternalIP") | "\($name) \($pods) \(.address)"')
while read -r name pods address; do
  if [ "$name" = "$NODE_NAME" ]; then own=$pods; else ip route replace "$pods" via "$address"; fi
done <<< "$nodes"
[ -n "$own" ] || { echo "no pod range for $NODE_NAME yet"; exit 1; }

rule=(POSTROUTING -s "$own" ! -d "$POD_SUBNET" -m comment --comment weightsync -j MASQUERADE)
iptables -w -t nat -C "${rule[@]}" 2> /dev/null || iptables -w -t nat -A "${rule[@]}"

grep -qF "\"$own\"" "$config" 2> /dev/null && exit 0
mkdir -p "${config%/*}"
jq -n --arg subnet "$own" '{cniVersion: "1.0.0", name: "weightsync", plugins: [
  {type: "ptp", ipMasq: false, ipam: {type: "host-local", dataDir: "/run/cni-ipam-state",
    routes: [{dst: "0.0.0.0/0"}], ranges: [[{subnet: $subnet}]]}},
  {type: "portmap", capabilities: {portMappings: true}}]}' > "$config.new"
# The kubelet must never see half of it.
mv "$config.new" "$config"
echo "pods of $NODE_NAME: $own"
