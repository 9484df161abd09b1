"""portforward.py PID PORT...: these ports of 127.0.0.1 lead to the same ports in the network of process PID.

Ends when PID ends. A socket stays in the network namespace that it was made in: one thread serves both sides.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import socket
import sys

CLONE_NEWNET = 0x40000000
CONNECT_DEADLINE_S = 5
HERE = os.open("/proc/self/ns/net", os.O_RDONLY)


def socket_in(namespace: int) -> socket.socket:
    """A TCP socket of another network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    try:
        made = socket.socket()
        made.setblocking(False)
        return made
    finally:
        if libc.setns(HERE, CLONE_NEWNET):
            os._exit(1)  # in the wrong network nothing here may go on


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy one direction until it ends, and end the other side's direction with it."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def session(
    near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter, namespace: int, port: int
) -> None:
    """One connection."""
    writers = [near_writer]
    try:
        far = socket_in(namespace)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", port))
            far_reader, far_writer = await asyncio.open_connection(sock=far)
        except BaseException:
            far.close()
            raise
        writers.append(far_writer)
        await asyncio.gather(pump(near_reader, far_writer), pump(far_reader, near_writer))
    except (OSError, TimeoutError):
        pass  # either side went away: the other is closed below
    finally:
        for writer in writers:
            with contextlib.suppress(OSError):
                writer.close()


async def main() -> None:
    """Serve until the process is gone."""
    process, ports = int(sys.argv[1]), [int(port) for port in sys.argv[2:]]
    pidfd = os.pidfd_open(process)
    namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, gone.set)
    for port in ports:
        serve = functools.partial(session, namespace=namespace, port=port)
        await asyncio.start_server(serve, "127.0.0.1", port)
    await gone.wait()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
