"""The programs that a cluster is made of, built from the Go module proxy when they are first asked for.

Each comes from its own little Go module that requires exactly one version (see `versions`), so nothing of one
project moves the dependencies of another, and the bare API server needs only three of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cache, versions
from tests.cluster.errors import ClusterError

BUILD_DEADLINE_S = 2400.0
_KUBERNETES = "k8s.io/kubernetes"
_COMPONENT = "k8s.io/component-base/version"
_CNI = "github.com/containernetworking/plugins"
_CONTAINERD = "github.com/containerd/containerd/v2"


@dataclass(frozen=True)
class Recipe:
    """One program: `package` of `module` at `version`."""

    module: str
    version: str
    package: str
    ldflags: str = ""
    tags: str = ""
    cgo: bool = False


def _kubernetes(name: str) -> Recipe:
    major, minor = versions.KUBERNETES.removeprefix("v").split(".")[:2]
    stamp = {"gitVersion": versions.KUBERNETES, "gitMajor": major, "gitMinor": minor}
    return Recipe(
        _KUBERNETES,
        versions.KUBERNETES,
        f"{_KUBERNETES}/cmd/{name}",
        ldflags=" ".join(f"-X {_COMPONENT}.{key}={value}" for key, value in stamp.items()),
    )


_CONTAINERD_LD = f"-X {_CONTAINERD}/version.Version={versions.CONTAINERD}"
_CONTAINERD_TAGS = "no_btrfs no_zfs no_devmapper no_aufs"

RECIPES: dict[str, Recipe] = {
    **{
        name: _kubernetes(name)
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kube-proxy",
            "kubelet",
            "kubeadm",
            "kubectl",
        )
    },
    "etcd": Recipe("go.etcd.io/etcd/server/v3", versions.ETCD, "go.etcd.io/etcd/server/v3"),
    "coredns": Recipe(
        "github.com/coredns/coredns",
        versions.COREDNS,
        "github.com/coredns/coredns",
        ldflags="-X github.com/coredns/coredns/coremain.GitCommit=weightsync",
    ),
    "crictl": Recipe("sigs.k8s.io/cri-tools", versions.CRICTL, "sigs.k8s.io/cri-tools/cmd/crictl"),
    **{
        name: Recipe(_CNI, versions.CNI_PLUGINS, f"{_CNI}/plugins/{folder}/{name}")
        for name, folder in (
            ("host-local", "ipam"),
            ("loopback", "main"),
            ("ptp", "main"),
            ("portmap", "meta"),
        )
    },
    "local-path-provisioner": Recipe(
        "github.com/rancher/local-path-provisioner",
        versions.LOCAL_PATH,
        "github.com/rancher/local-path-provisioner",
    ),
    "kind": Recipe("sigs.k8s.io/kind", versions.KIND, "sigs.k8s.io/kind"),
    "helm": Recipe(
        "helm.sh/helm/v4",
        versions.HELM,
        "helm.sh/helm/v4/cmd/helm",
        ldflags=f"-X helm.sh/helm/v4/internal/version.version={versions.HELM}",
    ),
    "containerd": Recipe(
        _CONTAINERD,
        versions.CONTAINERD,
        f"{_CONTAINERD}/cmd/containerd",
        _CONTAINERD_LD,
        _CONTAINERD_TAGS,
        True,
    ),
    "ctr": Recipe(
        _CONTAINERD, versions.CONTAINERD, f"{_CONTAINERD}/cmd/ctr", _CONTAINERD_LD, _CONTAINERD_TAGS, True
    ),
    "containerd-shim-runc-v2": Recipe(
        _CONTAINERD, versions.CONTAINERD, f"{_CONTAINERD}/cmd/containerd-shim-runc-v2"
    ),
    "runc": Recipe(
        "github.com/opencontainers/runc",
        versions.RUNC,
        "github.com/opencontainers/runc",
        ldflags=f"-X main.version={versions.RUNC.removeprefix('v')}",
        tags="seccomp",
        cgo=True,
    ),
}


def binary(name: str) -> Path:
    """The path of the program `name`, built now if missing (minutes when Go's own cache is cold)."""
    return binaries(name)[name]


def binaries(*names: str) -> dict[str, Path]:
    """The paths of several programs; those of one module that are missing are built by one `go build`."""
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise ClusterError(f"no recipe for {', '.join(unknown)}; there are: {', '.join(sorted(RECIPES))}")
    paths = {name: _place(name) for name in names}
    groups: dict[tuple[str, str, str, bool], list[str]] = {}
    for name, path in paths.items():
        if not path.exists():
            recipe = RECIPES[name]
            groups.setdefault((recipe.module, recipe.ldflags, recipe.tags, recipe.cgo), []).append(name)
    for missing in groups.values():
        _build(missing)
    return paths


def tools(*names: str) -> Path:
    """A folder for PATH that holds just these programs under their plain names."""
    targets = {name: str(path) for name, path in binaries(*names).items()}

    def build(draft: Path) -> None:
        draft.mkdir()
        for name, target in targets.items():
            (draft / name).symlink_to(target)

    return cache.entry("tools", cache.digest(targets), build)


def module_folder(name: str) -> Path:
    """The source of the module that the program `name` is built from: read-only, in Go's own cache."""
    recipe = RECIPES[name]
    return Path(_download(_go(), recipe.module, recipe.version)["Dir"])


def _place(name: str) -> Path:
    recipe = RECIPES[name]
    return cache.folder("bin") / f"{name}-{recipe.version}-{cache.digest(vars(recipe))}"


def _go() -> str:
    """Go's command, checked."""
    wanted = ".".join(map(str, versions.GO_MIN))
    how = f"install Go {wanted} or newer and put it into PATH"
    go = shutil.which("go")
    if go is None:
        raise ClusterError(f"`go` is not in PATH, and the test cluster's programs are built with it: {how}")
    # Asked inside a module that wants GO_MIN, a slightly older Go fetches that toolchain by itself.
    home = cache.folder("go")
    (home / "go.mod").write_text(f"module weightsync.dev/tools\n\ngo {wanted}\n")
    answer = subprocess.run([go, "env", "GOVERSION"], cwd=home, capture_output=True, text=True, timeout=300)
    version = re.match(r"go(\d+)\.(\d+)", answer.stdout)
    if answer.returncode or not version or (int(version[1]), int(version[2])) < versions.GO_MIN:
        said = (answer.stdout + answer.stderr).strip()
        raise ClusterError(f"{go} is too old or broken (it says: {said}): {how}")
    return go


def _download(go: str, module: str, version: str) -> dict[str, str]:
    done = subprocess.run(
        [go, "mod", "download", "-json", f"{module}@{version}"],
        cwd=cache.folder("go"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise ClusterError(
            f"cannot get the Go module {module}@{version}: {(done.stdout + done.stderr).strip()}\n"
            "the Go module proxy must be reachable (GOPROXY, HTTPS_PROXY)"
        )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def _build(names: list[str]) -> None:
    """Build programs that share one module, flags and tags."""
    recipe = RECIPES[names[0]]
    group = recipe.module.replace("/", "_")
    with cache.lock(f"go-{group}"):
        names = [name for name in names if not _place(name).exists()]
        if not names:
            return
        go = _go()
        log = cache.log_path(f"go-{group}")
        log.write_text("")
        # A fresh module each time: minimal version selection makes it come out the same.
        home = cache.folder("go", group)
        cache.remove(home)
        out = home / "out"
        out.mkdir(parents=True)
        (home / "go.mod").write_text(_go_mod(go, recipe))
        # All programs of the module, whichever is asked for: all are built from the same dependencies.
        packages = sorted(other.package for other in RECIPES.values() if other.module == recipe.module)
        imports = "".join(f'import _ "{package}"\n' for package in packages)
        (home / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\n{imports}")
        # No debugging information: it is stripped anyway, and making it costs a good part of the build.
        flags = ["-trimpath", "-gcflags", "all=-dwarf=false", "-tags", recipe.tags]
        flags += ["-ldflags", f"-s -w {recipe.ldflags}".rstrip()]
        steps = [
            ([go, "mod", "tidy"], "resolving the dependencies of"),
            ([go, "build", *flags, "-o", f"{out}/", *(RECIPES[name].package for name in names)], "building"),
        ]
        for argv, what in steps:
            cache.run(
                ["nice", *argv],
                what=f"{what} {', '.join(names)} {recipe.version}",
                log=log,
                timeout=BUILD_DEADLINE_S,
                cwd=home,
                env={"CGO_ENABLED": "1" if recipe.cgo else "0", "GOFLAGS": "", "GOWORK": "off"},
            )
        for name in names:
            # Go names a program after its package's folder, without the major version.
            built = re.sub(r"/v\d+$", "", RECIPES[name].package).rsplit("/", 1)[-1]
            (out / built).rename(_place(name))
        cache.remove(out)


def _go_mod(go: str, recipe: Recipe) -> str:
    wanted = ".".join(map(str, versions.GO_MIN))
    lines = ["module weightsync.dev/tools", f"go {wanted}", f"require {recipe.module} {recipe.version}"]
    if recipe.module == _KUBERNETES:
        # Its staging modules are published as v0.x, but it requires them as v0.0.0 with local replacements.
        own = Path(_download(go, recipe.module, recipe.version)["GoMod"]).read_text()
        staged = recipe.version.replace("v1.", "v0.", 1)
        for name in re.findall(r"^\s+(k8s\.io/\S+) => \./staging", own, re.MULTILINE):
            lines.append(f"replace {name} => {name} {staged}")
    return "\n\n".join(lines) + "\n"
