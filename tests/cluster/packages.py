"""The Debian packages that a cluster without a Docker engine is built with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.cluster import cache
from tests.cluster.errors import ClusterError

INSTALL_DEADLINE_S = 600.0
_FOUND_BY: dict[str, tuple[str, ...]] = {
    "docker.io": ("dockerd", "docker", "runc"),
    "debootstrap": ("debootstrap",),
    "iptables": ("iptables",),
    "iproute2": ("ip",),
    "gcc": ("gcc",),
    "libc-bin": ("ldd",),
    "util-linux": ("unshare", "nsenter"),
    "libc6-dev": ("/usr/include/stdlib.h",),
    "libseccomp-dev": ("/usr/include/seccomp.h",),
}
"""Package -> the programs (or, with a slash, files) whose absence means that it is missing."""


def missing() -> list[str]:
    """The packages that this machine lacks."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

    def there(thing: str) -> bool:
        return Path(thing).exists() if thing.startswith("/") else shutil.which(thing, path=path) is not None

    return [package for package, things in _FOUND_BY.items() if not all(map(there, things))]


def need(say: Callable[[str], None]) -> None:
    """Install what is missing, where that can be done; else raise ClusterError with the command that would."""
    wanted = missing()
    if not wanted:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *wanted]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(
            f"a cluster without a Docker engine is built with Debian packages that are missing here: "
            f"{' '.join(wanted)}; install them (`{' '.join(command)}` as root on Debian), or start a Docker engine"
        )
    say(f"installing Debian packages: {' '.join(wanted)}")
    log = cache.log_path("packages")
    log.write_text("")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update"], command):
        cache.run(step, what=" ".join(step), log=log, timeout=INSTALL_DEADLINE_S, env=environment)
    if left := missing():
        raise ClusterError(f"still missing after their installation: {' '.join(left)}; see {log}")
