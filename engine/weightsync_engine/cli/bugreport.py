"""A bug report in the making: sections of text, and what was found to be wrong or could not be had."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from .redact import redact


@dataclass
class Section:
    """One part of the report. `findings`: what a person should look at first; also what could not be collected."""

    title: str
    lines: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> None:
        for line in lines:
            self.lines += line.rstrip().splitlines() or [""]

    def find(self, finding: str) -> None:
        self.findings.append(finding)


@dataclass(frozen=True)
class Ran:
    """What a command said."""

    text: str
    problem: str = ""
    """Why it did not do what it should; empty: it did."""


def run(argv: Sequence[str], seconds: float) -> Ran:
    """Run a command to its end, no longer than `seconds`. Never raises."""
    words = " ".join(argv)
    words = words if len(words) < 160 else words[:157] + "..."
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return Ran("", f"`{words}` gave no answer within {seconds:g} s")
    except OSError as e:
        return Ran("", f"`{words}` cannot be run: {e.strerror or e}")
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return Ran(
            done.stdout, f"`{words}` failed ({done.returncode}): {said[-1][:300] if said else 'no words'}"
        )
    return Ran(done.stdout)


def render(title: str, sections: Sequence[Section]) -> str:
    """The whole report, findings first, without secrets."""
    out = [f"# {title}", ""]
    findings = [f"{section.title}: {finding}" for section in sections for finding in section.findings]
    out += [f"## findings ({len(findings)})", *(f"- {finding}" for finding in findings or ["none"]), ""]
    for section in sections:
        out += [f"## {section.title}", *section.lines, *(f"! {finding}" for finding in section.findings), ""]
    return redact("\n".join(out))
