"""A real vLLM server on the CPU as a process of the test, and the operator's side of its agent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from weightsync_engine.protocol.messages import AgentState
from weightsync_engine.protocol.names import (
    DEFAULT_OPERATOR,
    ENV_JWKS,
    ENV_NAMESPACE,
    ENV_POD_IP,
    ENV_POD_NAME,
    ROUTE_PREFIX,
    ROUTE_STATE,
    audience,
)

START_SECONDS = 900.0
"""Of a server on a busy machine; 30 s on an idle one."""
LIVE_WEIGHTS = Path(__file__).parents[2] / "vllm_live_weights"
OBJECT = "7d9f3a52-0000-4000-8000-000000000001"


@contextlib.contextmanager
def in_process(model: Path, **more: Any) -> Iterator[Any]:
    """vLLM in this process, built as a server builds it: plugin, engine, shadow, mover. `more`: of vLLM's arguments."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo", "VLLM_PLUGINS": "weightsync",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        patch.syspath_prepend(LIVE_WEIGHTS)
        import vllm_live_weights

        vllm_live_weights.register()
        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        arguments: dict[str, Any] = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20,
            "skip_tokenizer_init": True, "seed": 0, "weight_transfer_config": {"backend": "weightsync"},
        }  # fmt: skip
        llm = LLM(str(model), **arguments | more)
        core = llm.llm_engine.engine_core
        try:
            yield llm
        finally:
            core.engine_core.model_executor.driver_worker.worker.weight_transfer_engine.shutdown()
            core.shutdown()
            cleanup_dist_env_and_memory()


