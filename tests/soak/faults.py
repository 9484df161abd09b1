"""What goes wrong, when and where: all drawn from the seed before the round begins."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.soak.world import World, send

Undo = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    kind: str
    delay: float
    """Seconds after the publish began."""
    lasts: float
    """Seconds until it is undone, for what can be undone."""
    draw: float
    """Which of several targets: in [0, 1)."""


WEIGHTS = {
    "kill a server's mover": 4.0,
    "kill a trainer's mover": 4.0,
    "kill a spare mover": 1.0,
    "freeze a server's mover, thaw it": 3.0,
    "freeze a trainer's mover, thaw it": 3.0,
    "freeze a mover for good": 1.5,
    "kill the operator": 3.0,
    "freeze the operator": 2.0,
    "kill the trainer's agent": 2.0,
    "freeze the trainer's agent": 2.0,
    "lose the API server": 1.5,
    "restart a vLLM server": 0.5,
}


def draw(seeded: random.Random) -> list[Fault]:
    """The faults of one round: none in most, two at once in some."""
    count = seeded.choices((0, 1, 2), (0.6, 0.33, 0.07))[0]
    kinds = seeded.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    return [
        Fault(kind, seeded.uniform(0.0, 0.8), seeded.uniform(0.3, 6.0), seeded.random()) for kind in kinds
    ]


class Injector:
    """Carries faults out in threads of their own; `join` waits for all of them and undoes what is left."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.happened: dict[str, int] = {}
        self.missed = 0
        self.restarts = 0
        self._threads: list[threading.Thread] = []
        self._restarting: threading.Thread | None = None
        self._frozen: list[int] = []
        self.errors: list[BaseException] = []

    def start(self, faults: list[Fault]) -> None:
        for fault in faults:
            thread = threading.Thread(target=self._run, args=(fault,), name=fault.kind, daemon=True)
            thread.start()
            self._threads.append(thread)

    def join(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
            if thread.is_alive():
                raise AssertionError(f"the fault {thread.name!r} was not over after {seconds:g} s")
        self._threads.clear()
        for pid in self._frozen:
            send(pid, signal.SIGCONT)
        self._frozen.clear()
        if self.errors:
            raise self.errors[0]

    def settle(self, seconds: float) -> None:
        """Wait until a server that restarts is up again."""
        self.join()
        if self._restarting is not None:
            self._restarting.join(seconds)
            assert not self._restarting.is_alive(), f"a restarted server was not up after {seconds:g} s"
        if self.errors:
            raise self.errors[0]

    @property
    def restarting(self) -> bool:
        return self._restarting is not None and self._restarting.is_alive()

    def _run(self, fault: Fault) -> None:
        time.sleep(fault.delay)
        try:
            if self._do(fault):
                self.happened[fault.kind] = self.happened.get(fault.kind, 0) + 1
            else:
                self.missed += 1
        except BaseException as e:
            self.errors.append(e)

    def _do(self, fault: Fault) -> bool:
        world = self.world
        match fault.kind:
            case "kill a server's mover":
                return send(self._mover("vllm", fault), signal.SIGKILL)
            case "kill a trainer's mover":
                return send(self._mover("trainer", fault), signal.SIGKILL)
            case "kill a spare mover":
                return send(_pick(world.trainer.below(b"ws-spare"), fault), signal.SIGKILL)
            case "freeze a server's mover, thaw it":
                return self._freeze(self._mover("vllm", fault), fault.lasts)
            case "freeze a trainer's mover, thaw it":
                return self._freeze(self._mover("trainer", fault), fault.lasts)
            case "freeze a mover for good":
                return self._freeze(self._mover("", fault), None)
            case "kill the operator":
                with world.operator_lock:
                    world.operator.kill()
                    time.sleep(fault.lasts / 2)
                    world.operator.start()
                return True
            case "freeze the operator":
                with world.operator_lock:
                    return self._freeze(world.operator_pid(), fault.lasts)
            case "kill the trainer's agent":
                return send(world.trainer.agent(), signal.SIGKILL)
            case "freeze the trainer's agent":
                return self._freeze(world.trainer.agent(), fault.lasts)
            case "lose the API server":
                with world.api_lock:
                    world.api.stop_server()
                    time.sleep(fault.lasts / 2)
                    world.api.start_server()
                return True
            case "restart a vLLM server":
                return self._restart(fault)
        raise AssertionError(fault.kind)

    def _mover(self, where: str, fault: Fault) -> int | None:
        found = [p for place, pids in self.world.movers().items() if place.startswith(where) for p in pids]
        return _pick(found, fault)

    def _freeze(self, pid: int | None, seconds: float | None) -> bool:
        if not send(pid, signal.SIGSTOP):
            return False
        assert pid is not None
        if seconds is None:
            self._frozen.append(pid)  # thawed when the round is over, if nobody has killed it by then
        else:
            time.sleep(seconds)
            send(pid, signal.SIGCONT)
        return True

    def _restart(self, fault: Fault) -> bool:
        """SIGKILL of the whole container, and its start, in place; the rounds go on without it."""
        if self.restarting:
            return False
        server = self.world.servers[int(fault.draw * len(self.world.servers))]

        def again() -> None:
            try:
                server.start().wait_up()
            except BaseException as e:
                self.errors.append(e)

        server.kill()
        self.restarts += 1
        self._restarting = threading.Thread(target=again, name="vLLM server comes up", daemon=True)
        self._restarting.start()
        return True


def _pick(pids: list[int], fault: Fault) -> int | None:
    with contextlib.suppress(IndexError):
        return sorted(pids)[int(fault.draw * len(pids))]
    return None
