"""The worker's engine: `WeightSyncEngine`, which vLLM builds in every worker right after it loaded the model.

It resolves the model, takes memory for the shadow (before vLLM sizes its KV cache) and starts the mover
beside the worker. Whatever goes wrong here is kept as the worker's problem and told to the agent: the server
starts and serves all the same. Nothing that is reached through vLLM's collective calls raises when there is
more than one worker: vLLM would pair the answers of later calls wrongly for ever after.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ..agent.core import pod_address
from ..mover.client import drive, join_epoch, run_transfer
from ..mover.memory import Needs, check_memory, staging_bytes
from ..mover.slab import Slab, SlabError
from ..mover.supervisor import UP_SECONDS, MoverSupervisor
from ..protocol.messages import Problem, Rendezvous
from ..protocol.mover import MoverJoin, MoverTransfer
from ..protocol.names import ENV_COMMIT, ENV_DRAFT_MODEL, FROZEN, IN_PLACE, STAGED, UPDATE
from ..resolve.checkpoint import Checkpoint, NoCheckpoint, open_checkpoint
from ..resolve.draft import Draft, draft_of, with_draft
from ..resolve.manifest import Resolved, resolve
from . import inplace
from .inplace import InPlace, NotInPlace
from .plugin import log_with_vllm
from .shadow import Flipped, Shadow

log = logging.getLogger(__name__)

WHAT_TO_DO = (
    "use more GPUs for each server (--tensor-parallel-size), raise --gpu-memory-utilization where the GPU is not full, "
    "free it of other processes, or lower WEIGHTSYNC_STAGING_MIB"
)
OR_IN_PLACE = f"; {ENV_COMMIT}={IN_PLACE} needs no shadow, but nothing is generated while weights travel"
REASONS = 8
"""Unresolved parameters that a worker's description names."""


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Without Kubernetes: what `/init_weight_transfer_engine` takes. Equal on all workers of all servers but
    for `rank_offset`, the first worker's rank of this server."""

    rank_offset: int = -1
    world_size: int = 0
    trainer_ranks: int = 0
    master_address: str = ""
    """Where the epoch's store listens."""
    master_port: int = 0
    key: str = field(default="", repr=False)
    """Secret of the epoch, at least 32 characters."""
    object_uid: str = "vllm"
    epoch: int = 1
    """Whose epoch, and which: names the keys in the store."""
    transport: str = "auto"
    deadline_seconds: float = 120.0
    names: list[str] = field(default_factory=list)
    """What the trainer sends, in its order, if updates will come in several calls."""
    error: str = ""
    """Why the given information could not be read; set here, never by a caller."""


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Without Kubernetes: what `/update_weights` takes."""

    version: str = ""
    round: int = 0
    deadline_seconds: float = 600.0
    names: list[str] | None = None
    """The next of the declared names, in order; the last ones wait until the version is here. None: all."""
    error: str = ""


class Receiving:
    """One version on its way into the shadow, while its parameters are being named call by call."""

    def __init__(self, socket: Path, transfer: MoverTransfer, declared: list[str]) -> None:
        self.transfer = transfer
        self._declared, self._named = declared, 0
        self._all = not declared
        self._problem: Problem | None = None
        # The bytes travel all at once, from the first call on: the trainer waits for nobody's names.
        self._thread = threading.Thread(
            target=self._run, args=(socket,), name="weightsync-update", daemon=True
        )
        self._thread.start()

    def _run(self, socket: Path) -> None:
        self._problem = drive(run_transfer(socket, self.transfer), self.transfer.deadline_seconds)

    @property
    def next_name(self) -> str:
        """Empty once all are named."""
        return "" if self._all or self._named == len(self._declared) else self._declared[self._named]

    def name(self, names: list[str] | None) -> Problem | None:
        """Take in the names of one call; a problem if they are not the next ones that were declared."""
        if names is None:
            self._all = True
            return None
        wanted = self._declared[self._named : self._named + len(names)]
        if names == wanted:
            self._named += len(names)
            return None
        wrong, instead = next(
            (n, w) for n, w in itertools.zip_longest(names, wanted, fillvalue="nothing more") if n != w
        )
        known = "comes out of order" if wrong in self._declared else "was not declared at init"
        return Problem(reason="BadUpdateInfo", message=f"{wrong!r} {known}: {instead!r} is next"[:1024])

    def wait(self) -> Problem | None:
        """Until the version is verified, or not; within the update's deadline."""
        self._thread.join()
        return self._problem


class WeightSyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """One vLLM worker's shadow, mover and flip."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        self.rank: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.boot = uuid.uuid4().hex
        self.problem: Problem | None = None
        self.resolved: Resolved | None = None
        self.in_place = False
        self.shadow: Shadow | InPlace | None = None
        self.supervisor: MoverSupervisor | None = None
        self._run_dir: Path | None = None
        self._init: InitInfo | None = None
        self._update: UpdateInfo | None = None
        """The version that was received and verified in this update."""
        self._receiving: Receiving | None = None
        self._alone: Problem | None = None
        log_with_vllm()
        attach_worker_methods()
        try:
            self._build()
        except Exception as e:
            log.exception("weightsync cannot work beside this worker; vLLM serves on without it")
            self.problem = Problem(reason="EngineFailed", message=f"{type(e).__name__}: {e}"[:1024])

    def _build(self) -> None:
        self.in_place = commit_mode() == IN_PLACE
        refuse = refusal(self.vllm_config)
        if self.in_place:
            refuse = refuse or inplace.refusal(self.vllm_config)
        checkpoint, why = None, refuse
        if not refuse:
            try:
                config = self.vllm_config
                load_format = getattr(config.load_config.load_format, "value", config.load_config.load_format)
                checkpoint = open_checkpoint(
                    self.model_config.model, self.model_config.revision, str(load_format)
                )
            except NoCheckpoint as e:
                why = str(e)
                log.warning("live weights are not compared with a checkpoint: %s", why)
        try:
            self.resolved = resolve(
                self.model, checkpoint, why, refuse, config=self.vllm_config, whole=self.in_place
            )
            if not refuse and (draft := self._draft()) is not None:
                self.resolved = self._with_draft(self.resolved, draft, checkpoint, why)
        finally:
            if checkpoint is not None:
                checkpoint.close()
        unresolved = self.resolved.manifest.unresolved
        if refuse:
            self.problem = Problem(reason="NotSupported", message=refuse[:1024])
            return
        if unresolved:
            self.problem = Problem(reason="Unresolved", message=unresolved_message(self.resolved)[:1024])
            log.error("%s", self.problem.message)
            for name, reason in unresolved.items():
                log.info("not resolved: %s: %s", name, reason)
            return  # no shadow for a round that cannot be
        for name, reason in self.resolved.manifest.fallback.items():
            log.info("by vLLM's loader: %s: %s", name, reason)
        if self.device.type not in ("cpu", "cuda"):
            message = f"weights on {self.device.type} are not supported: only CUDA devices and the CPU are"
            self.problem = Problem(reason="NotSupported", message=message)
            return
        staging = staging_bytes() if self.device.type == "cuda" else 0
        try:
            if self.in_place:
                slab, self.shadow = self._in_place(self.resolved, staging)
            else:
                slab, self.shadow = self._staged(self.resolved, staging)
        except NotInPlace as e:
            self.problem = Problem(reason="NotSupported", message=str(e)[:1024])
            log.error("%s", e)
            return
        except SlabError as e:
            message = str(e) if self.in_place else f"{e}{OR_IN_PLACE}"
            self.problem = Problem(reason="NoMemory", message=message[:1024])
            log.error("%s", message)
            return
        self._run_dir = Path(tempfile.mkdtemp(prefix="weightsync-"))
        atexit.register(self._clean)
        self.supervisor = MoverSupervisor(
            "inference",
            self.rank,
            slab,
            self.resolved.manifest,
            self._run_dir,
            staging_bytes=staging,
        )
        # A server that answers can then be in sync at once.
        why = self.supervisor.wait_ready(UP_SECONDS)
        if why:
            log.error("%s", why)
            if self.device.type == "cuda":
                # vLLM measures free memory next, and sizes its KV cache by it: all of ours must be taken by then. On
                # the CPU a mover may come later.
                self.problem = Problem(reason="MoverNotUp", message=why[:1024])
        log.info(
            "weightsync worker %d: %d parameters (%d for the draft model, %d by vLLM's loader), %s of %d bytes",
            self.rank,
            len(self.resolved.manifest.expected),
            len(self.resolved.manifest.draft),
            len(self.resolved.manifest.fallback),
            "live weights" if self.in_place else "shadow",
            self.resolved.slab_bytes,
        )

    def _staged(self, resolved: Resolved, staging: int) -> tuple[Slab, Shadow]:
        if self.device.type == "cuda":
            needs = Needs.of("shadow", resolved.slab_bytes, staging)
            limit = memory_limit(self.vllm_config, self.device)
            check_memory(needs, self.device, WHAT_TO_DO, limit)
        slab = Slab.create(resolved.slab_bytes, self.device)
        return slab, Shadow(resolved, slab)

    def _in_place(self, resolved: Resolved, staging: int) -> tuple[Slab, InPlace]:
        if why := inplace.unfit(resolved):
            raise NotInPlace(why)
        if self.device.type == "cuda":
            what = "weights, which are there twice while they move to where their mover can write"
            needs = Needs.of(what, resolved.slab_bytes, staging, replaced=inplace.live_bytes(resolved))
            check_memory(needs, self.device, WHAT_TO_DO, memory_limit(self.vllm_config, self.device))
        slab = Slab.create(resolved.slab_bytes, self.device)
        try:
            live = InPlace(resolved, slab, self.model)
        except NotInPlace:
            slab.close()
            raise
        if slab.gpu is not None:
            slab.gpu.drop_cached()  # of which vLLM's KV cache is to have the most
        return slab, live

    def _draft(self) -> Draft | None:
        """The draft model that is to be updated."""
        speculative = self.vllm_config.speculative_config
        if speculative is None or os.environ.get(ENV_DRAFT_MODEL) == FROZEN:
            return None
        worker = building_worker()
        if worker is None:
            raise RuntimeError(
                "the worker that this engine is built in cannot be found, and so its draft model is not either; "
                f"set {ENV_DRAFT_MODEL}={FROZEN} to leave that as it is"
            )
        return draft_of(worker.get_draft_model(), self.vllm_config)

    def _with_draft(
        self, target: Resolved, draft: Draft, checkpoint: Checkpoint | None, why_none: str
    ) -> Resolved:
        if not draft.own:
            return with_draft(target, draft, checkpoint, why_none)
        from vllm.model_executor.model_loader.utils import get_draft_load_config

        load_format = get_draft_load_config(self.vllm_config).load_format
        its = draft.config.model_config
        try:
            with open_checkpoint(
                its.model, its.revision, str(getattr(load_format, "value", load_format))
            ) as own:
                return with_draft(target, draft, own)
        except NoCheckpoint as e:
            return with_draft(target, draft, None, str(e))

    # -- what the pod's agent calls, through collective_rpc --------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Who this worker is, where its mover listens, and why it cannot take part."""
        manifest = self.resolved.manifest if self.resolved else None
        return self.answer() | {
            "socket": str(self.supervisor.socket_path) if self.supervisor else "",
            "parameters": len(manifest.expected) if manifest else 0,
            "bytes": self.resolved.slab_bytes if self.resolved else 0,
            "unresolved": dict(list(manifest.unresolved.items())[:REASONS]) if manifest else {},
            "not_compared": self.resolved.not_compared if self.resolved else "",
            "in_place": self.in_place,
        }

    def flip(self, object_uid: str, epoch: int, round_: int, version: str) -> dict[str, Any]:
        if self.problem is not None or self.shadow is None:
            problem: Problem | None = self.problem
        else:
            problem = self.shadow.flip(Flipped(object_uid, epoch, round_, version))
        return self.answer(problem)

    def stand(self) -> dict[str, Any]:
        """Nothing on this worker's device still computes with the live weights once this has answered."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.answer()

    def answer(self, problem: Problem | None = None) -> dict[str, Any]:
        """This worker's status; every answer carries it whole."""
        problem = problem or self.problem
        shadow = self.shadow
        return {
            "rank": self.rank,
            "boot": self.boot,
            "pid": os.getpid(),
            "mover_pid": (self.supervisor.pid if self.supervisor else None) or 0,
            "mover_problem": self.supervisor.problem.message
            if self.supervisor and self.supervisor.problem
            else "",
            "version": shadow.live.version if shadow and shadow.live else "",
            "torn": bool(shadow and shadow.torn),
            "copy_seconds": shadow.seconds if shadow else 0.0,
            "problem": {"reason": problem.reason, "message": problem.message} if problem else {},
            "update_problem": self._alone.message if self._alone else "",
        }

    # -- vLLM's own contract, for the use without Kubernetes -------------------------------------------------

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        try:
            return InitInfo(**{k: v for k, v in init_dict.items() if k != "error"})
        except (TypeError, AttributeError) as e:
            return InitInfo(error=f"init_info does not fit: {e}")

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        try:
            return UpdateInfo(**{k: v for k, v in update_dict.items() if k != "error"})
        except (TypeError, AttributeError) as e:
            return UpdateInfo(error=f"update_info does not fit: {e}")

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the epoch. With one worker a failure raises; with more it is kept, see `_report`."""
        self._init = None
        problem = self._join(init_info)
        if problem is None:
            self._init = init_info
        self._report(problem)

    def start_weight_update(self) -> None:
        """Forget what an update before this one received, or did not."""
        self._update = self._receiving = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive one version into the shadow, verified, in one call or in several that name its parameters in order.
        Live weights do not change."""
        problem = self._receive(update_info)
        if problem is not None:
            self._update = self._receiving = None
        self._report(problem)

    def finish_weight_update(self) -> None:
        """Make what was received live, and raise or keep why not."""
        if self._update is None or self._init is None or self.shadow is None:
            missing = self._receiving.next_name if self._receiving is not None else ""
            because = f": {missing!r} and what comes after it were not named" if missing else ""
            problem: Problem | None = Problem(
                reason="NothingReceived",
                message=f"no version was received and verified in this update{because}",
            )
        else:
            want = Flipped(self._init.object_uid, self._init.epoch, self._update.round, self._update.version)
            problem = self.shadow.flip(want)
        self._report(problem)

    def shutdown(self) -> None:
        """Let the mover go. It leaves by itself; vLLM's own end must not meet a child that vanishes."""
        if self.supervisor is not None:
            self.supervisor.close()
        self._clean()

    def _clean(self) -> None:
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _socket(self) -> Path:
        if self.supervisor is None:
            raise RuntimeError("this worker has no mover")
        return self.supervisor.socket_path

    def _join(self, init_info: InitInfo) -> Problem | None:
        if init_info.error:
            return Problem(reason="BadInitInfo", message=init_info.error)
        if self.problem is not None:
            return self.problem
        if self.in_place:
            message = (
                f"{ENV_COMMIT}={IN_PLACE} needs the pod's agent, which stops generation for the transfer and closes a "
                f"server whose transfer failed: use {STAGED} without Kubernetes"
            )
            return Problem(reason="NotSupported", message=message)
        try:
            join = MoverJoin(
                object_uid=init_info.object_uid,
                term=1,
                epoch=init_info.epoch,
                rank=init_info.rank_offset + self.rank,
                world_size=init_info.world_size,
                trainer_ranks=init_info.trainer_ranks,
                rendezvous=Rendezvous(host=init_info.master_address, port=init_info.master_port),
                key=init_info.key,
                host=pod_address(),
                transport=init_info.transport,
                server=f"server-{init_info.rank_offset}",
                deadline_seconds=init_info.deadline_seconds,
            )
        except Exception as e:
            return Problem(reason="JoinFailed", message=f"{type(e).__name__}: {e}"[:1024])
        return drive(join_epoch(self._socket(), join), join.deadline_seconds)

    def _receive(self, update_info: UpdateInfo) -> Problem | None:
        if update_info.error or not update_info.version or update_info.round < 1:
            message = update_info.error or "a version and a round, which counts from 1, are needed"
            return Problem(reason="BadUpdateInfo", message=message)
        if self._init is None:
            return Problem(reason="NotInitialised", message="init_transfer_engine has not succeeded")
        receiving = self._receiving
        if receiving is None or receiving.transfer.round != update_info.round:
            try:
                transfer = MoverTransfer(
                    epoch=self._init.epoch,
                    round=update_info.round,
                    version=update_info.version,
                    deadline_seconds=update_info.deadline_seconds,
                )
            except ValueError as e:
                return Problem(reason="BadUpdateInfo", message=f"update_info does not fit: {e}"[:1024])
            self._update = None
            self._receiving = receiving = Receiving(self._socket(), transfer, self._init.names)
        problem = receiving.name(update_info.names)
        if problem is None and not receiving.next_name:
            problem = receiving.wait()
            self._update = update_info if problem is None else None
        return problem

    def _report(self, problem: Problem | None) -> None:
        """Raise a problem if this is the only worker; else keep it for `weightsync_live`: an exception in one
        of several workers would desynchronise all later answers."""
        self._alone = problem
        if problem is None:
            return
        log.error("worker %d: %s", self.rank, problem.message)
        if self.parallel_config.world_size == 1:
            raise RuntimeError(problem.message)


