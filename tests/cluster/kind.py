"""One entry point to a real cluster, for the demo, the tests and CI: `obtain`.

In this order: the context that `$WEIGHTSYNC_KUBE_CONTEXT` names; kind on a Docker engine that can pull its
node image; kind on an engine of our own with a node image that is built here (`dockerd`, `nodeimage`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from tests.cluster import cache, packages, versions
from tests.cluster.apiserver import run_tool
from tests.cluster.binaries import tools
from tests.cluster.dockerd import Dockerd, alive, docker_program, start_time
from tests.cluster.errors import ClusterError
from tests.cluster.images import REPOSITORY
from tests.cluster.nodeimage import NODE_FILES, node_image

CREATE_DEADLINE_S = 600.0
READY_DEADLINE_S = 300.0
PULL_DEADLINE_S = 300.0
CONTEXT_VARIABLE = "WEIGHTSYNC_KUBE_CONTEXT"
# Two clones on one machine need two names: a cluster carries the folders of the clone that made it.
DEFAULT_NAME = os.environ.get("WEIGHTSYNC_CLUSTER", "weightsync")
_HOST = "/host"  # where the machine's folders are inside a node

KindOf = Literal["named", "docker", "built"]


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and how to talk to it."""

    name: str
    kubeconfig: Path
    context: str
    kind_of: KindOf
    created: bool  # by this call of obtain, not found running
    _path: Path = field(repr=False)  # a folder with kubectl, kind and helm
    _docker_host: str | None = field(repr=False, default=None)

    def env(self) -> dict[str, str]:
        """What kubectl, kind, helm (and docker) need to find this cluster; add it to os.environ."""
        found = {
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{self._path}:{os.environ.get('PATH', '')}",
        }
        return found | ({"DOCKER_HOST": self._docker_host} if self._docker_host else {})

    def kubectl(self, *args: str, input: str | None = None, timeout: float = 60) -> str:
        """Run kubectl and return what it prints.

        Raises ClusterError with kubectl's own words when it fails or takes more than `timeout` seconds.
        """
        return self._run("kubectl", "--context", self.context, *args, input=input, timeout=timeout)

    def helm(self, *args: str, timeout: float = 300) -> str:
        """Run helm and return what it prints; errors as for `kubectl`."""
        return self._run("helm", "--kube-context", self.context, *args, timeout=timeout)

    def docker(self, *args: str, timeout: float = 60) -> str:
        """Run docker against the nodes' engine, as in `docker("pause", "NAME-worker")`; errors as above."""
        if self.kind_of == "named":
            raise ClusterError(f"the nodes of the context {self.context} are not containers of ours")
        return self._run("docker", *args, timeout=timeout)

    def load_image(self, archive: Path, timeout: float = 180) -> None:
        """Load an image archive (see `oci.pack`) into every node."""
        if self.kind_of == "named":
            raise ClusterError(
                f"images cannot be loaded into the nodes of the context {self.context}; "
                f"push {archive.name} to a registry that the cluster reads"
            )
        self._run("kind", "load", "image-archive", str(archive), "--name", self.name, timeout=timeout)

    def delete(self) -> None:
        """Delete the cluster, and our own engine after its last cluster; a named one is left alone."""
        if self.kind_of != "named":
            delete(self.name)

    def _run(self, program: str, *args: str, input: str | None = None, timeout: float) -> str:
        path = shutil.which(program, path=self.env()["PATH"]) or program
        return run_tool([path, *args], input=input, timeout=timeout, env={**os.environ, **self.env()})


