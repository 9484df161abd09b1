"""The real parts of a soak, on this machine, without a kubelet: API server, operator, trainer, vLLM servers."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import yaml
from tests.cluster import ApiServer
from tests.integration.control.conftest import CHART, SYSTEM, Operator, render
from tests.integration.vllm import tiny
from tests.integration.vllm.serving import VllmProcess, descendants, free_port

from weightsync_engine.protocol.names import (
    ENV_JWKS,
    ENV_NAME,
    ENV_NAMESPACE,
    ENV_POD_IP,
    ENV_POD_NAME,
    ENV_POD_UID,
    ENV_PORT,
    GATE_IN_SYNC,
    LABEL_ROLE,
    LABEL_SYNC,
)

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE, NAME = "soak", "policy"
HOST = "127.0.0.1"
MARK = "WEIGHTSYNC_SOAK_RUN"
"""Environment variable by which processes of this run are known, orphans too."""
CHECKPOINTS = 3
SPEC = {
    "trigger": {"type": "OnPublish"},
    "deadlines": {"joinSeconds": 40, "prepareSeconds": 20, "transferSeconds": 15, "commitSeconds": 20},
    "retry": {"backoffSeconds": 1, "maxBackoffSeconds": 2},
}


class SoakError(AssertionError):
    """Something that must never happen did."""


class Trainer:
    """Two ranks in one pod."""

    RANKS = 2

    def __init__(self, folder: Path, checkpoints: list[Path], environment: dict[str, str]) -> None:
        port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.logs = [folder / f"trainer-{rank}.log" for rank in range(self.RANKS)]
        for rank, log in enumerate(self.logs):
            env = {
                **os.environ, **environment,
                "RANK": str(rank), "WORLD_SIZE": str(self.RANKS), "MASTER_ADDR": HOST, "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder),
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            }  # fmt: skip
            with log.open("ab") as out:
                script = str(Path(__file__).with_name("trainer_main.py"))
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, script, *map(str, checkpoints)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=out,
                        env=env,
                        bufsize=0,
                    )
                )

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """The next line of every rank."""
        deadline = time.monotonic() + seconds
        lines = []
        for process, log in zip(self.processes, self.logs, strict=True):
            assert process.stdout is not None
            data = b""
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while not data.endswith(b"\n"):
                    if not selector.select(max(deadline - time.monotonic(), 0.0)):
                        raise SoakError(f"a trainer rank said nothing for {seconds:g} s; {log}:\n{tail(log)}")
                    byte = os.read(process.stdout.fileno(), 1)
                    if not byte:
                        raise SoakError(f"a trainer rank ended; {log}:\n{tail(log)}")
                    data += byte
            lines.append(json.loads(data))
        return lines

    def publish(self, version: str, checkpoint: int) -> float:
        """Milliseconds that the slower rank's call took."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"publish {version} {checkpoint}\n".encode())
        said = self.read(90)
        if errors := [s["error"] for s in said if s["error"]]:
            raise SoakError(f"publish({version!r}) failed: {errors[0]}")
        return max(float(s["ms"]) for s in said)

    def below(self, word: bytes) -> list[int]:
        return [pid for p in self.processes for pid in descendants(p.pid) if comm(pid).startswith(word)]

    def agent(self) -> int | None:
        for process in self.processes:
            for pid in descendants(process.pid):
                if b"weightsync_engine.agent" in _cmdline(pid):
                    return pid
        return None

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(30)


