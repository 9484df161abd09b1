"""The epoch's store: a TCPStore in the lead's agent, on exactly one address; signed values; a deadline on
every wait.

Nothing read from it is ever unpickled. A value carries an HMAC with the epoch's key over its key and its
writer, so that neither a stranger nor a rank that mistakes its place can pass for another one. Whoever finds
that the epoch or a round cannot go on says so under `failed/<scope>`, which every wait looks at: nobody waits
for what will never come.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import ValidationError
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ..protocol.messages import Problem, Rendezvous
from .failure import Failure, PeerFailure

_CHUNK_BYTES = 4 << 20
"""TCPStore refuses values of more than 8 MiB."""
_MAX_CHUNKS = 256
_POLL_SECONDS = (0.0002, 0.002, 0.02)
"""Between looks at the store: the first, the longest while a quick answer is to be expected, the longest after."""
_QUICK_SECONDS = 0.25
_CONNECT_SECONDS = 10.0


def open_store(host: str, port: int = 0) -> tuple[TCPStore, Rendezvous]:
    """A new store that listens on `host` alone, on `port` (0: a free one); it lives as long as the object is kept.

    Raises ValueError for an address that no peer can use or that would listen everywhere, OSError if it is
    not ours.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"the store needs the pod's own IP address, not {host!r}") from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"the store must listen on the pod's own address, not on {host}")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        port = listener.getsockname()[1]
        # Given a socket, TCPStore does not open one of its own, which would listen on every address.
        store = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=_CONNECT_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, Rendezvous(host=host, port=port)


def connect_store(where: Rendezvous, deadline: float, cancelled: Callable[[], bool]) -> TCPStore:
    """A client of the lead's store. Raises `Failure` StoreUnreachable at the deadline (monotonic seconds)."""
    last: OSError | None = None
    while True:
        check_cancelled(cancelled)
        left = deadline - time.monotonic()
        if left <= 0:
            raise Failure(
                "StoreUnreachable",
                f"the epoch's store at {where.host}:{where.port} did not answer ({last}); is the "
                f"trainer's lead pod "
                "up, and does a network policy allow connections to it?",
                0,
            )
        try:
            socket.create_connection((where.host, where.port), timeout=min(left, 2.0)).close()
            return TCPStore(
                where.host,
                where.port,
                None,
                False,
                timedelta(seconds=min(max(left, 1.0), _CONNECT_SECONDS)),
                wait_for_workers=False,
            )
        except (OSError, RuntimeError) as e:
            last = e if isinstance(e, OSError) else OSError(str(e)[:200])
            time.sleep(min(0.1, max(left, 0.0)))


def check_cancelled(cancelled: Callable[[], bool]) -> None:
    """Raises `Failure` Cancelled when the driver has dropped the epoch."""
    if cancelled():
        raise Failure("Cancelled", "the epoch was dropped by its driver")


