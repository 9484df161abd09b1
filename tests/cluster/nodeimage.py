"""The kind node image, made without a registry: Debian packages, kind's base files, programs built from Go.

What differs from kind's own image is baked in, so that an ordinary kind configuration works:
- the kubelet and containerd ask for nothing that needs CAP_SYS_RESOURCE, and accept cgroup v1;
- machine-wide sysctls are hidden from the kubelet (`node/entry.sh`);
- the network is `node/cni.yaml` in place of kindnetd, which is not to be had as a Go module.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cache, images, oci, versions
from tests.cluster.binaries import RECIPES, binaries, module_folder
from tests.cluster.errors import ClusterError

NODE_FILES = Path(__file__).with_name("node")
DEBOOTSTRAP_DEADLINE_S = 900.0
IMPORT_DEADLINE_S = 300.0
CNI_IMAGE = "localhost/weightsync-cni:1"
_RECIPE = 1  # raise it when the way the image is built changes
_PROGRAMS: dict[str, tuple[str, ...]] = {
    "usr/bin": ("kubeadm", "kubelet", "kubectl"),
    "usr/local/bin": ("containerd", "ctr", "containerd-shim-runc-v2", "crictl"),
    "usr/local/sbin": ("runc",),
    "opt/cni/bin": ("host-local", "loopback", "ptp", "portmap"),
}
_IN_IMAGES: tuple[str, ...] = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy")
_IN_IMAGES += ("etcd", "coredns", "local-path-provisioner")
_PACKAGES = [
    "systemd",
    "conntrack",
    "iptables",
    "nftables",
    "iproute2",
    "ethtool",
    "util-linux",
    "mount",
    "kmod",
    "libseccomp2",
    "pigz",
    "e2fsprogs",
    "bash",
    "ca-certificates",
    "curl",
    "jq",
    "procps",
    "busybox-static",
]
_KUBELET_CONFIG = """\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
# cgroup v1 is refused by default since 1.35
failCgroupV1: false
# more than the container's own limit would need CAP_SYS_RESOURCE, as would a negative score
maxOpenFiles: 20000
oomScoreAdj: 0
"""


@dataclass(frozen=True)
class NodeImage:
    """The archive for `docker load`, and the image's name."""

    ref: str
    archive: Path


def node_image() -> NodeImage:
    """The node image, built now if the cache lacks it: minutes when Go's own cache is cold."""
    own = {path.name: path.read_text() for path in sorted(NODE_FILES.iterdir()) if path.is_file()}
    inputs = [_RECIPE, own, _PACKAGES, _KUBELET_CONFIG, {k: vars(r) for k, r in RECIPES.items()}]
    constants = {k: v for k, v in vars(versions).items() if k.isupper()}
    key = cache.digest([inputs, constants])
    ref = f"localhost/weightsync-node:{key}"
    # Not under the lock of the image: each of these is an entry with a lock of its own.
    programs = binaries(*(name for names in _PROGRAMS.values() for name in names), *_IN_IMAGES, "kind")
    debian = _debian()
    archive = cache.entry("images", f"node-{key}.tar", lambda draft: _build(draft, ref, debian, programs))
    return NodeImage(ref, archive)


def _debian() -> Path:
    """A small Debian root with what a node needs."""

    def build(draft: Path) -> None:
        log = cache.log_path("debootstrap")
        log.write_text("")
        suite = versions.DEBIAN_SUITE
        cache.run(
            ["nice", "debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", suite, draft],
            what=f"debootstrap of {suite} (a Debian mirror must be reachable)",
            log=log,
            timeout=DEBOOTSTRAP_DEADLINE_S,
        )
        for folder in (
            "var/cache/apt",
            "var/lib/apt/lists",
            "usr/share/doc",
            "usr/share/man",
            "usr/share/locale",
        ):
            for path in (draft / folder).iterdir():
                cache.remove(path)

    return cache.entry("debian", cache.digest([_PACKAGES, versions.DEBIAN_SUITE]), build)


def _build(draft: Path, ref: str, debian: Path, programs: dict[str, Path]) -> None:
    work = draft.with_name(draft.name + ".work")
    cache.remove(work)
    work.mkdir()
    log = cache.log_path("node-image")
    log.write_text("")
    root, archives = work / "root", work / "archives"
    try:
        # cp keeps owners, links and device files, which shutil does not
        subprocess.run(["cp", "-a", debian, root], check=True, timeout=IMPORT_DEADLINE_S)
        _base(root, programs)
        archives.mkdir()
        _pack_images(root, work, archives, programs)
        cache.run(
            [
                "nice",
                "unshare",
                "--mount",
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                NODE_FILES / "import.sh",
                root,
                archives,
            ],
            what="importing the cluster's images into the node's containerd",
            log=log,
            timeout=IMPORT_DEADLINE_S,
        )
        _check_images(root, (archives / "imported").read_text().split())
        oci.pack(
            draft,
            ref,
            root,
            entrypoint=["/kind/bin/weightsync-entry", "/usr/local/bin/entrypoint", "/sbin/init"],
            env={"container": "docker"},
            stop_signal="SIGRTMIN+3",
            keep_owners=True,
        )
    finally:
        cache.remove(work)