def refusal(config: VllmConfig) -> str:
    """Why this server's set-up as a whole cannot be updated in place; empty: it can."""
    parallel = config.parallel_config
    if config.lora_config is not None:
        return "serving with LoRA adapters is not supported"
    if parallel.enable_eplb:
        return "expert load balancing moves experts between workers, which is not supported"
    if parallel.nnodes > 1:
        return "one vLLM server over several pods is not supported: give each pod a server of its own"
    if parallel.data_parallel_size_local != parallel.data_parallel_size:
        return "data parallelism over several pods is not supported: give each pod a server of its own"
    if parallel.distributed_executor_backend == "ray":
        return "vLLM's Ray executor is not supported: use --distributed-executor-backend mp"
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0", "false", "False"):
        return "vLLM's Rust front end bypasses the agent: unset VLLM_USE_RUST_FRONTEND"
    said = os.environ.get(ENV_DRAFT_MODEL, UPDATE)
    if said not in (UPDATE, FROZEN):
        return f"{ENV_DRAFT_MODEL} is {said[:40]!r}: it is {UPDATE} (the default) or {FROZEN}"
    speculative: Any = config.speculative_config
    if speculative is not None and speculative.parallel_drafting and said != FROZEN:
        return (
            "a draft model that proposes in parallel keeps what it computed from its weights as they were loaded: "
            f"set {ENV_DRAFT_MODEL}={FROZEN}, or serve without one"
        )
    uva: Any = getattr(getattr(config, "offload_config", None), "uva", None)
    if uva is not None and uva.cpu_offload_gb:
        return "weights that are offloaded to the CPU are not supported"
    return ""


