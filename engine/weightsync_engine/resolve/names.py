"""Pure: from vLLM's names of its live tensors to the checkpoint's names of the parameters in them.

Names are compared by whole dotted components, never by substring, and every name is rewritten at most once.
Where the names of the checkpoint are known, a name counts only if it is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product


def _identity(name: str) -> str | None:
    return name


@dataclass(frozen=True)
class NameRules:
    """What a vLLM model declares about its names."""

    packed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Live module (its last components) -> the checkpoint's modules in it, in order:
    `packed_modules_mapping`."""
    forward: Callable[[str], str | None] = _identity
    """Checkpoint name -> vLLM's name, without any fusing; None: the parameter is not used
    (`hf_to_vllm_mapper`)."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    infixes: Mapping[str, str] = field(default_factory=dict)
    suffixes: Mapping[str, str] = field(default_factory=dict)
    """How `forward` rewrites, old -> new: only to guess names where there is no checkpoint to ask."""

    def components(self, module: str) -> tuple[str, Sequence[str]] | None:
        """For a live module's path: what it stands on, and the last components of the modules packed into it.

        The longest key wins, and it must match whole components: `gate_up_proj` is no `up_proj`.
        """
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            key = ".".join(parts[-length:])
            if key in self.packed:
                return ".".join(parts[:-length]), self.packed[key]
        return None


class CheckpointNames:
    """Finds checkpoint names by vLLM's unfused names.

    Args:
        rules: the model's rules.
        known: all names in the checkpoint, or None where there is none (dummy weights, a remote loader).
    """

    def __init__(self, rules: NameRules, known: Iterable[str] | None) -> None:
        self.rules = rules
        self._by_live: dict[str, list[str]] | None = None
        self._by_path: dict[str, list[str]] | None = None
        if known is not None:
            self._by_live = {}
            for name in known:
                live = rules.forward(name)
                if live is not None:
                    self._by_live.setdefault(live, []).append(name)

    @property
    def known(self) -> bool:
        return self._by_live is not None

    def find(self, live: str, ending: str = "") -> list[str]:
        """All checkpoint names that vLLM would load as `live`; none, or more than one, is for the caller to
        judge.

        Args:
            live: vLLM's name, unfused.
            ending: its last components, where these are known to be the checkpoint's own: decides between
                guesses.
        """
        if self._by_live is not None:
            return list(self._by_live.get(live, ()))
        guesses = sorted(name for name in self._guesses(live) if self.rules.forward(name) == live)
        # A model declares a rewriting because its checkpoints need it, though vLLM's own name passes as well.
        other = [name for name in guesses if name != live and name.endswith(ending)]
        return other or [name for name in guesses if name.endswith(ending)]

    def live(self, name: str) -> str | None:
        """vLLM's name, unfused, of what a checkpoint holds as `name`; None: vLLM has none."""
        return self.rules.forward(name)

    def under(self, path: str) -> list[str]:
        """All checkpoint names that vLLM would load somewhere below the module `path`, sorted. Only where names
        are known."""
        if self._by_path is None:
            self._by_path = {}
            for live, names in sorted((self._by_live or {}).items()):
                at = live.rfind(".")
                while at > 0:
                    self._by_path.setdefault(live[:at], []).extend(names)
                    at = live.rfind(".", 0, at)
        return sorted(self._by_path.get(path, ()))

    def _guesses(self, live: str) -> Collection[str]:
        def undo(
            names: set[str], options: Iterable[tuple[str, str]], swap: Callable[[str, str, str], str]
        ) -> set[str]:
            return names | {swap(name, old, new) for name, (old, new) in product(names, options) if new}

        def from_start(name: str, old: str, new: str) -> str:
            return old + name[len(new) :] if name.startswith(new) else name

        def from_end(name: str, old: str, new: str) -> str:
            return name[: -len(new)] + old if name.endswith(new) else name

        names = undo({live}, self.rules.suffixes.items(), from_end)
        names = undo(names, self.rules.prefixes.items(), from_start)
        return undo(names, self.rules.infixes.items(), lambda name, old, new: name.replace(new, old, 1))
