"""Runs the demo: `python -m examples.demo up | down`. The cluster stays up, so that you can look around."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster import Cluster, ClusterError, obtain
from tests.cluster.kind import delete

from .fleet import OPERATOR_NAMESPACE, ROOT, Fleet, FleetError, install_operator

CLUSTER_NAME = "weightsync-demo"
VERSIONS = ("step-1", "step-2", "step-3")
LOGS = ROOT / "build" / "demo"


class Clock:
    """Prints what is going on, and in the end what took how long."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []
        self.started = time.monotonic()
        self.current = ""

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        self.current = what
        print(f"\n▸ {what}", flush=True)
        started = time.monotonic()
        yield
        self.phases.append((what, time.monotonic() - started))
        say(f"done in {self.phases[-1][1]:.1f} s")

    def table(self) -> str:
        rows = [*self.phases, ("all", time.monotonic() - self.started)]
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"  {what:<{width}}  {seconds:7.1f} s" for what, seconds in rows)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def show_round(fleet: Fleet, version: str) -> None:
    fleet.say_go(version)
    publication, answers = fleet.compare(version, tell=say)
    say(
        f"publish returned after {publication.publish_ms} ms; committed {publication.seconds} s after the call"
    )
    say(f"{'transformers':<24} {version:<8} {publication.tokens}")
    for pod, answer in sorted(answers.items()):
        say(f"{pod:<24} {answer.version:<8} {answer.tokens}")
    say("equal")
    print(fleet.kubectl("get", "wsync"), end="")


def up() -> int:
    clock = Clock()
    fleet: Fleet | None = None
    try:
        with clock.phase("cluster"):
            cluster: Cluster = obtain(name=CLUSTER_NAME, workers=1)
            fleet = Fleet(cluster)
            say(f"context {cluster.context} ({cluster.kind_of})")
        with clock.phase("operator: image and helm install"):
            install_operator(cluster)
        with clock.phase("trainer (2 ranks, FSDP2) and vLLM (2 pods): start"):
            fleet.start()
            fleet.wait_servers_ready(tell=say)
        for version in VERSIONS:
            with clock.phase(f"round {version}"):
                show_round(fleet, version)
    except (FleetError, ClusterError) as error:
        print(f"\n✗ failed: {clock.current}\n  {error}", file=sys.stderr)
        if fleet is not None:
            fleet.keep_logs(LOGS)
            print(f"  logs of all parts: {LOGS}", file=sys.stderr)
            print("  the cluster is still there to look at; `make demo-down` removes it", file=sys.stderr)
        return 1
    description = fleet.kubectl("describe", "wsync", "demo")
    print("\n$ kubectl describe wsync demo\n" + description[description.find("Status:") :])
    print("time of every phase:\n" + clock.table())
    exports = " ".join(f"{k}={v}" for k, v in sorted(cluster.env().items()))
    print(f"""
look around:
  export {exports}
  kubectl -n {fleet.namespace} get wsync,pods
  kubectl -n {fleet.namespace} describe wsync demo
  kubectl -n {fleet.namespace} logs trainer-0
  kubectl -n {OPERATOR_NAMESPACE} logs deploy/weightsync-operator
remove everything: make demo-down""")
    return 0


def down() -> int:
    delete(CLUSTER_NAME)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    sys.exit({"up": up, "down": down}[parser.parse_args().command]())
