"""Run one command that must not outlive another process: `tether.py PID REMOVE COMMAND...`.

The command is killed when process PID ends, however that ends (SIGKILL included), or when this process
ends. When PID went first, the folder REMOVE (if not empty) is removed too. SIGTERM kills the command, and
this process ends after it, so that its ports are free when this one has been waited for. A parent-death
signal alone would not do: it follows the *thread* that started the child, and tests use many threads.
Only the standard library, so that it starts in 20 ms with `python -I -S`.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the command, and return its exit status as a shell would."""
    owner, remove, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    libc = ctypes.CDLL(None)
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        return 1
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    signal.signal(signal.SIGTERM, lambda *_: child.kill())
    poller = select.poll()
    poller.register(owner_fd, select.POLLIN)
    child_fd = os.pidfd_open(child.pid)
    poller.register(child_fd, select.POLLIN)
    ready = {fd for fd, _ in poller.poll()}
    if child_fd not in ready:
        child.kill()
        child.wait()
        if remove:
            shutil.rmtree(remove, ignore_errors=True)
        return 1
    status = child.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
