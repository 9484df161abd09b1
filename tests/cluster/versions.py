"""The one place for the versions of everything the test clusters are made of.

`ETCD_TAG`, `COREDNS` and `PAUSE_TAG` are those that this kubeadm asks for
(`kubeadm config images list`); the node image build fails when they differ.
"""

GO_MIN = (1, 26)  # what KUBERNETES' own go.mod asks for

KUBERNETES = "v1.37.2"
ETCD = "v3.7.0"
ETCD_TAG = "3.7.0-0"
COREDNS = "v1.14.6"
PAUSE_TAG = "3.10.2"

KIND = "v0.33.0"
CONTAINERD = "v2.4.2"
RUNC = "v1.5.3"
CRICTL = "v1.37.0"
CNI_PLUGINS = "v1.10.0"
LOCAL_PATH = "v0.0.30"
HELM = "v4.3.1"

# systemd 252 is the last one that still starts on a cgroup v1 machine.
DEBIAN_SUITE = "bookworm"

# What this kind starts by default where there is a Docker engine and a registry.
STOCK_NODE_IMAGE = (
    "kindest/node:v1.37.0@sha256:a1ed56cfb0e7b93589bdf97c8cd566405a265939e3620fc4f5de89adff580ae5"
)