def obtain(
    name: str = DEFAULT_NAME,
    workers: int = 1,
    mounts: Sequence[Path | str] = (),
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Cluster:
    """The cluster `name`, all nodes Ready and DNS available: the running one, or a new one.

    `mounts` are folders of this machine, besides those of `host_folders()`, that the nodes carry read-only
    under `/host`. A running cluster is used as it is when it is healthy and has at least these folders and
    workers, else it is made anew. A cold build takes minutes, `say` tells of it. Raises ClusterError.
    """
    context = os.environ.get(CONTEXT_VARIABLE)
    if context:
        return _named(context)
    wanted = sorted({*host_folders(), *(str(Path(path).absolute()) for path in mounts)})
    with cache.lock(f"cluster-{name}"):
        running = _find(name)
        if running is not None:
            state = _read_state(name)
            if state["workers"] >= workers and set(wanted) <= set(state["mounts"]) and _healthy(running):
                return running
            say(f"the cluster {name} is not healthy or lacks something: making it anew")
        _delete(name)
        return _create(name, workers, wanted, say)


def delete(name: str = DEFAULT_NAME) -> None:
    """Remove the cluster `name` if there is one, and our own engine when no cluster is left on it."""
    with cache.lock(f"cluster-{name}"):
        _delete(name)


def names() -> list[str]:
    """The clusters that were made here and not deleted yet, half-made ones included."""
    return sorted(path.parent.name for path in cache.folder("clusters").glob("*/state.json"))


def find(name: str = DEFAULT_NAME) -> Cluster | None:
    """The cluster that `obtain` would find running under this name, without a look at its health."""
    context = os.environ.get(CONTEXT_VARIABLE)
    return _named(context) if context else _find(name)


def export_logs(name: str = DEFAULT_NAME) -> Path:
    """Collect the logs of the nodes and of our own engine in a new folder of the cache, and return that."""
    target = cache.folder("logs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    target.mkdir(exist_ok=True)
    cluster = _find(name)
    if cluster is not None:
        with contextlib.suppress(ClusterError):
            cluster._run("kind", "export", "logs", str(target), "--name", name, timeout=120)
        for argv in (["get", "pods,nodes", "-A", "-o", "wide"], ["get", "events", "-A"]):
            with contextlib.suppress(ClusterError):
                (target / f"{argv[1].replace(',', '-')}.txt").write_text(cluster.kubectl(*argv, timeout=20))
    for log in ("dockerd", f"portforward-{name}", f"kind-{name}"):
        with contextlib.suppress(OSError):
            shutil.copy2(cache.log_path(log), target)
    return target


def host_folders() -> list[str]:
    """The folders of this machine that a pod needs to run its Python with all that is installed in it."""
    executable = Path(sys.executable).resolve()
    folders = [
        "/usr",
        "/etc/alternatives",
        sys.base_prefix,
        str(executable.parents[1]),
        sys.prefix,
        str(REPOSITORY),
    ]
    folders = sorted({str(Path(folder).absolute()) for folder in folders if Path(folder).is_dir()})
    return [f for f in folders if not any(Path(other) in Path(f).parents for other in folders)]


def host_python_volumes() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and volumeMounts for a pod that runs `sys.executable` out of `images.host_env_image()`.

    Every folder has the same path as on this machine; all but /tmp are read-only.
    """
    volumes: list[dict[str, Any]] = []
    volume_mounts: list[dict[str, Any]] = []
    for number, folder in enumerate(host_folders()):
        volumes.append({"name": f"host-{number}", "hostPath": {"path": _HOST + folder, "type": "Directory"}})
        volume_mounts.append({"name": f"host-{number}", "mountPath": folder, "readOnly": True})
    volumes.append({"name": "tmp", "emptyDir": {}})
    volume_mounts.append({"name": "tmp", "mountPath": "/tmp"})
    return volumes, volume_mounts


def _named(context: str) -> Cluster:
    path = _tools("named")
    configs = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    cluster = Cluster(context, Path(configs), context, "named", False, path)
    try:
        cluster.kubectl("get", "--raw", "/readyz", timeout=20)
    except ClusterError as error:
        raise ClusterError(
            f"{CONTEXT_VARIABLE}={context} names a cluster that does not answer; set KUBECONFIG to the file "
            f"that has this context, or unset the variable: {error}"
        ) from None
    return cluster


def _folder(name: str) -> Path:
    return cache.folder("clusters", name)


def _read_state(name: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((_folder(name) / "state.json").read_text())
    except (OSError, ValueError):
        return {}
    return state


def _write_state(name: str, state: dict[str, Any]) -> None:
    draft = _folder(name) / "state.json.draft"
    draft.write_text(json.dumps(state))
    draft.replace(_folder(name) / "state.json")


def _find(name: str) -> Cluster | None:
    state = _read_state(name)
    if not state:
        return None
    return _cluster(name, state["kind_of"], created=False)


def _cluster(name: str, kind_of: KindOf, *, created: bool) -> Cluster:
    path = _tools(kind_of)
    host = Dockerd().host if kind_of == "built" else None
    return Cluster(name, _folder(name) / "kubeconfig", f"kind-{name}", kind_of, created, path, host)


def _tools(kind_of: KindOf) -> Path:
    """A folder with kubectl, kind and helm: this machine's own, where they fit, else built ones."""
    wanted = ("kubectl", "helm") if kind_of == "named" else ("kubectl", "helm", "kind")
    programs: dict[str, str] = {}
    if kind_of == "built":
        # The docker command must fit dockerd, and the rest the node image.
        programs["docker"] = str(docker_program())
    else:
        programs |= {name: path for name in wanted if (path := shutil.which(name)) is not None}
    built = tools(*(name for name in wanted if name not in programs))
    if not programs:
        return built

    def build(draft: Path) -> None:
        shutil.copytree(built, draft, symlinks=True)
        for name, target in programs.items():
            (draft / name).symlink_to(target)

    return cache.entry("tools", cache.digest([str(built), programs]), build)


def _healthy(cluster: Cluster) -> bool:
    try:
        if cluster.kind_of == "built" and not _forwarding(cluster.name):
            _forward(cluster.name)
        cluster.kubectl("get", "--raw", "/readyz", "--request-timeout=20s", timeout=30)
        _wait_ready(cluster, 60)
    except ClusterError:
        return False
    return True


def _wait_ready(cluster: Cluster, deadline_s: float) -> None:
    """`kind create --wait` waits for the control plane's node only."""
    wait = f"--timeout={deadline_s:.0f}s"
    cluster.kubectl("wait", "--for=condition=Ready", "nodes", "--all", wait, timeout=deadline_s + 10)
    cluster.kubectl("-n", "kube-system", "rollout", "status", "deploy/coredns", wait, timeout=deadline_s + 10)


def _create(name: str, workers: int, mounts: list[str], say: Callable[[str], None]) -> Cluster:
    begun = time.monotonic()
    kind_of: KindOf = "docker" if _docker_can_pull(say) else "built"
    if kind_of == "built":
        packages.need(say)
        say("no Docker engine that can pull: the node image is built here, unless it is in the cache")
        node = node_image()
    path = _tools(kind_of)
    # Written before anything is made, so that whatever is made is found and deleted.
    port = _free_port()
    state = {"kind_of": kind_of, "workers": workers, "mounts": mounts, "port": port}
    _write_state(name, state)
    try:
        image = versions.STOCK_NODE_IMAGE
        if kind_of == "built":
            image = node.ref
            with cache.lock("dockerd"):
                engine = Dockerd()
                engine.start()
                engine.load(node)
            _forward(name)
        cluster = _cluster(name, kind_of, created=True)
        say(f"creating the cluster {name}")
        config = _folder(name) / "kind.yaml"
        config.write_text(yaml.safe_dump(_config(workers, mounts, port)))
        log = cache.log_path(f"kind-{name}")
        log.write_text("")
        create = [str(path / "kind"), "create", "cluster", "--name", name, "--image", image, "--retain"]
        cache.run(
            [*create, "--config", config, "--kubeconfig", cluster.kubeconfig, "--wait", "0s"],
            what=f"creating the cluster {name}",
            log=log,
            timeout=CREATE_DEADLINE_S,
            env=cluster.env(),
        )
        _wait_ready(cluster, READY_DEADLINE_S)
    except ClusterError as error:
        where = export_logs(name)
        _delete(name)
        raise ClusterError(f"{error}\nall logs: {where}") from None
    except BaseException:
        _delete(name)
        raise
    say(f"the cluster {name} is up after {time.monotonic() - begun:.0f} s")
    return cluster


def _config(workers: int, mounts: list[str], port: int) -> dict[str, Any]:
    extra = [{"hostPath": path, "containerPath": _HOST + path, "readOnly": True} for path in mounts]
    roles = ["control-plane"] + ["worker"] * workers
    # Tests kill the same container again and again: a kubelet that waits ever longer would be all that they measure.
    kubelet = {"kind": "KubeletConfiguration", "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"}}
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "networking": {"apiServerAddress": "127.0.0.1", "apiServerPort": port},
        "kubeadmConfigPatches": [yaml.safe_dump(kubelet)],
        "nodes": [{"role": role, "extraMounts": extra} for role in roles],
    }


