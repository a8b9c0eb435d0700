"""Text from tokens, piece by piece: whole characters, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, cast

from pykvcache._convert import as_int

__all__ = ["Stop", "StopInput", "TextStream"]

#: What ends a generation: a string, a token id, or several of both.
StopInput = str | SupportsIndex | Iterable[str | SupportsIndex]


@dataclass(frozen=True)
class Stop:
    """Checked stop strings and stop tokens."""

    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()

    @classmethod
    def of(cls, stop: StopInput, n_vocab: int) -> Stop:
        """Check what a user gave.

        Raises
        ------
        ValueError
            A stop string is empty, or a token id is not in ``[0, n_vocab)``.
        TypeError
            Something is neither a string nor an integer.
        """
        items: list[str | SupportsIndex]
        if isinstance(stop, str) or hasattr(stop, "__index__"):
            items = [cast("str | SupportsIndex", stop)]
        elif isinstance(stop, Iterable) and not isinstance(stop, bytes):
            items = list(stop)
        else:
            raise TypeError(f"stop must be strings or token ids, not {type(stop).__name__}")
        strings: list[str] = []
        tokens: set[int] = set()
        for item in items:
            if isinstance(item, str):
                if not item:
                    raise ValueError("a stop string is empty: it would end every generation")
                strings.append(item)
            elif isinstance(item, bytes) or not hasattr(item, "__index__"):
                raise TypeError(f"stop must be strings or token ids, not {type(item).__name__}")
            else:
                tokens.add(as_int(item, "a stop token", 0, n_vocab - 1))
        return cls(tuple(dict.fromkeys(strings)), frozenset(tokens))

    def __bool__(self) -> bool:
        return bool(self.strings or self.tokens)


class TextStream:
    """Turns the bytes of tokens into text as soon as it is certain.

    Held back are the beginning of a character whose other bytes may follow, and what may be the
    beginning of a stop string.
    """

    __slots__ = ("_decoder", "_held", "_longest", "_strings", "stopped")

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None

    def feed(self, piece: bytes) -> str:
        """Take the bytes of one token; return the text that is certain now.

        Once a stop string is complete, `stopped` names it: the text before it is returned, and
        nothing after it.
        """
        if self.stopped is not None:
            return ""
        return self._give(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character are U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._give(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text if self.stopped is not None else text + rest

    def _give(self, new: str) -> str:
        if not self._strings:
            return new
        text = self._held + new
        found = [(at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if found:
            # The first to begin; of several that begin together, the shortest was complete first.
            at, self.stopped = min(found, key=lambda hit: (hit[0], len(hit[1])))
            self._held = ""
            return text[:at]
        keep = self._suspicious(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _suspicious(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-n:]
            if any(s.startswith(end) for s in self._strings):
                return n
        return 0
