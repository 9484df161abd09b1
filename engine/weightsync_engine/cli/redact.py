"""What must not leave a machine, taken out of text that is to be pasted somewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

REMOVED = "<removed>"
_SECRET_WORDS = (
    r"(?:api[-_]?key|key|token|secret|passw(?:or)?d|passphrase|credentials?|auth|bearer|cookie|dsn)"
)
_SECRET_NAME = re.compile(rf"(?:^|[-_.]){_SECRET_WORDS}s?(?:$|[-_.])", re.IGNORECASE)
_PLAIN = re.compile(r"(?i)none|null|true|false|on|off|yes|no|[0-9.]{1,12}|<removed>")
"""Such a value is no secret where its name speaks of numbers of tokens, or only mentions one."""


def _hidden(found: re.Match[str]) -> str:
    """Keeps `max_num_batched_tokens=8192`, hides `api_token=...`."""
    before, secret = found.group(1), found.group(2)
    word = secret.strip("\"'")
    if _PLAIN.fullmatch(word) and not re.search(r"(?i)passw|secret|api[-_]?key", before):
        return found.group(0)
    return before + REMOVED


_Replacement = str | Callable[[re.Match[str]], str]
_PATTERNS: tuple[tuple[re.Pattern[str], _Replacement], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL), REMOVED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"), REMOVED),
    (re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{8,}"), rf"\1\2{REMOVED}"),
    (re.compile(r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abp]-|wandb_)[A-Za-z0-9_-]{8,}"), REMOVED),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), REMOVED),
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/@]{0,200}:[^\s/@]{1,200}@"), rf"\1{REMOVED}@"),
    # An image's digest is public and says a lot; keys of epochs are as long and are not.
    (re.compile(r"(?<!sha256:)(?<![0-9a-fA-F])[0-9a-fA-F]{40,}(?![0-9a-fA-F])"), REMOVED),
    (
        re.compile(
            rf"""(?ix)
            ( {_SECRET_WORDS} s? (?:[-_.][\w.-]{{1,80}})? ["']? [ \t]*[:=][ \t]* )
            ( "[^"\n]*" | '[^'\n]*' | [^\s,;}}\])"']+ )
            """
        ),
        _hidden,
    ),
    (re.compile(rf"(?i)(?<![\w-])(--[\w-]{{0,80}}{_SECRET_WORDS}s?[\w-]{{0,80}}[ \t]+)(?!-)(\S+)"), _hidden),
)


def redact(text: str) -> str:
    """`text` without tokens, keys, passwords and what looks like one. Rather too much than too little."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def value(name: str, text: str) -> str:
    """The value of a setting, as far as it may be shown."""
    return REMOVED if text and _is_secret(name, text) else redact(text)


def _is_secret(name: str, text: str) -> bool:
    return _SECRET_NAME.search(name) is not None and not (
        _PLAIN.fullmatch(text) and not re.search(r"(?i)passw|secret|api[-_]?key", name)
    )


def arguments(words: Sequence[str]) -> list[str]:
    """A command line, without the values of flags that are secret."""
    shown: list[str] = []
    flag = ""
    for word in words:
        name, equals, text = word.partition("=")
        if flag and not word.startswith("-"):
            shown.append(value(flag, word))
        elif equals and name.startswith("-"):
            shown.append(f"{name}={value(name, text)}")
        else:
            shown.append(redact(word))
        flag = word if word.startswith("-") and not equals else ""
    return shown