class EpochStore:
    """One rank's signed view of its epoch in the store. Values are bytes; `deadline`s are monotonic
    seconds."""

    def __init__(
        self, store: Store, prefix: str, key: str, rank: int, cancelled: Callable[[], bool] = lambda: False
    ) -> None:
        self._store = PrefixStore(prefix, store)
        self._prefix = prefix
        self._key = key.encode()
        self.rank = rank
        self.cancelled = cancelled
        self.scope = "join"
        """The part of the epoch's life that this rank is in; a failure ends the waits of its scope."""
        self.steps = 0
        """Of the plan, once there is one: for the words of a failure."""

    # -- values ----------------------------------------------------------------------------------------------

    def put(self, key: str, value: bytes) -> None:
        """Write a value of any size; a former one is replaced."""
        packed = zlib.compress(value, 1) if len(value) > 1024 else value
        chunks = [packed[i : i + _CHUNK_BYTES] for i in range(0, len(packed), _CHUNK_BYTES)]
        if len(chunks) > _MAX_CHUNKS:
            raise Failure(
                "ValueTooLarge", f"{key} has {len(packed)} bytes: too much for the store", self.rank
            )
        head = {"writer": self.rank, "packed": packed is not value, "chunks": 0, "size": len(value)}
        body = packed
        if len(chunks) > 1:
            for i, chunk in enumerate(chunks):
                self._set(f"{key}#{i}", self._sign(f"{key}#{i}", chunk))
            head["chunks"], body = len(chunks), b""
        self._set(key, self._sign(key, json.dumps(head).encode() + b"\n" + body))

    def put_once(self, key: str, value: bytes) -> bytes:
        """Write a small value unless there is one already; returns the one that stands, checked."""
        head = json.dumps({"writer": self.rank, "packed": False, "chunks": 0, "size": len(value)})
        signed = self._sign(key, head.encode() + b"\n" + value)
        # compare_set speaks text only.
        stands = self._call(
            lambda: self._store.compare_set(f"once/{key}", "", base64.b64encode(signed).decode())
        )
        return self._read(key, base64.b64decode(stands), None)

    def get_once(self, key: str) -> bytes | None:
        """What `put_once` wrote, or None. Does not wait."""
        if not self._check([f"once/{key}"]):
            return None
        return self._read(key, base64.b64decode(self._get(f"once/{key}")), None)

    def get(self, key: str, writer: int, deadline: float, what: str) -> bytes:
        """The value that rank `writer` wrote under `key`; waits for it."""
        return self.get_all({key: writer}, deadline, what)[key]

    def get_all(self, keys: Mapping[str, int], deadline: float, what: str) -> dict[str, bytes]:
        """The values of all `keys` (key -> rank that writes it); waits until all are there.

        Raises `PeerFailure` PeerLate at the deadline, naming the ranks whose `what` is missing; `Failure` for
        a value that is not signed as it must be, for a failure that another rank reported, and when
        cancelled.
        """
        self.wait(keys, deadline, what)
        return self.read_all(keys)

    def read_all(self, keys: Mapping[str, int]) -> dict[str, bytes]:
        """The values of keys that are known to be there, in one round trip for each 64 of them."""
        result: dict[str, bytes] = {}
        names = list(keys)
        for start in range(0, len(names), 64):
            batch = names[start : start + 64]
            values = self._call(partial(self._store.multi_get, batch))
            for key, signed in zip(batch, values, strict=True):
                result[key] = self._read(key, bytes(signed), keys[key])
        return result

    def wait(self, keys: Mapping[str, int], deadline: float, what: str) -> None:
        """Wait until all keys exist; raises as `get_all` does."""
        names, started = list(keys), time.monotonic()
        pauses = poll_pauses()
        # The store's own wait is of no use: torch logs a warning at each of its timeouts.
        while not self._check(names):
            self.raise_failed()
            if time.monotonic() >= deadline:
                late = sorted({keys[k] for k in names if not self._check([k])})
                if not late:
                    return
                who = self.named(late[0]) if len(late) == 1 else ranks_text(late)
                raise PeerFailure(
                    "PeerLate",
                    f"{who} did not deliver {what} within {time.monotonic() - started:.1f} s; look at the pod's mover "
                    "and network, or raise the deadline",
                    late[0],
                )
            time.sleep(min(next(pauses), max(deadline - time.monotonic(), 0.0)))

    def exists(self, key: str) -> bool:
        """Whether somebody has written it. Does not wait."""
        return self._check([key])

    # -- words -----------------------------------------------------------------------------------------------

    def introduce(self, who: str) -> None:
        """Say who this rank is, in words: for the messages of its peers."""
        if who:
            self.put(f"who/{self.rank}", who.encode())

    def named(self, rank: int) -> str:
        """`rank 5 (pod vllm-1, worker 1)`; the number alone of a rank that has not said who it is. Never raises."""
        key = f"who/{rank}"
        try:
            if self._check([key]):
                return f"rank {rank} ({self.read_all({key: rank})[key].decode()[:200]})"
        except (Failure, ValueError):
            pass  # there is something worse to tell than a name that is missing
        return f"rank {rank}"

    def step(self, index: int) -> str:
        """`step 132 of 399`, for the plan's step number `index`."""
        return f"step {index + 1} of {self.steps}" if self.steps else f"step {index + 1}"

    # -- failures --------------------------------------------------------------------------------------------

    def report(self, problem: Problem) -> Problem:
        """Tell all ranks in this scope why it cannot go on; returns the problem that was told first."""
        return _problem(self.put_once(f"failed/{self.scope}", problem.model_dump_json().encode()))

    def reported(self) -> Problem | None:
        """What another rank reported in this scope, if any did."""
        value = self.get_once(f"failed/{self.scope}")
        return None if value is None else _problem(value)

    def raise_failed(self) -> None:
        """Raises `Failure` if the epoch was dropped or a rank reported a failure."""
        check_cancelled(self.cancelled)
        problem = self.reported()
        if problem is not None:
            raise PeerFailure(problem.reason, problem.message, problem.rank)

    # -- inside ----------------------------------------------------------------------------------------------

    def _sign(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._key, f"{self._prefix}/{key}\n".encode() + data, hashlib.sha256) + data

    def _open(self, key: str, signed: bytes, writer: int | None) -> bytes:
        data = signed[32:]
        if not hmac.compare_digest(signed, self._sign(key, data)):
            if writer is None:
                writer = _claimed_writer(data)
            raise Failure(
                "WrongKey",
                f"what rank {writer} wrote under {key!r} is not signed with the key that rank "
                f"{self.rank} was given: "
                "one of the two processes does not belong to this epoch",
                writer,
            )
        return data

    def _read(self, key: str, signed: bytes, writer: int | None) -> bytes:
        data = self._open(key, signed, writer)
        first, _, body = data.partition(b"\n")
        head: dict[str, Any] = json.loads(first)
        if writer is not None and head["writer"] != writer:
            raise Failure(
                "WrongWriter", f"{key!r} was written by rank {head['writer']}, not {writer}", head["writer"]
            )
        if head["chunks"]:
            names = [f"{key}#{i}" for i in range(head["chunks"])]
            body = b"".join(self._open(n, self._get(n), writer) for n in names)
        return zlib.decompress(body) if head["packed"] else body

    def _set(self, key: str, value: bytes) -> None:
        store: Any = self._store  # its stub knows text only
        self._call(lambda: store.set(key, value))

    def _check(self, keys: Iterable[str]) -> bool:
        return bool(self._call(lambda: self._store.check(list(keys))))

    def _get(self, key: str) -> bytes:
        return bytes(self._call(lambda: self._store.get(key)))

    def _call(self, call: Callable[..., Any]) -> Any:
        try:
            return call()
        except RuntimeError as e:
            raise self._lost(e) from e

    @staticmethod
    def _lost(error: RuntimeError) -> PeerFailure:
        return PeerFailure(
            "StoreLost", f"the epoch's store in the trainer's lead pod is gone: {str(error)[:200]}", 0
        )


