"""`python -m tests.cluster`: a test's cluster or API server by hand."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time

from tests.cluster import kind
from tests.cluster.apiserver import ApiServer
from tests.cluster.errors import ClusterError


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "up": "a cluster, the running one or a new one; prints what `env` prints",
        "down": "remove the cluster and all that it left but the cache",
        "env": 'print the cluster\'s environment for a shell: eval "$(python -m tests.cluster env)"',
        "logs": "collect the cluster's logs and print the folder",
        "apiserver": "etcd and kube-apiserver in the foreground; prints the kubeconfig path; Ctrl-C ends it",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text)
        if name != "apiserver":
            command.add_argument("--name", default=kind.DEFAULT_NAME, help="the cluster's name")
        if name == "down":
            command.add_argument("--all", action="store_true", help="every cluster of this cache")
        if name == "up":
            command.add_argument("--workers", type=int, default=1, help="nodes besides the control plane")
            command.add_argument(
                "--mount", action="append", default=[], help="a folder for the nodes, read-only"
            )
    args = parser.parse_args(argv)
    # SIGTERM leaves as Ctrl-C does, by every `finally` on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        match args.command:
            case "up":
                _print_env(kind.obtain(args.name, args.workers, args.mount))
            case "down":
                for name in kind.names() if args.all else [args.name]:
                    kind.delete(name)
            case "env":
                cluster = kind.find(args.name)
                if cluster is None:
                    raise ClusterError(
                        f"no cluster {args.name}: python -m tests.cluster up --name {args.name}"
                    )
                _print_env(cluster)
            case "logs":
                print(kind.export_logs(args.name))
            case "apiserver":
                _apiserver()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print_env(cluster: kind.Cluster) -> None:
    for name, value in cluster.env().items():
        print(f"export {name}={shlex.quote(value)}")


def _apiserver() -> None:
    with ApiServer() as server:
        print(server.kubeconfig, flush=True)
        print(f"{server.url} is up; Ctrl-C ends it", file=sys.stderr)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main())
