"""A trainer's pod in a process of its own, which a test can kill: `python -m tests.gpu.trainer_main FOLDER CHECKPOINT
JWKS [DRAFT]`. Prints its agent's port; publishes what each line of stdin names (JSON: checkpoint, version, draft)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.integration.vllm.fleet import Trainer


def main() -> None:
    folder, checkpoint, jwks, *draft = (Path(argument) for argument in sys.argv[1:])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    operator = SimpleNamespace(jwks=jwks)
    trainer = Trainer(folder, operator, checkpoint, device="cuda:0", draft=draft[0] if draft else None)  # type: ignore[arg-type]
    print(trainer.port, file=out, flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        trainer.publish(Path(given["checkpoint"]), given["version"], Path(given["draft"]))
        print("published", file=out, flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
