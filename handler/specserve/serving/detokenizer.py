"""From token bytes to text that may be shown: no broken UTF-8, no half of a stop string."""

from __future__ import annotations

import codecs


class TextStream:
    """The text of one answer as it grows; what a stop string may still claim is held back.

    Text is released once, by `take`. After a stop string was found nothing follows it, and it is not shown itself.
    `length` counts the characters that were pushed, `released` those that are certain.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._ready = ""
        self.stopped = False
        self.length = 0
        self.released = 0

    def push(self, piece: bytes) -> None:
        """Add a token's bytes."""
        self._add(self._decoder.decode(piece))

    def finish(self) -> None:
        """No more tokens come: an unfinished character becomes U+FFFD, and what was held back is released."""
        if not self.stopped:
            self._add(self._decoder.decode(b"", final=True))
        self._release(len(self._held))

    @property
    def ready(self) -> bool:
        """Whether there is text to take."""
        return bool(self._ready)

    def take(self) -> str:
        """The text that became certain since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def _add(self, text: str) -> None:
        if self.stopped or not text:
            return
        self._held += text
        self.length += len(text)
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._release(min(found))
            self._held = ""
            self.stopped = True
            return
        keep = max((_unfinished(self._held, stop) for stop in self._stops), default=0)
        self._release(len(self._held) - keep)

    def _release(self, count: int) -> None:
        self._ready += self._held[:count]
        self._held = self._held[count:]
        self.released += count


def _unfinished(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
