"""Answers as kubectl does, for one small fleet. `kubectl_stand_in.py SCRIPT ARGUMENT...`

SCRIPT is JSON: `hang` (commands that never end), `fail` (command -> stderr), `down` (no API server), `bare` (an
inference pod that lacks everything), `context` (that must be asked for).
"""

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

JWT = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln"


def pod(name, role, ip, container, **extra):
    ready = [{"type": t, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"} for t in ("Ready",)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "rl", "uid": f"uid-{name}", "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"weightsync.dev/sync": "policy", "weightsync.dev/role": role},
        },
        "spec": {"nodeName": "node-1", "containers": [container], **extra},
        "status": {
            "phase": "Running", "podIP": ip, "conditions": ready,
            "containerStatuses": [
                {
                    "name": container["name"], "ready": True, "restartCount": 0, "imageID": "x@sha256:" + "ab" * 32,
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "lastState": {},
                }
            ],
        },
    }  # fmt: skip


def pods(bare):
    env = [
        {"name": "VLLM_PLUGINS", "value": "weightsync"},
        {"name": "VLLM_API_KEY", "value": "hunter2"},
        {"name": "HF_TOKEN", "value": "hf_abcdefghijklmnop"},
        {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "k"}}},
    ]
    args = ["--model=/m", "--api-key", "s3cr3t-in-args", '--weight-transfer-config={"backend": "weightsync"}']
    probe = {"httpGet": {"path": "/readyz", "port": 8000}}
    vllm = {"name": "vllm", "image": "vllm:1", "args": args, "env": env, "readinessProbe": probe}
    gates = {"readinessGates": [{"conditionType": "weightsync.dev/in-sync"}]}
    if not bare:
        train = {
            "name": "train", "image": "train:1", "command": ["python", "train.py"],
            "ports": [{"name": "weightsync", "containerPort": 7077}],
        }  # fmt: skip
        return [
            pod("trainer-0", "trainer", "10.0.0.2", train),
            pod("vllm-0", "inference", "10.0.0.3", vllm, **gates),
        ]
    found = pod(
        "vllm-0", "inference", "10.0.0.3", {"name": "vllm", "image": "vllm:1", "args": ["--model=/m"]}
    )
    status = found["status"]["containerStatuses"][0]
    status["restartCount"] = 2
    ended = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}
    status["lastState"] = {"terminated": ended}
    return [found]


OBJECT = {
    "apiVersion": "weightsync.dev/v1alpha1",
    "kind": "WeightSync",
    "metadata": {"name": "policy", "namespace": "rl", "uid": "uid-policy", "generation": 1},
    "spec": {"trigger": {"type": "OnPublish"}},
    "status": {
        "term": 4,
        "epoch": {"number": 9, "members": []},
        "observedGeneration": 1,
        "version": "step-7",
        "trainers": "1/1",
        "inference": "1/1",
        "conditions": [
            {
                "type": t, "status": s, "reason": "InSync", "message": "all serve step-7", "observedGeneration": 1,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for t, s in (("Ready", "True"), ("InSync", "True"), ("Stalled", "False"))
        ],
        "members": [{"pod": "vllm-0", "role": "inference", "ranks": "2-2", "version": "step-7", "state": "InSync"}],
        "rounds": [{"number": 7, "version": "step-7", "outcome": "Committed", "finishedAt": "2026-01-01T00:00:00Z"}],
    },
}  # fmt: skip

EVENTS = [
    {
        "type": "Warning", "reason": "RoundFailed", "eventTime": "2026-01-01T00:00:01.000000Z",
        "series": {"count": 3, "lastObservedTime": "2026-01-01T00:00:03.000000Z"},
        "involvedObject": {"kind": "WeightSync", "name": "policy"},
        "message": "version step-6: pod vllm-0: rank 2 is gone",
    },
    {
        "type": "Warning", "reason": "Unhealthy", "lastTimestamp": "2026-01-01T00:00:00Z", "count": 2,
        "involvedObject": {"kind": "Pod", "name": "vllm-0"}, "message": "Readiness probe failed",
    },
    {
        "type": "Normal", "reason": "Pulled", "lastTimestamp": "2026-01-01T00:00:00Z", "count": 1,
        "involvedObject": {"kind": "Pod", "name": "another"}, "message": "not of this object",
    },
]  # fmt: skip


def answer(command, words, script):
    if command.startswith("version"):
        client = {"clientVersion": {"gitVersion": "v1.37.2", "platform": "linux/amd64"}}
        return client if script.get("down") else client | {"serverVersion": {"gitVersion": "v1.37.2"}}
    if command.startswith("get crd"):
        return {"spec": {"versions": [{"name": "v1alpha1", "served": True}]}}
    if command.startswith("get weightsyncs"):
        return OBJECT if "json" in words else "apiVersion: weightsync.dev/v1alpha1\nkind: WeightSync\n"
    if command.startswith("get pods -n rl"):
        return {"items": pods(script.get("bare"))}
    if command.startswith("get pods -n weightsync-system"):
        return {
            "items": [pod("weightsync-operator-0", "", "10.0.0.9", {"name": "operator", "image": "op:1"})]
        }
    if command.startswith("get events"):
        return {"items": EVENTS}
    if command.startswith("get lease"):
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"spec": {"holderIdentity": "operator-1", "leaseDurationSeconds": 15, "renewTime": now}}
    if command.startswith("get --raw"):
        return json.dumps({"ready": True})
    if command.startswith("logs weightsync-operator"):
        return f"INFO rl/policy: Committed: version step-7\nDEBUG Authorization: Bearer {JWT}\n"
    if command.startswith("logs"):
        if "--previous" in words:
            return "the last words\n"
        name = words[1]
        return f"[pod/{name}/{'vllm' if 'vllm' in name else 'train'}] agent listens, password=hunter2\n"
    if command.startswith("exec"):
        return "# inside\n\n## versions\ntorch 2.11.0\n"
    raise SystemExit(f"the stand-in knows no answer to {command}")


def main():
    script = json.loads(Path(sys.argv[1]).read_text())
    flags = [w for w in sys.argv[2:] if w.startswith(("--request-timeout=", "--context="))]
    words = [w for w in sys.argv[2:] if w not in flags]
    if f"--context={script.get('context')}" not in flags and script.get("context"):
        sys.exit(f"error: context {flags}")
    command = " ".join(words)
    if any(command.startswith(start) for start in script.get("hang", ())):
        time.sleep(60)
    for start, said in script.get("fail", {}).items():
        if command.startswith(start):
            sys.exit(f"Error from server: {said}")
    if script.get("down"):
        if command.startswith("version"):
            print(json.dumps(answer(command, words, script)))
        sys.exit("dial tcp 10.0.0.1:6443: connect: connection refused")
    found = answer(command, words, script)
    print(json.dumps(found) if isinstance(found, dict) else found, end="")


main()
