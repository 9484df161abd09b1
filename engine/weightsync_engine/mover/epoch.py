"""One rank's membership of one epoch: join (store, manifests, plan, communicator), then transfers.

All ranks do the same in the same order. Where they must agree, each writes its word into the store, rank 0
reads them all, judges, and writes the verdict that everybody waits for; so every rank learns of the same
problem.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..layout.codec import (
    decode_sources,
    decode_worker,
    digest_of,
    encode_sources,
    encode_worker,
)
from ..layout.shards import LayoutError
from ..layout.tensors import SourceParameter, TrainerManifest, WorkerManifest
from ..plan.compile import compile_plan
from ..plan.groups import Worker
from ..plan.plan import LocalPart, LocalStep, Plan
from ..plan.steps import PlanError
from ..plan.validate import Envelope
from ..protocol.messages import PlanSummary, Problem
from ..protocol.mover import MoverJoin, MoverTransfer
from ..protocol.names import ENV_STEP_BYTES, PROTOCOL_VERSION
from ..transport.base import Transport
from ..transport.choose import choose, envelope
from ..transport.failure import Agreed, Failure, PeerFailure
from ..transport.presence import Presence
from ..transport.store import EpochStore, check_cancelled, connect_store
from .memory import Staging
from .slab import Slab
from .verify import Summed, content_of, judge_digests, of_sources, of_targets, sent_sums, shards_of

log = logging.getLogger(__name__)

STALL_SECONDS = 30.0
"""A peer that does nothing for this long is given up, or for a third of the deadline if that is shorter."""
_GRACE_SECONDS = 1.0
"""How long a rank whose connection broke waits for a peer that knows better who is to blame."""

Word = dict[str, Any]


class Epoch:
    """Made for each `MoverJoin`. `join`, then `transfer`s, in one thread at a time; `cancel` from any
    thread."""

    def __init__(
        self,
        request: MoverJoin,
        manifest: TrainerManifest | WorkerManifest,
        slab: Slab,
        staging: Staging | None = None,
    ) -> None:
        self.request = request
        self.rank = request.rank
        self.usable = True
        """False once the communicator is of no use any more: only another epoch helps."""
        self.progress: dict[str, Any] = {}
        self.content = ""
        """On rank 0: of the last transfer's weights, `verify.content_of`."""
        self.deadline = _inner_deadline(request.deadline_seconds)
        self._manifest = manifest
        self._slab = slab
        self._staging = staging or Staging(None, 0)
        self._cancel = threading.Event()
        self._store: EpochStore | None = None
        self._kind: type[Transport]
        self._envelope: Envelope
        self._transport: Transport | None = None
        self._sources: tuple[SourceParameter, ...] = ()
        self._plan: Plan | None = None
        """On rank 0, which judges; the others keep what they do themselves."""
        self._steps: tuple[LocalStep, ...] | None = None
        self._summed: Summed | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    @property
    def hopeless(self) -> bool:
        """Whether the communicator is stuck in a way that only the end of this process ends."""
        transport = self._transport
        return transport is not None and transport.hopeless

    def cancel(self) -> None:
        """End all waits in the store soon; an exchange that has begun goes on until its own deadline."""
        self._cancel.set()

    def close(self) -> None:
        """Drop connections and plan. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            if not transport.hopeless and (why := self._staging.hold()):
                log.warning("the next epoch may lack memory: %s", why)
        self._store = None
        self._plan = self._steps = self._summed = None

    # -- join ------------------------------------------------------------------------------------------------

    def join(self, connecting: Callable[[], None] = lambda: None) -> PlanSummary:
        """Meet the other ranks, agree on the plan, connect. Raises `Failure` with the problem that all ranks
        share. `connecting` is called before the transport is made: from there on only the end of this process may end
        what hangs."""
        try:
            return self._join(connecting)
        except BaseException as e:
            self.usable = False
            raise self._told(e) from e

    def _join(self, connecting: Callable[[], None]) -> PlanSummary:
        request = self.request
        self._check_request()
        raw = connect_store(request.rendezvous, self.deadline, lambda: self.cancelled)
        prefix = f"weightsync/{request.object_uid}/{request.term}/{request.epoch}"
        self._store = store = EpochStore(raw, prefix, request.key, self.rank, lambda: self.cancelled)
        self._claim(store)
        store.introduce(request.who)
        own_problem = self._publish_manifest(store)
        sources, workers = self._read_manifests(store)
        plan: Plan | None = None
        problem = own_problem
        if problem is None:
            try:
                plan = compile_plan(sources, workers, request.trainer_ranks, self._envelope)
                problem = self._check_slab(plan)
            except PlanError as e:
                problem = e.problem
        word = {
            "problem": problem.model_dump() if problem else None,
            "digest": plan.digest if plan else None,
            "runtime": self._runtime(),
        }
        self._agree(store, "plan", word, judge_plans, self.deadline, "its plan")
        assert plan is not None  # a rank without one is a problem, which ends the agreement
        self._sources, self._steps = sources, plan.local(self.rank, self._kind.collective)
        self._plan = plan if self.rank == 0 else None
        self._summed = self._summed_here(plan)
        store.steps = len(plan.steps)
        self._staging.release()
        connecting()
        self._transport = self._kind(store, self.rank, request.world_size, request.host, self.deadline)
        self._agree(store, "connected", {}, lambda words: None, self.deadline, "its connections")
        return plan.summary

    def _check_request(self) -> None:
        r, kind = self.request, "trainer" if isinstance(self._manifest, TrainerManifest) else "worker"
        if not 0 < r.trainer_ranks < r.world_size or not 0 <= r.rank < r.world_size:
            raise Failure(
                "WorldSize", f"rank {r.rank} of {r.world_size} with {r.trainer_ranks} trainer ranks", r.rank
            )
        if (r.rank < r.trainer_ranks) != (kind == "trainer"):
            raise Failure("WrongRole", f"rank {r.rank} of the epoch went to a {kind}", r.rank)
        if isinstance(self._manifest, TrainerManifest) and self._manifest.trainer_rank != r.rank:
            raise Failure(
                "WrongRank",
                f"trainer rank {self._manifest.trainer_rank} was told to be rank {r.rank}",
                r.rank,
            )
        self._kind = choose(r.transport, self._slab.device.type, r.rank)
        self._envelope = envelope(self._kind, os.environ, r.rank)
        self._kind.configure(self._envelope)

    def _runtime(self) -> dict[str, Any]:
        """What must be equal on all ranks besides the plan."""
        return {
            "protocol": PROTOCOL_VERSION,
            "byteorder": sys.byteorder,
            "torch": torch.__version__.split("+")[0],
            "transport": self._kind.__name__,
            ENV_STEP_BYTES: self._envelope.max_local_bytes,
            **self._kind.runtime(),
            "world": [self.request.world_size, self.request.trainer_ranks],
        }

    def _claim(self, store: EpochStore) -> None:
        mine = uuid.uuid4().bytes
        if store.put_once(f"claim/{self.rank}", mine) != mine:
            raise Failure(
                "RankTaken", f"another process has taken rank {self.rank} of this epoch already", self.rank
            )

    def _publish_manifest(self, store: EpochStore) -> Problem | None:
        """Say what this rank has; large things once. Returns what is wrong with it, to be told in the
        agreement."""
        if isinstance(self._manifest, WorkerManifest):
            data = encode_worker(self._manifest)
            digest = digest_of(data)
            # Servers of one model are alike, so most workers find their manifest in the store already.
            mine = str(self.rank).encode()
            if store.put_once(f"owner/{digest}", mine) == mine:
                store.put(f"manifest/{digest}", data)
            word = {"manifest": digest, "server": self.request.server}
            store.put(f"worker/{self.rank}", json.dumps(word).encode())
            return None
        data = encode_sources(self._manifest.sources)
        if self.rank == 0:
            store.put("sources", data)
            return None
        theirs = store.get("sources", 0, self.deadline, "the trainer's parameters")
        if theirs == data:
            return None
        return sources_differ(decode_sources(theirs), self._manifest.sources, self.rank)

    def _read_manifests(self, store: EpochStore) -> tuple[tuple[SourceParameter, ...], list[Worker]]:
        request = self.request
        sources = decode_sources(store.get("sources", 0, self.deadline, "the trainer's parameters"))
        ranks = range(request.trainer_ranks, request.world_size)
        words = store.get_all({f"worker/{r}": r for r in ranks}, self.deadline, "its manifest")
        manifests: dict[str, WorkerManifest] = {}
        workers: list[Worker] = []
        for rank in ranks:
            word = json.loads(words[f"worker/{rank}"])
            digest = word["manifest"]
            if digest not in manifests:
                owner = int(store.get_once(f"owner/{digest}") or str(rank))
                data = store.get(f"manifest/{digest}", owner, self.deadline, "its manifest")
                if digest_of(data) != digest:
                    raise Failure("BadManifest", f"the manifest of rank {owner} is not what it says", owner)
                manifests[digest] = decode_worker(data)
            workers.append(Worker(rank, word["server"], manifests[digest]))
        return sources, workers

    def _check_slab(self, plan: Plan) -> Problem | None:
        """Whether this trainer's slab holds the shards that its mesh says it has; workers' slabs are in the
        plan."""
        if not isinstance(self._manifest, TrainerManifest):
            places = self._manifest.tensors.values()
        else:
            # Parameters that are regions of one tensor have its layout.
            one_each = {s.tensor: s for s in self._manifest.sources}.values()
            for source, box in shards_of(one_each, self.rank):
                place = self._manifest.tensors.get(source.tensor)
                held = (place.shape, place.dtype) if place is not None and 0 not in place.shape else None
                if held != ((box.shape, source.dtype) if box is not None else None):
                    return Problem(
                        reason="BadSource",
                        message=f"{source.tensor!r}: by its mesh trainer rank {self.rank} holds "
                        f"{box.shape if box else 'nothing'} of {source.dtype}, its snapshot has {held}",
                        rank=self.rank,
                    )
            places = self._manifest.tensors.values()
        try:
            for place in places:
                self._slab.tensor(place)
        except ValueError as e:
            return Problem(reason="BadManifest", message=f"rank {self.rank}: {e}"[:1024], rank=self.rank)
        return None

    # -- transfer --------------------------------------------------------------------------------------------

    def transfer(self, request: MoverTransfer, progress: Callable[..., None]) -> None:
        """One round: everybody ready, all steps, digests, verdict. Returns once the verdict is good.

        A worker's slab is stamped with the version only then; from the first step until then it has no stamp.
        Raises `Failure` with the problem that all ranks share; `usable` tells whether another round can
        follow.
        """
        try:
            self._transfer(request, progress)
        except BaseException as e:
            failure = self._told(e)
            if not isinstance(failure, Agreed):
                self.usable = False
                # Peers that wait inside an exchange with this rank learn of it by the end of their
                # connection.
                if self._transport is not None:
                    self._transport.close()
            raise failure from e

    def _transfer(self, request: MoverTransfer, progress: Callable[..., None]) -> None:
        store, trainers = self._store, self.request.trainer_ranks
        if store is None or self._steps is None or self._transport is None or self._summed is None:
            raise Failure("NotJoined", f"rank {self.rank} has no communicator", self.rank)
        began = time.monotonic()
        deadline = _inner_deadline(request.deadline_seconds)
        stall = min(STALL_SECONDS, request.deadline_seconds / 3)
        scope = store.scope = f"round-{request.round}"
        self.content = ""
        self.progress = {"step": 0, "steps": 0, "bytes_done": 0, "bytes_total": 0}

        # A trainer's stream may have work to do before it copies the snapshot: waited for, but not to the end.
        ready_until = min(time.monotonic() + stall, deadline)
        patience = 0.8 * (ready_until - time.monotonic())
        stamp = self._slab.wait_stamp(patience) if self.rank < trainers else None
        word: Word = {"sequence": stamp.sequence if stamp else None, "problem": None}
        if self.rank < trainers and (stamp is None or stamp.version != request.version):
            held = stamp.version if stamp else "no version (or one is being written)"
            message = (
                f"trainer rank {self.rank} was to send {request.version!r}, but its snapshot holds {held}"
            )
            word["problem"] = Problem(
                reason="VersionUnavailable", message=message, rank=self.rank
            ).model_dump()
        self._agree(store, f"{scope}/ready", word, judge_ready(trainers), ready_until, "its readiness")

        ready = time.monotonic()
        if self.rank >= trainers:
            self._slab.begin_write()
        whole = self._run_steps(scope, stall, deadline, stamp, progress)
        moved = time.monotonic()
        sums = self._summed.sums()
        summed = time.monotonic()
        whole = whole and (self.rank >= trainers or self._slab.read_stamp() == stamp)
        word = {"sums": sums, "problem": None}
        if not whole:
            message = (
                f"the snapshot of trainer rank {self.rank} was overwritten while {request.version!r} was sent"
            )
            word["problem"] = Problem(reason="SnapshotChanged", message=message, rank=self.rank).model_dump()
        self._agree(
            store,
            f"{scope}/verdict",
            word,
            self._judge_verdict,
            deadline,
            "its digests",
        )
        if self.rank >= trainers:
            self._slab.stamp(request.version, request.round)
        log.info(
            "round %d: ready after %.1f ms, steps %.1f, digests %.1f, verdict %.1f",
            request.round,
            *(1e3 * t for t in (ready - began, moved - ready, summed - moved, time.monotonic() - summed)),
        )

    def _judge_verdict(self, words: Sequence[Word]) -> Problem | None:
        assert self._plan is not None
        if (problem := first_problem(words)) is not None:
            return problem
        sums = [w["sums"] for w in words]
        sent = sent_sums(sums, self._sources)
        if isinstance(sent, Problem):
            return sent
        self.content = content_of(sent)
        return judge_digests(sums, sent, self._plan)

    def _run_steps(
        self,
        scope: str,
        stall: float,
        deadline: float,
        stamp: object,
        progress: Callable[..., None],
    ) -> bool:
        """All of this rank's steps. Returns whether a trainer's snapshot kept its stamp through all of
        them."""
        store, transport, steps = self._store, self._transport, self._steps
        assert store is not None and transport is not None and steps is not None
        sending = self.rank < self.request.trainer_ranks
        # Peers must look for each other at the same steps, so only what all ranks know decides which: a rank's share
        # of a step may be another one's half.
        every = max(transport.check_bytes // self._envelope.max_local_bytes, 1)
        looked_at = [step.index for step in steps if step.index % every == 0]
        presence = Presence(store, scope, looked_at)
        now = self.progress
        now["steps"] = len(steps)
        now["bytes_total"] = sum(
            step.local_bytes * (step.step.target.copies if sending else 1) for step in steps
        )
        whole = True

        def moved(count: int) -> None:
            now["bytes_done"] += count
            progress(**now)

        begun: deque[int] = deque()
        looks = 0

        def finish() -> None:
            turn = begun.popleft()
            try:
                transport.finish(min(stall, max(deadline - time.monotonic(), 0.0)), moved)
            except PeerFailure as e:
                raise presence.judge(steps[turn].index, e) from e
            now["step"] = turn + 1
            check_cancelled(lambda: self.cancelled)

        for turn, step in enumerate(steps):
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerFailure(
                    "DeadlineExceeded",
                    f"{store.named(self.rank)} had done {turn} of its {len(steps)} steps at the round's deadline; "
                    "raise it",
                    self.rank,
                )
            if looks < len(looked_at) and looked_at[looks] == step.index:
                # A partner stuck in an exchange finds out after `stall`; who only waits for it gives it that
                # time.
                presence.enter(looks, step.peers, min(stall * 1.5, left))
                looks += 1
                whole = whole and (not sending or self._slab.read_stamp() == stamp)
            try:
                transport.begin(step, self._local)
            except PeerFailure as e:
                raise presence.judge(steps[turn].index, e) from e
            begun.append(turn)
            if len(begun) >= transport.depth:
                finish()
        while begun:
            finish()
        return whole and (not sending or self._slab.read_stamp() == stamp)

    def _local(self, part: LocalPart) -> torch.Tensor:
        region = self._slab.tensor(self._manifest.tensors[part.tensor])
        for dim, (start, extent) in enumerate(zip(part.box.start, part.box.shape, strict=True)):
            region = region.narrow(dim, start, extent)
        return region

    def _summed_here(self, plan: Plan) -> Summed:
        if isinstance(self._manifest, TrainerManifest):
            return of_sources(self._sources, self.rank, self._local)
        return of_targets(self._manifest, self._local, plan.weights(self.rank))

    # -- agreement -------------------------------------------------------------------------------------------

    def _agree(
        self,
        store: EpochStore,
        name: str,
        word: Word,
        judge: Callable[[Sequence[Word]], Problem | None],
        deadline: float,
        what: str,
    ) -> None:
        """Everybody gives a word, rank 0 judges them all. Raises `Failure` with the verdict if it is a
        problem."""
        store.put(f"{name}/{self.rank}", json.dumps(word).encode())
        if self.rank == 0:
            # Earlier than the others give up on the verdict, so that the late rank is named and not this one.
            early = deadline - min(1.0, 0.1 * max(deadline - time.monotonic(), 0.0))
            keys = {f"{name}/{r}": r for r in range(self.request.world_size)}
            values = store.get_all(keys, early, what)
            problem = judge([json.loads(values[k]) for k in keys])
            store.put(name, json.dumps(problem.model_dump() if problem else None).encode())
        else:
            verdict = json.loads(store.get(name, 0, deadline, f"the verdict on {what.removeprefix('its ')}"))
            problem = Problem.model_validate(verdict) if verdict is not None else None
        if problem is not None:
            raise Agreed(problem.reason, problem.message, problem.rank)

    def _told(self, error: BaseException) -> Failure:
        """Tell the other ranks, unless they told this one first: then theirs is the problem that counts."""
        failure = error if isinstance(error, Failure) else _unexpected(error, self.rank)
        store = self._store
        if store is None or self.cancelled or isinstance(failure, Agreed):
            return failure
        try:
            if failure.problem.reason == "ConnectFailed":
                until = time.monotonic() + _GRACE_SECONDS
                while store.reported() is None and time.monotonic() < until:
                    time.sleep(0.02)
            problem = store.report(failure.problem)
        except Exception:
            return failure
        if problem == failure.problem:
            return failure
        return PeerFailure(problem.reason, problem.message, problem.rank)


def _inner_deadline(seconds: float) -> float:
    """Monotonic time by which all is decided here, a little before the driver's own deadline."""
    return time.monotonic() + seconds - min(1.0, 0.05 * seconds)


