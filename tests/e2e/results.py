"""What the matrix showed: JSON for machines, Markdown for people.

With WEIGHTSYNC_RESUME set a session goes on where an earlier one was cut: its results are kept, and what passed is not
run again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from .matrix import Result, table

FILE = "fault-matrix"


def read(folder: Path) -> list[Result]:
    """What an earlier session left, if this one is to go on with it."""
    path = folder / f"{FILE}.json"
    if not os.environ.get("WEIGHTSYNC_RESUME") or not path.exists():
        return []
    return [Result(**{**entry, "faults": tuple(entry["faults"])}) for entry in json.loads(path.read_text())]


def passed(folder: Path) -> set[str]:
    """Runs to leave out."""
    return {r.run for r in read(folder) if r.passed}


class Results:
    """Written after every run, so that a session that is cut loses nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results = {r.run: r for r in read(folder)}

    def add(self, result: Result) -> None:
        self._results[result.run] = result
        self.write()

    def write(self) -> str:
        """The table, which is also written beside the JSON."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found = list(self._results.values())
        (self._folder / f"{FILE}.json").write_text(json.dumps([asdict(r) for r in found], indent=1))
        text = table(found)
        (self._folder / f"{FILE}.md").write_text(text)
        return text