class GlooStore(Store):
    """The same signed store as gloo's rendezvous wants it: each rank's addresses, from that rank alone."""

    def __init__(self, store: EpochStore, deadline: float) -> None:
        super().__init__()
        self._epoch, self._deadline = store, deadline

    @staticmethod
    def _writer(key: str) -> int:
        return int(key.rsplit("/", 1)[1])

    def set(self, key: str, value: str | bytes) -> None:
        self._epoch.put(f"gloo/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._epoch.get(f"gloo/{key}", self._writer(key), self._deadline, "its address")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._epoch.wait({f"gloo/{k}": self._writer(k) for k in keys}, self._deadline, "its address")

    def check(self, keys: list[str]) -> bool:
        return all(self._epoch.exists(f"gloo/{k}") for k in keys)


def poll_pauses() -> Iterator[float]:
    """How long to sleep before each next look: inside a round the answer is milliseconds away, and a longer sleep
    would be most of the round; later it would only load the store."""
    started, pause = time.monotonic(), _POLL_SECONDS[0]
    while True:
        yield pause
        quick = time.monotonic() - started < _QUICK_SECONDS
        pause = min(pause * 1.5, _POLL_SECONDS[1 if quick else 2])


def ranks_text(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 3, 4, 5 and 9 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(r) for r in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _claimed_writer(data: bytes) -> int | None:
    """Who says to have written a value whose signature is bad. Good for a message, and for nothing else."""
    try:
        return int(json.loads(data.partition(b"\n")[0])["writer"])
    except (ValueError, TypeError, KeyError):
        return None


def _problem(data: bytes) -> Problem:
    try:
        return Problem.model_validate_json(data)
    except ValidationError:
        return Problem(
            reason="BadReport", message=f"a rank reported a failure that cannot be read: {data[:100]!r}"
        )
