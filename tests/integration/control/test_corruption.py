"""Damaged bytes as the object tells of them: a real operator, real trainer ranks, agents and movers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.agent.test_rounds import FakeServer
from tests.integration.control.conftest import Operator, World
from tests.integration.mover.damage import Damage, cause
from tests.integration.trainer.ranks import Ranks


@pytest.mark.timeout(300)
def test_a_flipped_bit_never_goes_live_and_the_object_names_parameter_and_pod(
    world: World, operator: Operator, tmp_path: Path
) -> None:
    jwks = tmp_path / "jwks.json"
    jwks.write_text(json.dumps(world.api.http.get("/openid/v1/jwks").json()))
    orders = tmp_path / "orders"
    orders.mkdir()
    env = {
        "WEIGHTSYNC_JWKS": str(jwks), "WEIGHTSYNC_NAMESPACE": world.namespace, "WEIGHTSYNC_NAME": "w",
        "WEIGHTSYNC_POD_IP": "127.0.0.1", "WEIGHTSYNC_PORT": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    servers: list[FakeServer] = []
    with Ranks(2, tmp_path, env | {"WEIGHTSYNC_POD_NAME": "trainer-0"}) as ranks:
        try:
            up = ranks.run("serve")
            shapes = tmp_path / "shapes.json"
            shapes.write_text(json.dumps(up[0]["shapes"]))
            servers += [FakeServer(i, 1, shapes, tmp_path, env, orders if i else None) for i in range(2)]
            world.pod("trainer-0", None, "trainer", port=up[0]["port"])
            for number, server in enumerate(servers):
                world.pod(f"vllm-{number}", None, "inference", port=server.read()["port"])
            world.object()

            def publish(version: str) -> dict[str, str]:
                ranks.say(f"publish {version}")
                return dict(ranks.read()[0])

            bits = publish("step-1")
            world.wait_version("step-1", within=90)
            assert [s.look()["bits"] == bits for s in servers] == [True, True]

            order = cause(orders, 0, Damage("bit", "model.norm.weight"))
            fresh = publish("step-2")
            condition = world.wait_condition("Stalled", "True", "DigestMismatch", within=60)
            for words in ("vllm-1", "'model.norm.weight' did not arrive bit for bit"):
                assert words in condition["message"]
            assert "vllm-1" in world.condition("Ready")["message"]
            newest = world.status()["rounds"][0]
            assert (newest["version"], newest["outcome"], newest["culprit"]) == (
                "step-2",
                "Aborted",
                "vllm-1",
            )
            assert "'model.norm.weight'" in newest["message"]
            text = world.api.kubectl("describe", "wsync", "w", "-n", world.namespace)
            assert "model.norm.weight" in text
            # Nothing is live of it anywhere, and both serve on.
            assert [s.look()["bits"] == bits for s in servers] == [True, True]
            assert world.status()["version"] == "step-1"

            order.unlink()
            world.wait_version("step-2", within=60)
            assert [s.look()["bits"] == fresh for s in servers] == [True, True]
        finally:
            for server in servers:
                server.kill()
