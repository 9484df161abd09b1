"""A store and a client where no DNS server answers, in namespaces of their own: prints the seconds that each took.

Run as root of its network and mount namespace (`unshare -mn`): `/etc/hosts` is empty, `/etc/resolv.conf` names SILENT.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys

from weightsync_engine.mover.supervisor import mover_environment

SILENT = "127.0.0.53"
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

WORK = """
import json, time
from weightsync_engine.transport.store import connect_store, open_store

began = time.monotonic()
store, where = open_store("127.0.0.1")
opened = time.monotonic()
client = connect_store(where, time.monotonic() + 60, lambda: False)
client.set("key", "value")
print(json.dumps({"opened": opened - began, "connected": time.monotonic() - opened}))
"""


def main() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP, b""))
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind((SILENT, 53))
    environment = mover_environment(os.environ)
    out = subprocess.run([sys.executable, "-c", WORK], env=environment, stdout=subprocess.PIPE, check=True)
    silent.settimeout(0.1)
    silent.recv(512)  # it was asked
    print(json.dumps(json.loads(out.stdout)))


if __name__ == "__main__":
    main()
