"""The trainer pod's agent as a server."""

import socket

from weightsync_engine.agent.process import listen


def test_no_part_of_an_answer_waits_for_the_acknowledgement_of_the_one_before():
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
