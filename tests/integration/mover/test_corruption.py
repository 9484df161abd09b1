"""Real movers that damage what they move: no round with damaged bytes is ever verified, and the parameter is named."""

import pytest
import pytest_asyncio
from tests.integration.mover.damage import Damage, cause, damaging
from tests.integration.mover.fleet import TRAINERS, Fleet

from weightsync_engine.protocol.messages import RoundPhase

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def orders(tmp_path_factory):
    return tmp_path_factory.mktemp("orders")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory, orders):
    folder = tmp_path_factory.mktemp("corruption") / "run"
    fleet = await Fleet.start(folder, 2, supervisor=damaging(orders))
    await fleet.join()
    fleet.publish("start")  # so that there is something old for a half to be left of
    fleet.transfer("start")
    await fleet.transferred()
    yield fleet
    await fleet.close()


BIT, SWAP, HALF = (
    Damage("bit", "1.o"),
    Damage("experts", "1.experts"),
    Damage("half", "0.qkv"),
)


@pytest.mark.parametrize(
    ("rank", "damage", "parameters", "culprits"),
    [
        (4, BIT, {"1.o"}, {4}),
        (3, SWAP, {"1.expert.0", "1.expert.1"}, {2}),
        (5, HALF, {"0.q"}, {4}),
        (0, Damage("bit", "0.o"), {"0.o"}, {2}),
        (1, Damage("experts", "1.expert.0", "1.expert.1"), {"1.expert.0", "1.expert.1"}, {2}),
        (1, Damage("half", "0.v"), {"0.v"}, {2}),
    ],
    ids=[
        f"{what} in {where}"
        for where in ("a shadow", "what is sent")
        for what in ("a bit", "experts swapped", "half old")
    ],
)
async def test_damage_is_found_before_anything_can_go_live(fleet, orders, rank, damage, parameters, culprits):
    version = f"{damage.kind}-{rank}"
    fleet.publish(version)
    order = cause(orders, rank, damage)
    fleet.transfer(version)
    states = await fleet.transferred(want=RoundPhase.FAILED)
    (problem,) = {s.round.problem.model_dump_json(): s.round.problem for s in states}.values()
    assert problem.reason == "DigestMismatch"
    # A server's ranks are summed: its first one stands for it.
    assert problem.rank in culprits
    assert problem.message.split("'")[1] in parameters
    # A shadow without a stamp is never made live.
    assert all(m.slab.read_stamp() is None for m in fleet.members[TRAINERS:])
    # The communicator is as good as before: the same version goes through once the cause is gone.
    order.unlink()
    fleet.transfer(version)
    await fleet.transferred()
    fleet.check_bits()
    assert {m.slab.read_stamp().version for m in fleet.members[TRAINERS:]} == {version}
