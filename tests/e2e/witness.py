"""Asks servers without a pause, through the Service and each pod directly, and prints what it heard as JSON lines.

`python witness.py URL PROMPT TOKENS`, PROMPT as token ids joined by commas. The pods' addresses are read
from the file `TARGETS`, again and again. Runs inside the cluster, with
`examples/demo` on the path.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.client import HTTPException
from pathlib import Path

from ask import ask

TARGETS = Path("/tmp/targets")
PAUSE_SECONDS = 0.3
ANSWER_SECONDS = 4.0
_SAYING = threading.Lock()


def listen(url: str, prompt: list[int], tokens: int, service: bool, wanted: threading.Event) -> None:
    while wanted.is_set():
        asked = time.time()
        try:
            pod, version, said = ask(url, prompt, tokens, ANSWER_SECONDS)
        except (OSError, ValueError, KeyError, HTTPException) as error:
            told = {"asked": asked, "service": service, "url": url, "error": str(error)[:100]}
        else:
            told = {
                "asked": asked, "answered": time.time(), "service": service, "pod": pod, "version": version,
                "tokens": said,
            }  # fmt: skip
        with _SAYING:
            print(json.dumps(told), flush=True)
        time.sleep(PAUSE_SECONDS)


def main(service: str, prompt: list[int], tokens: int) -> None:
    asking: dict[str, threading.Event] = {}

    def begin(url: str, through_service: bool) -> None:
        asking[url] = threading.Event()
        asking[url].set()
        arguments = (url, prompt, tokens, through_service, asking[url])
        threading.Thread(target=listen, args=arguments, daemon=True).start()

    begin(service, True)
    while True:
        pods = TARGETS.read_text().split() if TARGETS.exists() else []
        urls = {f"http://{ip}:8000" for ip in pods}
        for url in urls - asking.keys():
            begin(url, False)
        for url in asking.keys() - urls - {service}:
            asking.pop(url).clear()
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], [int(t) for t in sys.argv[2].split(",")], int(sys.argv[3]))