def _base(root: Path, programs: dict[str, Path]) -> None:
    """What kind's images/base/Dockerfile does, and what is different here."""
    files = module_folder("kind") / "images/base/files"
    for path in sorted(files.rglob("*")):
        target = root / path.relative_to(files)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            # Go's module cache keeps no modes
            _write(target, path.read_bytes(), 0o755 if "bin" in target.parts else 0o644)
    units = root / "etc/systemd/system"
    for pattern in (
        "lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service",
        "lib/systemd/system/multi-user.target.wants/*",
        "lib/systemd/system/local-fs.target.wants/*",
        "lib/systemd/system/sockets.target.wants/*udev*",
        "lib/systemd/system/sockets.target.wants/*initctl*",
        "lib/systemd/system/basic.target.wants/*",
        "etc/systemd/system/*.wants/*",
        # kernel.pid_max and fs.protected_* belong to the machine, not to a node
        "usr/lib/sysctl.d/*",
    ):
        for path in list(root.glob(pattern)):
            path.unlink()
    with (root / "etc/systemd/journald.conf").open("a") as journald:
        journald.write("ReadKMsg=no\n")
    (root / "sbin/init").unlink(missing_ok=True)
    (root / "sbin/init").symlink_to("/usr/lib/systemd/systemd")
    wants = units / "multi-user.target.wants"
    for folder in (wants, root / "etc/kubernetes/manifests", root / "kind/manifests", root / "opt/cni/bin"):
        folder.mkdir(parents=True, exist_ok=True)
    for unit in ("kubelet", "containerd", "undo-mount-hacks"):
        (wants / f"{unit}.service").symlink_to(f"/etc/systemd/system/{unit}.service")
    (units / "systemd-binfmt.service").symlink_to("/dev/null")
    for folder_name, names in _PROGRAMS.items():
        for name in names:
            shutil.copy2(programs[name], root / folder_name / name)
    (root / "kind/version").write_text(versions.KUBERNETES)
    _write(root / "etc/containerd/cri-base.json", _base_spec(programs["ctr"]).encode(), 0o644)
    _edit(
        root / "etc/containerd/config.toml",
        ("restrict_oom_score_adj = false", "restrict_oom_score_adj = true"),
        (r'pause:[\d.]+"', f'pause:{versions.PAUSE_TAG}"'),
        (r"(?m)^(  tolerate_missing_hugepages_controller.*)$", r"\1\n  disable_apparmor = true"),
    )
    drop_ins = root / "etc/kubernetes/kubelet.d"
    drop_ins.mkdir(parents=True)
    (drop_ins / "10-weightsync.conf").write_text(_KUBELET_CONFIG)
    _edit(
        root / "etc/default/kubelet",
        (r"(?m)^(KUBELET_EXTRA_ARGS=.*)$", r"\1 --config-dir=/etc/kubernetes/kubelet.d"),
    )
    _write(root / "kind/bin/weightsync-entry", (NODE_FILES / "entry.sh").read_bytes(), 0o755)
    _write(root / "kind/bin/weightsync-cni", (NODE_FILES / "cni.sh").read_bytes(), 0o755)
    (root / "kind/manifests/default-cni.yaml").write_text((NODE_FILES / "cni.yaml").read_text())
    (root / "kind/manifests/default-storage.yaml").write_text(_storage_source()[0])


def _base_spec(ctr: Path) -> str:
    """The OCI spec that containerd starts from, with kind's hook and without limits that cannot be raised."""
    done = subprocess.run([ctr, "oci", "spec"], capture_output=True, text=True, timeout=60, check=True)
    spec = json.loads(done.stdout)
    spec["process"].pop("rlimits", None)
    spec.setdefault("hooks", {})["createContainer"] = [{"path": "/kind/bin/mount-product-files.sh"}]
    return json.dumps(spec)


