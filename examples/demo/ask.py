"""Asks the vLLM Service for greedy tokens until every server behind it has answered; prints one JSON line.

`python ask.py URL SERVERS PROMPT NEW_TOKENS [SECONDS]`, PROMPT as token ids joined by commas. Runs inside the
cluster. Each request is a connection of its own, so that the Service may choose any server; the servers name
themselves and the version they serve in response headers.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request


def ask(url: str, prompt: list[int], new_tokens: int, timeout: float) -> tuple[str, str, list[int]]:
    body = {
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        choice = json.load(answer)["choices"][0]
        headers = answer.headers
    return headers["x-weightsync-pod"], headers["x-weightsync-version"], choice["token_ids"]


def main(url: str, servers: int, prompt: list[int], new_tokens: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    seen: dict[str, dict[str, object]] = {}
    trouble = ""
    while len(seen) < servers and time.monotonic() < deadline:
        try:
            pod, version, tokens = ask(url, prompt, new_tokens, timeout=10)
            seen[pod] = {"version": version, "tokens": tokens}
        except (OSError, urllib.error.URLError) as error:
            trouble = str(error)
            time.sleep(0.2)
    print(json.dumps(seen))
    if len(seen) < servers:
        print(
            f"{len(seen)} of {servers} servers answered within {seconds:.0f} s; last error: {trouble}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(
        main(
            arguments[0],
            int(arguments[1]),
            [int(t) for t in arguments[2].split(",")],
            int(arguments[3]),
            float(arguments[4]) if len(arguments) > 4 else 60,
        )
    )
