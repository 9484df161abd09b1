"""Streaming completions from vLLM servers, in a process of their own, so that nothing else is timed with them.

    python -m benchmarks.decoding OUT URL... --streams 8

Prints a line once every stream has tokens; ends with its stdin, and then writes to OUT when each token came (seconds
of `time.perf_counter`, which all processes of a host share) and what went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from tests.integration.vllm.serving import completion

PROMPT = list(range(100, 140))
TOKENS = 400


class _Stream:
    def __init__(self, url: str) -> None:
        self.url = url
        self.times: list[float] = []
        self.requests: list[int] = []
        """Index of the first token of each request."""
        self.error = ""

    async def run(self, client: httpx.AsyncClient) -> None:
        body = completion(PROMPT, TOKENS) | {"stream": True}
        try:
            while True:
                self.requests.append(len(self.times))
                async with client.stream("POST", self.url + "/v1/completions", json=body) as answer:
                    if answer.status_code != 200:
                        self.error = f"{answer.status_code} {(await answer.aread())!r}"
                        return
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            self.times.append(time.perf_counter())
        except httpx.HTTPError as e:
            self.error = f"{type(e).__name__}: {e}"


async def _main(options: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as client:
        streams = [_Stream(url) for url in options.urls for _ in range(options.streams)]
        tasks = [asyncio.create_task(s.run(client)) for s in streams]
        while not all(s.times or s.error for s in streams):  # noqa: ASYNC110 - no event for the last of many
            await asyncio.sleep(0.01)
        print("decoding", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    told = [{"url": s.url, "times": s.times, "requests": s.requests, "error": s.error} for s in streams]
    Path(options.out).write_text(json.dumps(told))  # noqa: ASYNC240 - nothing else runs any more


def gaps(streams: list[dict[str, Any]], start: float, end: float) -> dict[str, float]:
    """Of a span: the longest gap between two tokens of a stream, the usual one, and how much longer than usual a
    stream's gaps are in all (the mean over streams); milliseconds. A request's first token follows a prefill: left
    out."""
    longest, lost, every = 0.0, [], []
    for stream in streams:
        first = set(stream["requests"])
        pairs = [
            (b - a) * 1e3
            for i, (a, b) in enumerate(itertools.pairwise(stream["times"]), 1)
            if i not in first and b >= start and a <= end
        ]
        every += pairs
        longest = max([longest, *pairs])
        lost.append(pairs)
    if not every:
        return {}
    usual = statistics.median(every)
    return {
        "longest_gap": longest,
        "usual_gap": usual,
        "lost": statistics.mean(sum(max(g - usual, 0.0) for g in pairs) for pairs in lost),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--streams", type=int, default=8, help="by server")
    asyncio.run(_main(parser.parse_args()))