class Operator:
    """Signs tokens as the cluster does, and speaks to an agent as the operator does."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key()))
        self.jwks = folder / "jwks.json"
        self.jwks.write_text(json.dumps({"keys": [{**public, "kid": "test", "use": "sig", "alg": "ES256"}]}))
        self.term = 1

    def token(self, **claims: Any) -> str:
        said = {
            "iss": "https://kubernetes.default.svc",
            "sub": f"system:serviceaccount:{DEFAULT_OPERATOR}",
            "aud": [audience("rl", "policy")],
            "exp": int(time.time()) + 600,
        } | claims
        return jwt.encode(said, self._key, algorithm="ES256", headers={"kid": "test"})

    def headers(self, **claims: Any) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token(**claims)}"}

    def state(self, url: str) -> AgentState:
        answer = httpx.get(url + ROUTE_STATE, headers=self.headers(), timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return AgentState.model_validate_json(answer.content)

    def post(self, url: str, verb: str, boot_id: str, **body: Any) -> httpx.Response:
        message = {"boot_id": boot_id, "object_uid": OBJECT, "term": self.term} | body
        return httpx.post(
            url + ROUTE_PREFIX + verb, json=message, headers=self.headers(), timeout=60, trust_env=False
        )

    def tell(self, url: str, verb: str, boot_id: str, **body: Any) -> AgentState:
        """A request that must be accepted."""
        answer = self.post(url, verb, boot_id, **body)
        assert answer.status_code == 200, f"{verb}: {answer.status_code} {answer.text}"
        return AgentState.model_validate_json(answer.content)

    def until(
        self, url: str, holds: Callable[[AgentState], bool], seconds: float, what: str = ""
    ) -> AgentState:
        """The first state for which `holds`, or a failure with the last one."""
        deadline = time.monotonic() + seconds
        while True:
            state = self.state(url)
            if holds(state):
                return state
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {what}; the last state: {state}")
            time.sleep(0.05)


class VllmProcess:
    """One vLLM server. `url` once started; `stop` ends it and whatever it leaves behind."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        operator: Operator,
        *,
        tp: int = 1,
        backend: str | None = "weightsync",
        live_weights: bool = True,
        arguments: tuple[str, ...] = (),
        environment: dict[str, str | None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "vllm.log"
        plugins = ["weightsync"] + (["vllm_live_weights"] if live_weights else [])
        changed = (
            {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "WEIGHTSYNC_"))}
            | {
                "VLLM_PLUGINS": ",".join(plugins),
                "PYTHONPATH": os.pathsep.join(
                    [str(installed_live_weights(folder)), os.environ.get("PYTHONPATH", "")]
                ),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_HOST_IP": "127.0.0.1",
                "VLLM_ENGINE_READY_TIMEOUT_S": "850",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                ENV_JWKS: str(operator.jwks),
                ENV_NAMESPACE: "rl",
                ENV_POD_IP: "127.0.0.1",
                ENV_POD_NAME: folder.name,
            }
            | (environment or {})
        )
        self._environment = {name: value for name, value in changed.items() if value is not None}
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "policy", "--skip-tokenizer-init",
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
            "--kv-cache-memory-bytes", "67108864", "--tensor-parallel-size", str(tp),
            "--disable-uvicorn-access-log", *(["--weight-transfer-config", json.dumps({"backend": backend})]
            if backend else []), *arguments,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> VllmProcess:
        """Start, and return at once; `wait_up` waits."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def wait_up(self) -> VllmProcess:
        deadline = time.monotonic() + START_SECONDS
        assert self.process is not None
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health", timeout=5, trust_env=False).status_code == 200:
                    return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"vLLM did not start; {self.log}:\n{self.tail()}")
            time.sleep(0.2)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def tree(self) -> list[int]:
        """Process ids of everything below the server that is alive, movers included."""
        assert self.process is not None
        return descendants(self.process.pid)

    def movers(self) -> list[int]:
        """Process ids of the movers, spares included."""
        return [pid for pid in self.tree() if b"weightsync_engine.mover" in command_line(pid)]

    def kill(self) -> None:
        """SIGKILL of everything, as the end of a container."""
        if self.process is None:
            return
        for pid in [self.process.pid, *self.tree()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)

    def terminate(self, seconds: float) -> float:
        """SIGTERM; returns how long the server took to end. Fails after `seconds`."""
        assert self.process is not None
        below = self.tree()
        started = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            left = [(pid, command_line(pid)[:80]) for pid in below if alive(pid)]
            raise AssertionError(f"vLLM did not stop in {seconds} s; alive: {left}\n{self.tail()}") from None
        finally:
            took = time.monotonic() - started
            for pid in below:
                if command_line(pid) and b"weightsync_engine.mover" not in command_line(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        return took

    # -- requests --------------------------------------------------------------------------------------------

    def complete(self, prompt: list[int], tokens: int) -> httpx.Response:
        """The first answer at tp 2 waits for a compiler: minutes on a busy machine."""
        return httpx.post(
            self.url + "/v1/completions", json=completion(prompt, tokens), timeout=300, trust_env=False
        )

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        answer = self.complete(prompt, tokens)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])


class Stream(threading.Thread):
    """One streaming completion; collects its token ids, and when each came."""

    def __init__(self, server: VllmProcess, prompt: list[int], tokens: int) -> None:
        super().__init__(daemon=True)
        self.server, self.prompt, self.wanted = server, prompt, tokens
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.error = ""
        self.finished = ""
        self.enough = threading.Event()
        """Set: the client goes away at the next token."""

    def run(self) -> None:
        body = completion(self.prompt, self.wanted) | {"stream": True}
        try:
            with httpx.stream(
                "POST", self.server.url + "/v1/completions", json=body, timeout=300, trust_env=False
            ) as answer:
                if answer.status_code != 200:
                    self.error = f"{answer.status_code} {answer.read()!r}"
                    return
                for line in answer.iter_lines():
                    if self.enough.is_set():
                        return
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        got = choice.get("token_ids") or []
                        self.tokens += got
                        self.times += [time.monotonic()] * len(got)
                        self.finished = choice.get("finish_reason") or self.finished
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"


def streaming(prompts: Sequence[tuple[VllmProcess, list[int]]], tokens: int) -> list[Stream]:
    """One request for each (server, prompt), all of them generating by now."""
    streams = [Stream(server, prompt, tokens) for server, prompt in prompts]
    for stream in streams:
        stream.start()
    deadline = time.monotonic() + 60
    while any(len(stream.tokens) < 5 for stream in streams):
        assert time.monotonic() < deadline, [(len(s.tokens), s.error) for s in streams]
        time.sleep(0.01)
    return streams


def completion(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": "policy", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


def installed_live_weights(folder: Path) -> Path:
    """The folder to put on PYTHONPATH so that vLLM finds the test plugin, as if it were installed."""
    site = folder / "site"
    info = site / "vllm_live_weights-0.1.0.dist-info"
    if not info.exists():
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-live-weights\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nvllm_live_weights = vllm_live_weights:register\n"
        )
        (site / "vllm_live_weights").symlink_to(LIVE_WEIGHTS / "vllm_live_weights")
    return site


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return [p for p in found if alive(p)]


@contextlib.contextmanager
def running(server: VllmProcess) -> Iterator[VllmProcess]:
    """A started server, killed at the end whatever happens."""
    try:
        yield server.start().wait_up()
    finally:
        server.kill()