class World:
    """`with World(...) as world`: everything up, and nothing left behind."""

    def __init__(self, folder: Path, servers: int, run: str) -> None:
        self.folder = folder
        self._servers = servers
        self._stack = contextlib.ExitStack()
        self._environment = {MARK: run}
        self.run_id = run
        self.api_lock = threading.Lock()
        """Held by whoever stops and starts the API server."""
        self.operator_lock = threading.Lock()
        self.operator_ends = 0
        """How often it ended by itself."""

    def __enter__(self) -> World:
        os.environ[MARK] = self.run_id  # inherited by all that is started from here
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()
        os.environ.pop(MARK, None)

    def _start(self) -> None:
        self.checkpoints = [
            tiny.make_checkpoint(self.folder / f"model-{i}", i, tied=False, kv_heads=1)
            for i in range(CHECKPOINTS)
        ]
        self.api = self._stack.enter_context(ApiServer())
        for crd in sorted((CHART / "crds").iterdir()):
            self.api.apply(yaml.safe_load(crd.read_text()))
        self.api.kubectl("wait", "--for=condition=Established", "crd/weightsyncs.weightsync.dev")
        self.api.namespace(SYSTEM)
        self.api.namespace(NAMESPACE)
        self.api.apply(*render(SYSTEM))
        context = ssl.create_default_context(cafile=str(self.api.admin.ca))
        context.load_cert_chain(self.api.admin.cert, self.api.admin.key)
        self._http = httpx.Client(base_url=self.api.url, verify=context, timeout=5, trust_env=False)
        self._stack.callback(self._http.close)
        jwks = self.folder / "jwks.json"
        jwks.write_text(json.dumps(self.api.http.get("/openid/v1/jwks").json()))
        self._environment |= {ENV_JWKS: str(jwks), ENV_NAMESPACE: NAMESPACE, ENV_NAME: NAME, ENV_POD_IP: HOST}

        self.servers: list[VllmProcess] = []
        for number in range(self._servers):
            server = VllmProcess(
                self.checkpoints[0],
                self.folder / f"vllm-{number}",
                SimpleNamespace(jwks=jwks),  # type: ignore[arg-type]
                environment={**self._environment, "TMPDIR": str(self.folder)},
            )
            server._environment[ENV_POD_UID] = self._pod(f"vllm-{number}", "inference", server.port)
            self.servers.append(server)
            self._stack.callback(server.kill)
            server.start()
        port = free_port()
        uid = self._pod("trainer-0", "trainer", port)
        mine = {ENV_POD_NAME: "trainer-0", ENV_POD_UID: uid, ENV_PORT: str(port)}
        self.trainer = Trainer(self.folder, self.checkpoints, self._environment | mine)
        self._stack.callback(self.trainer.close)
        self.trainer.read(120)
        self.operator = Operator(self.api, self.folder)
        self._stack.callback(self._stop_operator)
        self.operator.start()
        self.api.apply(
            {
                "apiVersion": "weightsync.dev/v1alpha1",
                "kind": "WeightSync",
                "metadata": {"name": NAME, "namespace": NAMESPACE},
                "spec": SPEC,
            }
        )
        for server in self.servers:
            server.wait_up()

    def _stop_operator(self) -> None:
        with contextlib.suppress(Exception):
            self.operator.stop()

    def _pod(self, name: str, role: str, port: int) -> str:
        spec: dict[str, Any] = {
            "labels": {LABEL_SYNC: NAME, LABEL_ROLE: role},
            "containers": [
                {"name": "main", "image": "none", "ports": [{"name": "weightsync", "containerPort": port}]}
            ],
        }
        if role == "inference":
            spec["readinessGates"] = [{"conditionType": GATE_IN_SYNC}]
        uid = str(self.api.pod(NAMESPACE, name, **spec)["metadata"]["uid"])
        self.api.set_pod_status(NAMESPACE, name, ip=HOST)
        return uid

    # -- looking ---------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        """The object's status; None while the API server does not answer."""
        path = f"/apis/weightsync.dev/v1alpha1/namespaces/{NAMESPACE}/weightsyncs/{NAME}"
        try:
            answer = self._http.get(path)
            return dict(answer.json().get("status", {})) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def gates(self) -> dict[str, str]:
        """Pod -> status of its gate."""
        items = self._http.get(f"/api/v1/namespaces/{NAMESPACE}/pods").json()["items"]
        return {
            item["metadata"]["name"]: condition["status"]
            for item in items
            for condition in item["status"].get("conditions", ())
            if condition["type"] == GATE_IN_SYNC
        }

    def keep_operator(self) -> None:
        """As a kubelet does: an operator that ended by itself, for want of its Lease, is started again."""
        if not self.operator_lock.acquire(blocking=False):
            return
        try:
            process = self.operator._process
            if process is not None and process.poll() is not None:
                self.operator_ends += 1
                self.operator._process = None
                self.operator.start()
        finally:
            self.operator_lock.release()

    def operator_pid(self) -> int | None:
        process = self.operator._process
        return process.pid if process is not None else None

    def movers(self) -> dict[str, list[int]]:
        """Where -> movers that take part (no spares)."""
        found = {"trainer": self.trainer.below(b"ws-mover")}
        for number, server in enumerate(self.servers):
            pids = (
                [pid for pid in server.tree() if comm(pid).startswith(b"ws-mover")] if server.process else []
            )
            found[f"vllm-{number}"] = pids
        return found

    def processes(self) -> Iterator[int]:
        """Every living process of this run, but this one and what it does not own."""
        mark = f"{MARK}={self.run_id}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        yield int(entry.name)


def tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def comm(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return b""


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def send(pid: int | None, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    if pid is None:
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
