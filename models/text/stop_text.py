from __future__ import annotations

from collections.abc import Sequence


class StopText:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = stops, "", False

    def push(self, piece: str, *, last: bool = False) -> str:
        """Add `piece`, and return the text that cannot begin a stop string. At a stop string, return only the
        text before it and set `found`. If `last`, hold back nothing. If several stop strings occur, the one
        that begins first counts, even if another is complete earlier."""
        text, self._held = self._held + piece, ""
        hit = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))
        n_held = 0 if last else max((overlap(text, stop) for stop in self._stops), default=0)
        if (begun := len(text) - n_held) < hit:
            self._held = text[begun:]
            return text[:begun]
        self.found = hit < len(text)
        return text[:hit]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