def commit_mode() -> str:
    """How new weights become live in this pod. Raises ValueError for a bad setting."""
    mode = os.environ.get(ENV_COMMIT) or STAGED
    if mode not in (STAGED, IN_PLACE):
        raise ValueError(f"{ENV_COMMIT} is {mode!r}: set it to {STAGED} or {IN_PLACE}")
    return mode


def building_worker() -> Any | None:
    """The vLLM worker that is loading its model up the stack: the engine is built with the target alone, and the draft
    model is the worker's to give."""
    frame = inspect.currentframe()
    while frame is not None:
        worker = frame.f_locals.get("self")
        if callable(getattr(type(worker), "get_draft_model", None)) and hasattr(worker, "model_runner"):
            return worker
        frame = frame.f_back
    return None


def memory_limit(config: VllmConfig, device: torch.device) -> int | None:
    """Bytes that this server's worker may use on its GPU in all, KV cache included; None if the KV cache's size is
    given and not derived from it."""
    if config.cache_config.kv_cache_memory_bytes:
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return int(total * config.cache_config.gpu_memory_utilization)


def unresolved_message(resolved: Resolved) -> str:
    """One sentence about what a model lacks: the most frequent reason, and the first name that has it."""
    unresolved = resolved.manifest.unresolved
    total = len(unresolved) + len(resolved.manifest.expected)
    reason, count = Counter(unresolved.values()).most_common(1)[0]
    name = next(name for name, why in unresolved.items() if why == reason)
    more = f" (and {count - 1} more)" if count > 1 else ""
    others = f"; {len(unresolved) - count} for other reasons" if len(unresolved) > count else ""
    return f"{len(unresolved)} of {total} parameters cannot be updated: {name}{more}: {reason}{others}"