def _unexpected(error: BaseException, rank: int) -> Failure:
    if isinstance(error, LayoutError):
        return Failure("BadSource", str(error), rank)
    return Failure("MoverError", f"rank {rank}: {type(error).__name__}: {error}", rank)


def first_problem(words: Sequence[Word]) -> Problem | None:
    """The problem of the lowest rank that has one."""
    found = next((w["problem"] for w in words if w.get("problem")), None)
    return None if found is None else Problem.model_validate(found)


def judge_plans(words: Sequence[Word]) -> Problem | None:
    """All ranks must have one plan and one runtime; names the first rank that differs from rank 0."""
    for rank, word in enumerate(words):
        for key, value in word["runtime"].items():
            if value != words[0]["runtime"].get(key):
                message = f"rank {rank} runs with {key} {value}, rank 0 with {words[0]['runtime'].get(key)}"
                return Problem(reason="RuntimeDiffers", message=f"{message}; use like images", rank=rank)
    problem = first_problem(words)
    if problem is not None:
        return problem
    for rank, word in enumerate(words):
        if word["digest"] != words[0]["digest"]:
            return Problem(
                reason="PlanDiffers",
                message=f"rank {rank} made plan {word['digest']}, rank 0 made {words[0]['digest']}: "
                f"their images or "
                "versions of weightsync differ",
                rank=rank,
            )
    return None