def _docker_can_pull(say: Callable[[str], None]) -> bool:
    """Whether the machine's own Docker engine answers and has, or gets, kind's node image."""
    docker = shutil.which("docker")
    if docker is None or os.environ.get("DOCKER_HOST") == Dockerd().host:
        return False
    try:
        run_tool([docker, "version"], timeout=10)
    except ClusterError:
        return False
    with contextlib.suppress(ClusterError):
        run_tool([docker, "image", "inspect", versions.STOCK_NODE_IMAGE], timeout=20)
        return True
    say(f"pulling {versions.STOCK_NODE_IMAGE}")
    try:
        run_tool([docker, "pull", "--quiet", versions.STOCK_NODE_IMAGE], timeout=PULL_DEADLINE_S)
    except ClusterError as error:
        say(f"the Docker engine cannot pull ({error})")
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _forwarding(name: str) -> bool:
    state = _read_state(name)
    return alive(state.get("forwarder", 0), state.get("forwarder_start", ""))


def _forward(name: str) -> None:
    """Make the API server's port answer on this machine: our own engine's 127.0.0.1 is another one."""
    state = _read_state(name)
    process = Dockerd().process()
    if process is None:
        raise ClusterError(f"our own Docker engine does not run; see {cache.log_path('dockerd')}")
    with cache.log_path(f"portforward-{name}").open("w") as log:
        # Ends by itself with the engine's process.
        forwarder = subprocess.Popen(
            [sys.executable, "-I", "-S", NODE_FILES / "portforward.py", str(process), str(state["port"])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    state |= {"forwarder": forwarder.pid, "forwarder_start": start_time(forwarder.pid)}
    _write_state(name, state)


def _delete(name: str) -> None:
    state = _read_state(name)
    if state.get("kind_of") == "docker":
        cluster = _cluster(name, "docker", created=False)
        cluster._run("kind", "delete", "cluster", "--name", name, timeout=120)
    elif state.get("kind_of") == "built":
        with cache.lock("dockerd"):
            _delete_built(name, state)
    cache.remove(_folder(name))


def _delete_built(name: str, state: dict[str, Any]) -> None:
    engine = Dockerd()
    if alive(state.get("forwarder", 0), state.get("forwarder_start", "")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["forwarder"], 9)
    if engine.process() is not None and engine.answers():
        # What kind would do, without its program, and quicker.
        with contextlib.suppress(ClusterError):
            nodes = engine.docker("ps", "-aq", "--filter", f"label=io.x-k8s.kind.cluster={name}").split()
            if nodes:
                engine.docker("rm", "--force", "--volumes", *nodes, timeout=60)
    # By their states, not their containers: one that is just being made may have none yet.
    if not any(other != name and _read_state(other).get("kind_of") == "built" for other in names()):
        engine.stop()
