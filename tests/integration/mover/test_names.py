"""A rendezvous by addresses needs no DNS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.mover import names_main


def test_where_no_dns_server_answers_the_store_is_met_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("")
    (tmp_path / "resolv.conf").write_text(f"nameserver {names_main.SILENT}\n")
    mounts = "; ".join(f"mount --bind {tmp_path}/{name} /etc/{name}" for name in ("hosts", "resolv.conf"))
    namespaces = ["unshare", "-mn"] if os.geteuid() == 0 else ["unshare", "-rmn"]
    command = [*namespaces, "sh", "-ec", f'{mounts}; exec "$@"', "sh", sys.executable, names_main.__file__]
    environment = {k: v for k, v in os.environ.items() if k != "RES_OPTIONS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    took = json.loads(done.stdout)
    assert took["opened"] < 3.0 and took["connected"] < 3.0, took
