"""The Lease that lets one operator work at a time."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from typing import Any

from .. import names
from .kube import Kube, KubeError, KubeUnavailable

_LOG = logging.getLogger(__name__)


class Lease:
    """One Lease object. Who holds it renews it three times in its duration and gives up before others may
    take it.

    Clocks of different machines are never compared: a holder counts as dead when its Lease has not changed
    for the duration, as seen by us.
    """

    def __init__(self, kube: Kube, namespace: str, identity: str, *, seconds: float = 15.0) -> None:
        self._kube = kube
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._identity = identity
        self._seconds = seconds
        self.held = False

    async def acquire(self) -> None:
        """Waits, without limit, until the Lease is ours; the log says for whom it waits."""
        seen, since, told = "", time.monotonic(), ""
        while True:
            try:
                lease = await self._read()
                holder = (lease or {}).get("spec", {}).get("holderIdentity") or ""
                version = (lease or {}).get("metadata", {}).get("resourceVersion", "")
                if version != seen:
                    seen, since = version, time.monotonic()
                stale = time.monotonic() - since > self._seconds
                if lease is None or holder in ("", self._identity) or stale:
                    await self._write(lease)
                    self.held = True
                    _LOG.info("holds the Lease %s/%s as %s", self._namespace, names.LEASE, self._identity)
                    return
                if holder != told:
                    _LOG.info("waits for the Lease %s/%s, held by %s", self._namespace, names.LEASE, holder)
                    told = holder
            except (KubeError, KubeUnavailable) as error:
                if isinstance(error, KubeError) and error.status != 409:
                    _LOG.error("cannot take the Lease %s/%s: %s", self._namespace, names.LEASE, error)
                else:
                    _LOG.info("the Lease is not to be had yet: %s", error)
            await asyncio.sleep(min(1.0, self._seconds / 5))

    async def keep(self) -> None:
        """Renews until it is lost, which is when it returns: the caller must stop working at once."""
        renewed = time.monotonic()
        while time.monotonic() - renewed < self._seconds * 2 / 3:
            await asyncio.sleep(self._seconds / 5)
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._seconds / 3):
                    lease = await self._read()
                    if lease is not None and lease["spec"].get("holderIdentity") != self._identity:
                        _LOG.error("the Lease was taken by %s", lease["spec"].get("holderIdentity"))
                        break
                    await self._write(lease)
                renewed = began
            except (KubeError, KubeUnavailable, TimeoutError) as error:
                _LOG.warning("could not renew the Lease: %s", error or "timeout")
        self.held = False

    async def release(self) -> None:
        """Lets the next operator begin at once. Never raises: an unreleased Lease runs out."""
        if not self.held:
            return
        self.held = False
        try:
            lease = await self._read()
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._kube.request("PUT", f"{self._path}/{names.LEASE}", body=lease)
        except (KubeError, KubeUnavailable) as error:
            _LOG.warning("could not release the Lease: %s", error)

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._kube.request("GET", f"{self._path}/{names.LEASE}")
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def _write(self, lease: dict[str, Any] | None) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._seconds)),
            "renewTime": now,
        }
        if lease is None:
            await self._kube.request(
                "POST",
                self._path,
                body={
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": names.LEASE, "namespace": self._namespace},
                    "spec": spec | {"acquireTime": now},
                },
            )
            return
        # PUT carries the resourceVersion that was read: two who both found it stale cannot both have it.
        lease["spec"] = {**lease.get("spec", {}), **spec}
        await self._kube.request("PUT", f"{self._path}/{names.LEASE}", body=lease)
