"""The `weightsync-operator` command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import kopf
from aiohttp import web

from weightsync_engine.protocol.names import DEFAULT_OPERATOR, ENV_OPERATOR, GROUP

from . import names
from .adapters.agents import session
from .adapters.handlers import Handlers
from .adapters.kube import Kube, KubeError, KubeUnavailable
from .adapters.lease import Lease
from .adapters.tokens import Tokens

_LOG = logging.getLogger("weightsync_operator")
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weightsync-operator", description="Keeps vLLM pods on the weights that a trainer publishes."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--namespace", action="append", dest="namespaces", metavar="NAME", help="watch this one; repeatable"
    )
    where.add_argument("--all-namespaces", action="store_true", help="watch all of the cluster")
    parser.add_argument(
        "--service-account",
        default=os.environ.get(ENV_OPERATOR, DEFAULT_OPERATOR),
        metavar="NAMESPACE:NAME",
        help=f"the account that this runs as, for tokens to agents (environment: {ENV_OPERATOR}; "
        "default: %(default)s)",
    )
    parser.add_argument("--lease-namespace", metavar="NAME", help="default: that of the service account")
    parser.add_argument("--lease-seconds", type=float, default=15.0, metavar="S", help="default: %(default)s")
    parser.add_argument(
        "--identity", default=socket.gethostname(), help="holder of the Lease; default: host name"
    )
    parser.add_argument(
        "--health-port", type=int, default=8080, metavar="PORT", help="0: none; default: 8080"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


async def _serve_health(port: int, lease: Lease) -> web.AppRunner | None:
    """/healthz: the loop turns. /readyz: this one holds the Lease."""
    if not port:
        return None

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if lease.held else web.Response(status=503, text="waits for the Lease")

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner


async def _wait_for_crd(kube: Kube, namespaces: Sequence[str]) -> None:
    """Until the API serves our objects here: kopf would wait in silence."""
    base = f"/apis/{GROUP}/{names.API_VERSION}"
    path = f"{base}/namespaces/{namespaces[0]}/{names.PLURAL}" if namespaces else f"{base}/{names.PLURAL}"
    while True:
        try:
            await kube.request("GET", path, query={"limit": "1"})
            return
        except KubeError as error:
            hint = "install crds/ of the chart" if error.status == 404 else "check the operator's RBAC"
            _LOG.error("cannot list WeightSync objects: %s; %s", error, hint)
        except KubeUnavailable as error:
            _LOG.warning("the API server does not answer: %s", error)
        await asyncio.sleep(2.0)


async def _run(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    kube = await Kube.connect()
    http = session()
    tokens = Tokens(kube, options.service_account)
    lease = Lease(
        kube,
        options.lease_namespace or options.service_account.partition(":")[0],
        options.identity,
        seconds=options.lease_seconds,
    )
    health = None
    try:
        health = await _serve_health(options.health_port, lease)
        if not await _unless(stop, _wait_for_crd(kube, options.namespaces or ())):
            return 0
        if not await _unless(stop, lease.acquire()):
            return 0
        return await _work(options, kube, http, tokens, lease, stop)
    finally:
        await lease.release()
        if health is not None:
            await health.cleanup()
        await http.close()
        await kube.close()


async def _unless(stop: asyncio.Event, work: object) -> bool:
    """Whether the work was finished before `stop`; its error is raised."""
    task = asyncio.ensure_future(work)  # type: ignore[call-overload]
    halt = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, halt}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        task.cancel()
        halt.cancel()


async def _work(
    options: argparse.Namespace,
    kube: Kube,
    http: object,
    tokens: Tokens,
    lease: Lease,
    stop: asyncio.Event,
) -> int:
    registry = kopf.OperatorRegistry()
    Handlers(kube, http, tokens, instance=options.identity).register(registry)  # type: ignore[arg-type]
    keep = asyncio.create_task(lease.keep(), name="lease")
    operator = asyncio.create_task(
        kopf.operator(
            registry=registry,
            standalone=True,
            clusterwide=options.all_namespaces,
            namespaces=options.namespaces or (),
        ),
        name="kopf",
    )
    # kopf takes the signals over once it runs; this is for one that came just before. (Not kopf's own
    # stop_flag: its waiter would hold up every other end by 5 s.)
    halt = asyncio.create_task(stop.wait(), name="signal")
    try:
        await asyncio.wait({keep, operator, halt}, return_when=asyncio.FIRST_COMPLETED)
        if keep.done():
            # Not one more request: another may work from now on. Agents refuse its elder's lower term.
            _LOG.critical("lost the Lease; ends at once")
            os._exit(1)
        if operator.done():
            operator.result()
        return 0
    finally:
        halt.cancel()
        operator.cancel()
        await asyncio.wait({operator}, timeout=10)
        keep.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or until the Lease is lost; the exit status."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("kopf").setLevel(
        "WARNING" if options.log_level == "info" else options.log_level.upper()
    )
    logging.getLogger("aiohttp").setLevel("WARNING")
    return asyncio.run(_run(options))


if __name__ == "__main__":
    sys.exit(main())
