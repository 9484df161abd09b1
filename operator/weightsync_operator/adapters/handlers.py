"""kopf's side: one daemon for each object, woken by events on the object and on its pods. No decisions
here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp
import kopf
from pydantic import ValidationError

from weightsync_engine.protocol.names import GROUP, LABEL_SYNC

from .. import names
from ..api.types import WeightSyncSpec
from ..core.rounds import Settings
from .agents import Agents
from .kube import Kube, KubeError, KubeUnavailable
from .reconcile import LEAVE_SECONDS, ObjectGone, Reconciler
from .tokens import Tokens

_LOG = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of an object."""


class Pods:
    """The labelled pods, by the object that they name."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, Any]] = {}
        self._owners: dict[str, Key] = {}

    def put(self, raw: dict[str, Any], *, deleted: bool = False) -> set[Key]:
        """Notes an event; the objects that it concerns: the old and the new owner of a relabelled pod
        alike."""
        uid = raw["metadata"]["uid"]
        touched = {self._owners[uid]} if uid in self._owners else set()
        owner = raw["metadata"].get("labels", {}).get(LABEL_SYNC)
        if deleted or not owner:
            self._pods.pop(uid, None)
            self._owners.pop(uid, None)
        else:
            self._pods[uid] = raw
            self._owners[uid] = (raw["metadata"]["namespace"], owner)
            touched.add(self._owners[uid])
        return touched

    def replace(self, key: Key, listed: Iterable[dict[str, Any]]) -> None:
        """What a list says of one object's pods, in place of what events said."""
        fresh = {raw["metadata"]["uid"]: raw for raw in listed}
        for uid in [uid for uid, owner in self._owners.items() if owner == key and uid not in fresh]:
            self._pods.pop(uid, None)
            self._owners.pop(uid, None)
        for uid, raw in fresh.items():
            self._pods[uid], self._owners[uid] = raw, key

    def of(self, key: Key) -> list[dict[str, Any]]:
        return [self._pods[uid] for uid, owner in self._owners.items() if owner == key]


class Handlers:
    """Registers with kopf and runs the daemons."""

    def __init__(
        self,
        kube: Kube,
        http: aiohttp.ClientSession,
        tokens: Tokens,
        *,
        instance: str,
        settings: Settings | None = None,
    ) -> None:
        self._kube, self._http, self._tokens = kube, http, tokens
        self._instance = instance
        self._settings = settings or Settings()
        self._pods = Pods()
        self._wakes: dict[Key, asyncio.Event] = {}
        self._deleted: set[str] = set()

    def register(self, registry: kopf.OperatorRegistry) -> None:
        kopf.on.login(registry=registry)(_login)
        kopf.on.startup(registry=registry)(_configure)
        kopf.on.event("", "v1", "pods", registry=registry)(self._on_pod)
        kopf.on.event(GROUP, names.API_VERSION, names.PLURAL, registry=registry)(self._on_object)
        kopf.daemon(
            GROUP,
            names.API_VERSION,
            names.PLURAL,
            registry=registry,
            cancellation_timeout=2.0,
        )(self._daemon)

    def _wake(self, key: Key) -> None:
        event = self._wakes.get(key)
        if event is not None:
            event.set()

    async def _on_pod(self, event: Any, **_: Any) -> None:
        for key in self._pods.put(dict(event["object"]), deleted=event["type"] == "DELETED"):
            self._wake(key)

    async def _on_object(self, event: Any, namespace: str | None, name: str, uid: str, **_: Any) -> None:
        if event["type"] == "DELETED":
            # Also when somebody removed our finalizer by hand, of which kopf does not tell the daemon.
            self._deleted.add(uid)
        self._wake((namespace or "", name))

    async def _daemon(
        self, body: kopf.Body, namespace: str | None, name: str, uid: str, stopped: Any, **_: Any
    ) -> None:
        """Never raises, and returns only when told to stop or when the object is gone."""
        key = (namespace or "", name)
        wake = self._wakes[key] = asyncio.Event()
        agents = Agents(self._http, self._tokens, *key, changed=wake.set)
        reconciler = Reconciler(
            self._kube, agents, *key, uid, instance=self._instance, settings=self._settings
        )
        try:
            await self._loop(key, uid, body, stopped, wake, reconciler)
            reason = stopped.reason or kopf.DaemonStoppingReason(0)
            if uid in self._deleted or kopf.DaemonStoppingReason.RESOURCE_DELETED in reason:
                await reconciler.leave(self._pods.of(key))
                self._tokens.forget(*key)
        finally:
            await agents.close()
            self._deleted.discard(uid)
            if self._wakes.get(key) is wake:
                del self._wakes[key]

    async def _loop(
        self,
        key: Key,
        uid: str,
        body: kopf.Body,
        stopped: Any,
        wake: asyncio.Event,
        reconciler: Reconciler,
    ) -> None:
        loop = asyncio.get_running_loop()
        listed = float("-inf")
        while not stopped and uid not in self._deleted:
            # Before looking: what happens from here on wakes the next turn.
            wake.clear()
            if loop.time() - listed >= self._settings.resync and await self._list(key):
                listed = loop.time()
            wait = 1.0
            if listed > float("-inf"):
                try:
                    wait = await self._turn(key, body, reconciler)
                except ObjectGone:
                    self._deleted.add(uid)
                    return
            waiter = asyncio.create_task(wake.wait())
            halt = asyncio.ensure_future(stopped.wait())
            try:
                await asyncio.wait({waiter, halt}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiter.cancel()
                halt.cancel()

    async def _list(self, key: Key) -> bool:
        """Seeds and from time to time corrects what events say: a watch may be quiet without an error."""
        try:
            self._pods.replace(key, await self._kube.list_pods(*key))
        except (KubeError, KubeUnavailable) as error:
            _LOG.warning("%s/%s: cannot list its pods: %s", *key, error)
            return False
        return True

    async def _turn(self, key: Key, body: kopf.Body, reconciler: Reconciler) -> float:
        """One step. Raises ObjectGone and nothing else: a defect of ours must not make the object deaf."""
        try:
            spec = WeightSyncSpec.model_validate(dict(body.spec))
            generation = int(body.metadata.get("generation", 1))
            return await reconciler.step(spec, generation, lambda: self._pods.of(key))
        except ValidationError as error:
            _LOG.error("%s/%s: its spec is not readable, is the CRD of another version? %s", *key, error)
        except (ObjectGone, asyncio.CancelledError):
            raise
        except Exception:
            _LOG.exception("%s/%s: a step failed", *key)
            return 5.0
        return 10.0


def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)


def _configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.posting.enabled = False
    settings.persistence.finalizer = names.FINALIZER
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.ANNOTATION_PREFIX)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.ANNOTATION_PREFIX)
    # The operator may not list CRDs or namespaces of the whole cluster.
    settings.scanning.disabled = True
    # Without limits a stream that died without a word would never be missed.
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 270
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    settings.networking.request_timeout = 30
    # A daemon that is told to stop says goodbye to its agents first; kopf looks only once at whether it is
    # done.
    settings.background.instant_exit_timeout = LEAVE_SECONDS + 1.0
    settings.watching.label_selectors["pods"] = LABEL_SYNC
