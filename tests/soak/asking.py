"""Clients that ask every server without a pause, and the judge of what they hear.

An answer is right if its tokens are those of the version that its header names, or, where a flip fell into the
request, of that version up to some token and of the next version from there on; and if that version is not older
than the last one of which the client knew, when it asked, that its commit was finished.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx
from tests.integration.vllm import tiny
from tests.integration.vllm.serving import VllmProcess, completion
from tests.soak.world import CHECKPOINTS, SoakError

TOKENS = 6
PROMPTS = [tiny.PROMPT, [7, 21, 900, 4, 88], [500, 3, 3, 71, 640, 12]]
PAUSE_SECONDS = 0.15
LOADED = "loaded"


def number_of(version: str) -> int:
    """0 for the weights that vLLM loaded, 7 for `step-7`."""
    return 0 if version == LOADED else int(version.removeprefix("step-"))


def checkpoint_of(number: int) -> int:
    return number % CHECKPOINTS


class Book:
    """For each prompt, which tokens mean which weights: {tokens: {(checkpoint before, checkpoint after)}}."""

    def __init__(self, checkpoints: list[Path]) -> None:
        references = [tiny.Reference(folder) for folder in checkpoints]
        self._known: list[dict[tuple[int, ...], set[tuple[int, int]]]] = []
        for prompt in PROMPTS:
            known: dict[tuple[int, ...], set[tuple[int, int]]] = {}
            for before, old in enumerate(references):
                whole = old.greedy(prompt, TOKENS)
                known.setdefault(tuple(whole), set()).add((before, before))
                for after, new in enumerate(references):
                    if after == before:
                        continue
                    for at in range(TOKENS):
                        tokens = whole[:at] + new.greedy(prompt + whole[:at], TOKENS - at)
                        known.setdefault(tuple(tokens), set()).add((before, after))
            if len({t for t, pairs in known.items() if any(a == b for a, b in pairs)}) < len(references):
                raise SoakError(f"prompt {prompt} does not tell the checkpoints apart")
            self._known.append(known)

    def means(self, prompt: int, tokens: list[int]) -> set[tuple[int, int]]:
        return self._known[prompt].get(tuple(tokens), set())


class Asker(threading.Thread):
    """One client of one server."""

    def __init__(self, server: VllmProcess, name: str, book: Book, finished: list[int]) -> None:
        """`finished`: numbers of the versions whose commits are known to be finished, ascending; grows."""
        super().__init__(name=f"asks {name}", daemon=True)
        self.server, self.book, self.finished = server, book, finished
        self.answers = 0
        self.straddled = 0
        """Answers that a flip fell into."""
        self.refused = 0
        self.unreachable = 0
        self.last = 0
        self.wrong: list[str] = []
        self._stop_now = threading.Event()

    def stop(self) -> None:
        self._stop_now.set()
        self.join(60)

    def run(self) -> None:
        turn = 0
        with httpx.Client(timeout=60, trust_env=False) as http:
            while not self._stop_now.wait(PAUSE_SECONDS):
                turn += 1
                self._ask(http, turn % len(PROMPTS))

    def _ask(self, http: httpx.Client, prompt: int) -> None:
        floor = self.finished[-1] if self.finished else 0
        body = completion(PROMPTS[prompt], TOKENS)
        try:
            answer = http.post(self.server.url + "/v1/completions", json=body)
        except httpx.HTTPError:
            self.unreachable += 1  # it is being restarted; that it comes back is checked at the end
            return
        if answer.status_code == 503:
            self.refused += 1
            return
        if answer.status_code != 200:
            self.wrong.append(f"HTTP {answer.status_code}: {answer.text[:300]}")
            return
        version = answer.headers.get("x-weightsync-version", "")
        tokens = list(answer.json()["choices"][0]["token_ids"])
        self.answers += 1
        number = number_of(version)
        means = self.book.means(prompt, tokens)
        mine, following = checkpoint_of(number), checkpoint_of(number + 1)
        when = f"{self.name}, {time.strftime('%H:%M:%S')}, version {version}"
        if number < floor:
            self.wrong.append(f"{when}: stale, the commit of step-{floor} was finished before the question")
        if (mine, mine) in means:
            self.last = max(self.last, number)
        elif (mine, following) in means:
            self.straddled += 1
        else:
            self.wrong.append(f"{when}: tokens {tokens} are of {sorted(means) or 'no checkpoint'}")