def judge_ready(trainer_ranks: int) -> Callable[[Sequence[Word]], Problem | None]:
    """All trainer ranks must hold the version, from one and the same publish."""

    def judge(words: Sequence[Word]) -> Problem | None:
        problem = first_problem(words)
        if problem is not None:
            return problem
        sequences = [w["sequence"] for w in words[:trainer_ranks]]
        for rank, sequence in enumerate(sequences):
            if sequence != sequences[0]:
                return Problem(
                    reason="VersionUnavailable",
                    message=f"trainer rank {rank} holds publish {sequence}, rank 0 publish "
                    f"{sequences[0]}: the ranks "
                    "must publish the same versions in the same order",
                    rank=rank,
                )
        return None

    return judge


def sources_differ(
    theirs: tuple[SourceParameter, ...], mine: tuple[SourceParameter, ...], rank: int
) -> Problem:
    """Which parameter this trainer rank sees otherwise than rank 0."""
    a, b = {s.name: s for s in theirs}, {s.name: s for s in mine}
    name = next((n for n in sorted(a.keys() | b.keys()) if a.get(n) != b.get(n)), "?")
    return Problem(
        reason="SourcesDiffer",
        message=f"{name!r}: trainer rank {rank} has {b.get(name)}, rank 0 has {a.get(name)}"[:1024],
        rank=rank,
    )
