"""`Publisher`: takes snapshots of the weights, in the wire dtype, and hands them to whoever carries them.

One snapshot slot: it holds the newest version until the next publish fills it again.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..agent.config import AgentConfig
from ..agent.supervisor import AgentSupervisor
from ..layout.tensors import SourceParameter, TrainerManifest
from ..mover.memory import Needs, check_memory, staging_bytes
from ..mover.slab import Slab, plan_slab
from ..mover.supervisor import MoverSupervisor
from ..protocol.messages import rounded_words, rounding
from ..protocol.mover import MoverOutcome
from ..protocol.names import DEFAULT_TRAINER_PORT, ENV_POD_UID, ENV_PORT
from ..transport.copies import Copies
from .agreement import Peers, peers
from .handle import Handle, PublishError
from .merge import merge, pack, unpack
from .naming import Names
from .sources import Held, Sources, WireDtype, fingerprint

log = logging.getLogger(__name__)

VERSION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
STUCK_SECONDS = 600.0
"""A travelling version of which nothing is heard for this long is taken to travel no more."""
BUSY_LOOK_SECONDS = 0.5
CLOSED_SECONDS = 5.0
"""How long a rank whose publisher is closed waits for the others, so that all hear of it at once."""
MAX_ERROR = 2000

WHAT_TO_DO = (
    "shard the weights over more ranks, free memory before Publisher(...), lower WEIGHTSYNC_STAGING_MIB, or hold the "
    "snapshot in host memory with device='cpu' (for servers whose transport is gloo)"
)

OnBusy = Literal["skip", "wait"]


def warn_of_rounding(sources: Iterable[SourceParameter]) -> None:
    """What the object's condition says too, where the one who can change it looks first."""
    wide = sorted(rounded_words(s.name, s.rounded_from, s.dtype) for s in sources if s.rounded_from)
    if wide:
        log.warning("%s; `dtype` says in what they travel", rounding(len(wide), wide))