def attach_worker_methods() -> None:
    """Give vLLM's worker class the methods that the agent calls by name. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerBase

    for method in (weightsync_describe, weightsync_flip, weightsync_live, weightsync_stand):
        setattr(WorkerBase, method.__name__, method)


def _engine(worker: Any) -> WeightSyncEngine | None:
    engine = getattr(worker, "weight_transfer_engine", None)
    return engine if isinstance(engine, WeightSyncEngine) else None


def _status(worker: Any, nonce: str, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        engine = _engine(worker)
        if engine is None:
            raise RuntimeError("this worker has no weightsync engine")
        return {**getattr(engine, what)(**arguments), "nonce": nonce}
    except Exception as e:
        log.exception("%s failed", what)
        # Fixed in form, and built of nothing that could fail as well. An unknown version is no version: torn.
        return {
            "rank": int(getattr(worker, "rank", -1)),
            "version": "",
            "torn": True,
            "nonce": nonce,
            "problem": {"reason": "WorkerFailed", "message": f"{what}: {type(e).__name__}: {e}"[:1024]},
        }


def weightsync_describe(worker: Any, nonce: str = "") -> dict[str, Any]:
    """Worker method: never raises, changes nothing."""
    return _status(worker, nonce, "describe", {})


def weightsync_live(worker: Any, nonce: str = "") -> dict[str, Any]:
    """Worker method: what the live weights are. Never raises, changes nothing."""
    return _status(worker, nonce, "answer", {})


def weightsync_stand(worker: Any, nonce: str = "") -> dict[str, Any]:
    """Worker method: after the steps before it, also on the device. Never raises, changes nothing."""
    return _status(worker, nonce, "stand", {})


def weightsync_flip(
    worker: Any, object_uid: str, epoch: int, round: int, version: str, nonce: str = ""
) -> dict[str, Any]:
    """Worker method: make the shadow live if it is the verified version. Idempotent, never raises."""
    return _status(
        worker, nonce, "flip", {"object_uid": object_uid, "epoch": epoch, "round_": round, "version": version}
    )
