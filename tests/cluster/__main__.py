"""`python -m tests.cluster apiserver`: run a test's API server by hand."""

from __future__ import annotations

import argparse
import signal
import sys
import time

from tests.cluster.apiserver import ApiServer
from tests.cluster.errors import ClusterError


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("apiserver", help="run etcd and kube-apiserver in the foreground; Ctrl-C ends them")
    args = parser.parse_args(argv)
    try:
        if args.command == "apiserver":
            return _apiserver()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 2


def _apiserver() -> int:
    # SIGTERM ends it as Ctrl-C does, by the way out of the `with`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ApiServer() as server:
            print(server.kubeconfig, flush=True)
            print(f"{server.url} is up; Ctrl-C ends it", file=sys.stderr)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