class Publisher:
    """Publishes a model's weights; made on every trainer rank, after torch.distributed is up.

    `model`: an nn.Module (FSDP2, DTensors, DDP or plain), or an iterable of (checkpoint name, tensor or
    DTensor) whose tensors stay the same objects. Tensors of one storage (tied weights) are sent once, under
    the first name.
    `names`: what the checkpoint calls the trainer's tensors. By default the rules know transformers' models
    (also inside DDP, FSDP2, torch.compile or PEFT), their stacked experts included; other names stay as they
    are. A mapping overrides the rules for the names in it, a function overrides them altogether
    (`checkpoint_names(model)` gives the rules to call from it). Each answers for a trainer's name with a
    checkpoint name, None (not sent), or a list of (checkpoint name, at, shape): regions of the whole tensor,
    `shape` without the leading dimensions that the checkpoint parameter lacks.
    `dtype`: wire dtype of all floating point tensors, or by checkpoint or trainer's name; default: what FSDP
    computes with, else as trained. It must be the one in which the servers hold them. A cast that loses what the
    trainer means to keep (`trainer/precision.py` says which) is logged, and shown by the object.
    `timeout`: seconds that any rank waits for the others, or for the agent, at most.
    `port`: where the pod's agent listens; default: WEIGHTSYNC_PORT, else 7077.
    `device`: where the snapshot is held; default: where the weights are. It decides by what they travel.
    `agent`: whether the pod gets an agent, through which the operator drives the rounds; without one the caller
    drives the rank's mover (`mover_socket`), as `weightsync_engine.vllm.trainer` does.

    A single process without torch.distributed is a trainer of world size 1.

    Raises `PublishError`, the same on all ranks, for whatever cannot work.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, torch.Tensor]],
        *,
        names: Names = None,
        dtype: WireDtype = None,
        timeout: float = 120.0,
        port: int | None = None,
        device: torch.device | str | None = None,
        agent: bool = True,
    ) -> None:
        self._timeout = timeout
        self._with_agent = agent
        self._closed = False
        self._owner = os.getpid()
        self._slab: Slab | None = None
        self._mover: MoverSupervisor | None = None
        self._agent: AgentSupervisor | None = None
        self._run_dir: Path | None = None
        self._handles: dict[str, Handle] = {}
        self._used: set[str] = set()
        self._sequence = 0
        self._held_version: str | None = None
        self._travelling: dict[str, float] = {}
        self._copies: Copies | None = None
        self._copied: list[Held] = []
        """Whose memory `_copies` copies."""
        self._checked: list[Held] = []
        """What was last found to be as it should."""
        self._peers: Peers = peers(timeout)
        try:
            self._begin(model, names, dtype, port, device)
        except BaseException:
            self._let_go()
            raise
        atexit.register(_close, weakref.ref(self))

    # -- making it -------------------------------------------------------------------------------------------

    def _begin(
        self,
        model: Any,
        names: Names,
        dtype: WireDtype,
        port: int | None,
        device: torch.device | str | None,
    ) -> None:
        error, held = "", list[Held]()
        said: dict[str, Any] = {"pod": _pod_key(), "run_id": uuid.uuid4().hex}
        entries = b""
        try:
            self._sources = Sources(model, names, dtype)
            held = self._sources.held()
            entries = pack([{**h.describe(), "fingerprint": fingerprint(h)} for h in held])
            said["port"] = _port(port)
        except Exception as e:
            error = _words(e)
        every = self.agree("Publisher(...)", error, said)
        shared = self._peers.share(entries, "Publisher(...)", self._timeout)
        read = {data: unpack(data) for data in shared}
        sources = merge([read[data] for data in shared])
        pod = [r for r, rank in enumerate(every) if rank["pod"] == said["pod"]]
        for ranks in _by_pod(every).values():
            if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
                raise PublishError(
                    f"the trainer ranks of one pod must follow each other, one pod has {ranks}"
                )
        local_rank, run_id = pod.index(self._peers.rank), every[0]["run_id"]

        error = ""
        if local_rank == 0:
            try:
                # Under /tmp by default: a unix socket's path is short.
                self._run_dir = Path(tempfile.mkdtemp(prefix="weightsync-"))
            except OSError as e:
                error = f"no folder for the movers' sockets: {e}"
        where = self.agree("Publisher(...)", error, {"run_dir": str(self._run_dir or "")})
        run_dir = Path(where[pod[0]]["run_dir"])

        error, path = "", ""
        try:
            self._places, size = plan_slab(
                (h.name, tuple(h.local.shape), str(h.wire).removeprefix("torch."))
                for h in held
                if h.local.numel()
            )
            place, staging = self._device(device, held), 0
            if place.type == "cuda":
                staging = staging_bytes()
                check_memory(Needs.of("snapshot", size, staging), place, WHAT_TO_DO)
            self._slab = Slab.create(size, place)
            self._views = {name: self._slab.tensor(place) for name, place in self._places.items()}
            if place.type == "cuda":
                # The driver loads a kernel at its first launch, and waits for the stream's earlier work to do so.
                self._copy(held)
            self._layout = _layout(held)
            self._manifest = TrainerManifest(self._peers.rank, sources, dict(self._places))
            self._mover = MoverSupervisor(
                "trainer",
                local_rank,
                self._slab,
                self._manifest,
                run_dir,
                on_outcome=self._on_outcome,
                staging_bytes=staging,
            )
            path = str(self._mover.socket_path)
        except Exception as e:
            error = _words(e)
        every_path = self.agree("Publisher(...)", error, {"path": path})

        error = ""
        try:
            if local_rank == 0 and self._with_agent:
                self._agent = AgentSupervisor(
                    AgentConfig(
                        parent=os.getpid(),
                        run_id=run_id,
                        ranks=tuple(pod),
                        world_size=self._peers.world,
                        movers=tuple(every_path[r]["path"] for r in pod),
                        run_dir=str(run_dir),
                        port=said["port"],
                    )
                )
                if why := self._agent.wait_up(self._timeout):
                    error = f"the agent of pod {socket.gethostname()} is not up: {why}"
            error = error or self._wait_mover()
        except Exception as e:
            error = _words(e)
        self.agree("Publisher(...)", error, {}, patience=2.0)
        if self._sources.aliases:
            log.info("tied weights are sent once: %s", self._sources.aliases)
        if self._peers.rank == 0:
            warn_of_rounding(sources)

    def _wait_mover(self) -> str:
        """Why the mover is not up, or nothing."""
        assert self._mover is not None and self._slab is not None
        if (
            self._slab.gpu is not None
        ):  # the spare's memory as well must be taken before the training takes it
            why = self._mover.wait_ready(self._timeout)
            return f"the mover is not up: {why}" if why else ""
        deadline = time.monotonic() + self._timeout
        while self._mover.pid is None:
            if self._mover.problem is not None:
                return f"the mover is not up: {self._mover.problem.message}"
            if time.monotonic() > deadline:
                return f"the mover was not up within {self._timeout:g} s"
            time.sleep(0.02)
        return ""

    @staticmethod
    def _device(wanted: torch.device | str | None, held: list[Held]) -> torch.device:
        """Where the snapshot belongs. Raises `PublishError` where that cannot be told."""
        if wanted is not None:
            place = torch.device(wanted)
            if place.type == "cuda" and place.index is None:
                place = torch.device("cuda", torch.cuda.current_device())
            return place
        places = {h.local.device: h.name for h in held if h.local.numel() and h.local.device.type != "cpu"}
        if len(places) > 1:
            said = ", ".join(f"{name!r} on {place}" for place, name in places.items())
            raise PublishError(f"this rank's weights are on several devices ({said}): give `device`")
        return next(iter(places), torch.device("cpu"))

    @property
    def port(self) -> int | None:
        """Where this pod's agent listens; None on ranks that do not supervise it."""
        return self._agent.port if self._agent is not None else None

    @property
    def mover_socket(self) -> Path:
        """Where this rank's mover listens."""
        if self._mover is None:
            raise PublishError("this publisher has no mover")
        return self._mover.socket_path

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint parameters that are sent, in order."""
        return tuple(source.name for source in self._manifest.sources)

    # -- publishing ------------------------------------------------------------------------------------------

    def publish(self, version: str, on_busy: OnBusy = "skip") -> Handle:
        """Take a snapshot of the weights as they are and call it `version`; called on every rank alike.

        When it returns the snapshot is taken, the weights may change. `version`: 1-63 letters, digits, `-`,
        `_`, `.`, never used before. While the last version is travelling, `on_busy="skip"` takes no snapshot
        and the handle ends `Superseded`; "wait" waits for it, at most `timeout` seconds. A version that no
        round has taken up is simply replaced, and its handle ends `Superseded`.

        Raises `PublishError` on all ranks for a version or weights that cannot be published; the last version
        stays.
        """
        deadline = time.monotonic() + self._timeout
        error, held = "", list[Held]()
        if self._closed:
            error = "the publisher is closed"
        else:
            error = self._wrong_version(version) or (
                "" if on_busy in ("skip", "wait") else f"on_busy is 'skip' or 'wait', not {on_busy!r}"
            )
        if not error:
            try:
                held = self._sources.held()
                error = self._changed(held)
            except Exception as e:
                error = _words(e)
        while True:
            said = {"version": str(version)[:200], "on_busy": str(on_busy), "busy": self._busy()}
            every = self.agree(f"publish({version!r})", error, said)
            for what in ("version", "on_busy"):
                values = [rank[what] for rank in every]
                if len(set(values)) > 1:
                    raise PublishError(
                        f"publish was called with different values of {what}, by rank: {values}"
                    )
            if not any(rank["busy"] for rank in every):
                break
            if on_busy == "skip":
                handle = Handle(version)
                handle.superseded(f"version {self._held_version!r} was still travelling")
                return handle
            late = time.monotonic() > deadline
            if late:
                error = f"version {self._held_version!r} was still travelling after {self._timeout:g} s"
            self._wait_not_busy(min(deadline, time.monotonic() + BUSY_LOOK_SECONDS))
        return self._take(version, held)

    def _wrong_version(self, version: Any) -> str:
        if not isinstance(version, str) or VERSION.fullmatch(version) is None:
            return (
                f"version {version!r} is not allowed: use 1 to 63 letters, digits, '-', '_' or '.', with a "
                "letter or digit at both ends"
            )
        return f"version {version!r} was published before: use a new one" if version in self._used else ""

    def _changed(self, held: list[Held]) -> str:
        """What is no longer as it was when the publisher was made."""
        if held is self._checked:
            return ""
        now = _layout(held)
        if now == self._layout:
            self._checked = held
            return ""
        missing, new = sorted(self._layout.keys() - now.keys()), sorted(now.keys() - self._layout.keys())
        if missing or new:
            said = [f"gone: {', '.join(missing[:5])}"] if missing else []
            said += [f"new: {', '.join(new[:5])}"] if new else []
            return f"the set of parameters has changed ({'; '.join(said)}): make a new Publisher"
        name = next(n for n in now if now[n] != self._layout[n])
        was, is_now = self._layout[name][0], now[name][0]
        if was == is_now:
            return f"tensor {name!r} is called otherwise in the checkpoint than before: make a new Publisher"
        return f"parameter {name!r} was {was} and is {is_now}: make a new Publisher"

    def _busy(self) -> bool:
        since = self._travelling.get(self._held_version or "")
        return since is not None and time.monotonic() - since < STUCK_SECONDS

    def _wait_not_busy(self, deadline: float) -> None:
        while self._busy() and time.monotonic() < deadline:
            time.sleep(0.005)

    def _take(self, version: str, held: list[Held]) -> Handle:
        assert self._slab is not None and self._mover is not None
        last = self._handles.get(self._held_version or "")
        self._slab.begin_write()
        self._copy(held)
        handle = Handle(version)
        self._handles = {v: h for v, h in self._handles.items() if not h.done()}
        self._handles[version] = handle
        self._used.add(version)
        self._sequence += 1
        self._held_version = version
        # On a GPU the copies are only enqueued, in order with the training; the stamp shows when they have ended.
        self._slab.stamp_after_copies(version, self._sequence)
        self._mover.published()
        if last is not None:
            last.superseded(f"version {version!r} took its place before a round carried it")
        return handle

    @torch.no_grad()
    def _copy(self, held: list[Held]) -> None:
        """The weights into the snapshot; where the wire dtype differs, the copy casts."""
        if self._copies is None or held is not self._copied:
            here = [h for h in held if h.name in self._views]
            self._copies = Copies([self._views[h.name] for h in here], [h.local for h in here])
            self._copied = held
        self._copies.run()

    def _on_outcome(self, outcome: MoverOutcome) -> None:
        """In the supervisor's thread: what the pod's agent says of a version."""
        if outcome.committed or outcome.final or outcome.problem is not None:
            self._travelling.pop(outcome.version, None)
        else:
            self._travelling[outcome.version] = time.monotonic()
        if (handle := self._handles.get(outcome.version)) is not None:
            handle.outcome(outcome)

    # -- agreement -------------------------------------------------------------------------------------------

    def agree(
        self, what: str, error: str, said: dict[str, Any], patience: float = 1.0
    ) -> list[dict[str, Any]]:
        """What every rank said, a collective call; or the first error, raised on all ranks alike. `patience` counts
        in timeouts."""
        patience = min(patience * self._timeout, CLOSED_SECONDS) if self._closed else patience * self._timeout
        try:
            every = self._peers.gather({"error": error[:MAX_ERROR], **said}, what, patience)
        except PublishError as e:
            # The error of this very rank says more than that the others did not come.
            raise PublishError(error) if error and self._closed else e from None
        wrong = [(r, rank["error"]) for r, rank in enumerate(every) if rank["error"]]
        if wrong:
            rank, message = wrong[0]
            others = [r for r, m in wrong if r != rank]
            same = all(m == message for _, m in wrong)
            if len(wrong) == len(every) and same:
                raise PublishError(message)
            also = f" (also ranks {others})" if others else ""
            raise PublishError(f"trainer rank {rank}: {message}{also}")
        return every

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of snapshot, mover and agent, which leave by themselves within seconds. Waits for nobody.

        Idempotent. Versions that are not committed end as failed.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._let_go()
        for handle in self._handles.values():
            handle.closed()

    def _let_go(self) -> None:
        if self._mover is not None:
            self._mover.close()
        served = self._agent is not None and self._agent.port is not None
        if self._agent is not None:
            self._agent.close()
        if self._run_dir is not None and not served:  # else the agent removes it, once the movers have left
            shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._slab is not None:
            self._views, self._copies, self._copied, self._checked = {}, None, [], []
            self._slab.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(publisher: weakref.ref[Publisher]) -> None:
    if (alive := publisher()) is not None:
        alive.close()


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, PublishError) else f"{type(error).__name__}: {error}"


def _layout(held: list[Held]) -> dict[str, tuple[str, Any]]:
    """Name -> everything of a tensor that must not change: in words, and what it is called in the checkpoint."""
    return {h.name: (f"{tuple(h.local.shape)} of {_of(h)}", h.parts) for h in held}


def _of(held: Held) -> str:
    where = ""
    if isinstance(held.tensor, DTensor):
        where = f" as {list(held.tensor.placements)} on {list(held.tensor.device_mesh.shape)}"
    return f"{tuple(held.tensor.shape)} {str(held.wire).removeprefix('torch.')}{where}"


def _by_pod(every: list[dict[str, Any]]) -> dict[str, list[int]]:
    pods: dict[str, list[int]] = {}
    for rank, said in enumerate(every):
        pods.setdefault(said["pod"], []).append(rank)
    return pods


def _pod_key() -> str:
    """Equal for processes that see the same files and the same network: the ranks of one container."""
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net")]
    said = json.dumps([socket.gethostname(), os.environ.get(ENV_POD_UID, ""), _machine(), *spaces])
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _port(port: int | None) -> int:
    if port is None:
        text = os.environ.get(ENV_PORT, str(DEFAULT_TRAINER_PORT))
        if not text.isdecimal():
            raise PublishError(f"{ENV_PORT} is {text!r}, not a port")
        port = int(text)
    if not 0 <= port < 65536:
        raise PublishError(f"port {port} is not between 0 and 65535")
    return port