def _storage_source() -> tuple[str, str, str]:
    """kind's own storage manifest, and the names of the two images in it, from its Go source."""
    source = (module_folder("kind") / "pkg/build/nodeimage/const_storage.go").read_text()
    constants = dict(re.findall(r'const (\w+) = "([^"]+)"', source))
    manifest = re.search(r"defaultStorageManifest = `(.*)`", source, re.DOTALL)
    if not manifest or not {"storageProvisionerImage", "storageHelperImage"} <= constants.keys():
        raise ClusterError(
            f"kind {versions.KIND} keeps its storage manifest elsewhere: nodeimage.py needs a new look"
        )
    text = re.sub(r"` \+ (\w+) \+ `", lambda name: constants[name[1]], manifest[1])
    return text, constants["storageProvisionerImage"], constants["storageHelperImage"]


def _pack_images(node: Path, work: Path, archives: Path, programs: dict[str, Path]) -> None:
    """Every image of the cluster as an archive, each with one program in it."""
    _, provisioner, helper = _storage_source()
    registry = "registry.k8s.io"
    single = {
        **{
            f"{registry}/kube-{part}:{versions.KUBERNETES}": (f"kube-{part}", "usr/local/bin", ())
            for part in ("apiserver", "controller-manager", "scheduler", "proxy")
        },
        f"{registry}/etcd:{versions.ETCD_TAG}": ("etcd", "usr/local/bin", ()),
        f"{registry}/coredns/coredns:{versions.COREDNS}": ("coredns", "", ("/coredns",)),
        provisioner: ("local-path-provisioner", "usr/local/bin", ("local-path-provisioner",)),
    }
    for number, (ref, (name, folder, entrypoint)) in enumerate(single.items()):
        root = work / name
        images.skeleton(root)
        (root / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy2(programs[name], root / folder / name)
        if name == "kube-proxy":
            _add_iptables(node, root)
        oci.pack(archives / f"{number}.tar", ref, root, entrypoint=entrypoint)
        cache.remove(root)
    pause = work / "pause"
    pause.mkdir()
    source = module_folder("kubelet") / "build/pause/linux/pause.c"
    cache.run(
        ["gcc", "-static", "-O2", f"-DVERSION={versions.PAUSE_TAG}", "-o", pause / "pause", source],
        what="compiling pause (libc6-dev must be installed)",
        log=cache.log_path("node-image"),
        timeout=120,
    )
    oci.pack(archives / "pause.tar", f"{registry}/pause:{versions.PAUSE_TAG}", pause, entrypoint=["/pause"])
    box = work / "busybox"
    images.skeleton(box)
    (box / "bin").mkdir()
    shutil.copy2(node / "bin/busybox", box / "bin/busybox")
    applets = subprocess.run(
        [box / "bin/busybox", "--list"], capture_output=True, text=True, timeout=30, check=True
    )
    for applet in applets.stdout.split():
        if applet != "busybox":
            (box / "bin" / applet).symlink_to("busybox")
    oci.pack(archives / "helper.tar", helper, box)
    oci.pack(archives / "cni.tar", CNI_IMAGE, box)


def _add_iptables(node: Path, root: Path) -> None:
    """kube-proxy calls iptables and nft: the node's own, with what they load."""
    for link in ("lib", "lib64", "sbin"):
        (root / "usr" / link).mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(f"usr/{link}")
    programs = [
        node / "usr/sbin" / name for name in ("xtables-nft-multi", "xtables-legacy-multi", "nft", "conntrack")
    ]
    for program in programs:
        shutil.copy2(program, root / "usr/sbin")
    for family in ("iptables", "ip6tables"):
        for suffix in ("", "-save", "-restore"):
            (root / "usr/sbin" / f"{family}{suffix}").symlink_to("xtables-nft-multi")
    (extensions,) = node.glob("usr/lib/*/xtables")
    shutil.copytree(extensions, root / extensions.relative_to(node), symlinks=True)
    names = images.libraries([*programs, *extensions.glob("*.so")], node)
    images.copy_libraries(names, node, root)


def _check_images(root: Path, imported: list[str]) -> None:
    """Fail now, not in `kind create`, when kubeadm wants images that are not in."""
    argv = [
        "chroot",
        str(root),
        "kubeadm",
        "config",
        "images",
        "list",
        f"--kubernetes-version={versions.KUBERNETES}",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    missing = [ref for ref in done.stdout.split() if ref not in imported]
    if done.returncode or missing:
        raise ClusterError(
            f"kubeadm {versions.KUBERNETES} wants images that are not in the node image: "
            f"{' '.join(missing) or done.stderr}; versions.py must name the versions that it asks for"
        )


def _write(path: Path, data: bytes, mode: int) -> None:
    path.write_bytes(data)
    path.chmod(mode)


def _edit(path: Path, *changes: tuple[str, str]) -> None:
    """Regular expression replacements that must all find something."""
    text = path.read_text()
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise ClusterError(
                f"kind {versions.KIND}: {path.name} has no {pattern!r}: nodeimage.py needs a new look"
            )
    path.write_text(text)
