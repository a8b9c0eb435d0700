"""Text from tokens, piece by piece: whole characters, and never a part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, cast

from pykvcache._arguments import TokenInput, as_int
from pykvcache.errors import ArgumentError, ClosedError, UnsupportedOperation

if TYPE_CHECKING:
    from pykvcache.model import LlamaModel

__all__ = ["Stop", "StopInput", "TextStream", "piece_of", "text_of"]

#: What ends a generation: a string, a token id, or several of both; None for nothing.
StopInput = str | SupportsIndex | Iterable[str | SupportsIndex] | None


def text_of(model: LlamaModel, tokens: TokenInput) -> str | None:
    """Return the text of tokens for display; None without a vocabulary or after `close`.

    A context works without either, so a display must not fail.
    """
    try:
        return model.detokenize(tokens)
    except (ClosedError, UnsupportedOperation):
        return None


def piece_of(model: LlamaModel, token: int) -> str | None:
    """Return the text of one token, including special ones; None as for `text_of`."""
    try:
        return model.token_to_piece(token, special=True).decode("utf-8", "replace")
    except (ClosedError, UnsupportedOperation):
        return None


@dataclass(frozen=True)
class Stop:
    """Checked stop strings and stop tokens."""

    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()

    @classmethod
    def of(cls, stop: StopInput, n_vocab: int) -> Stop:
        """Check the user's argument; token ids must be in ``[0, n_vocab)``."""
        if stop is None:
            return cls()
        is_one = isinstance(stop, (str, bytes)) or hasattr(stop, "__index__")
        strings: list[str] = []
        tokens: set[int] = set()
        for item in [stop] if is_one or not isinstance(stop, Iterable) else stop:
            if isinstance(item, str):
                if not item:
                    raise ArgumentError(
                        "a stop string is empty: it would end every generation", "stop", item
                    )
                strings.append(item)
            elif isinstance(item, bytes) or not hasattr(item, "__index__"):
                raise TypeError(f"stop must be strings or token ids, not {type(item).__name__}")
            else:
                tokens.add(as_int(cast(SupportsIndex, item), "a stop token", 0, n_vocab - 1))
        return cls(tuple(dict.fromkeys(strings)), frozenset(tokens))


class TextStream:
    """Converts a stream of tokens' bytes to text, as soon as it is final.

    The beginning of an incomplete character and any possible beginning of a stop string are held
    back. Once a stop string is complete, `stopped` names it: the text before it is returned, and
    nothing after it.
    """

    __slots__ = ("_held", "_longest", "_rest", "stopped", "strings")

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self.strings = tuple(strings)
        self._longest = max(map(len, self.strings), default=0)
        self._rest, self._held = b"", ""
        self.stopped: str | None = None

    def feed(self, piece: bytes, *, final: bool = False) -> str:
        """Take the bytes of one token; return the text that is final now."""
        if self.stopped is not None:
            return ""
        data = self._rest + piece
        new, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        if not self.strings:
            return new
        text, self._held = self._held + new, ""
        found = [(at, s) for s in self.strings if (at := text.find(s)) >= 0]
        if found:
            # The earliest match wins; on a tie the shortest, which was complete first.
            at, self.stopped = min(found, key=lambda hit: (hit[0], len(hit[1])))
            return text[:at]
        certain = len(text) if final else len(text) - self._suspicious(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the held-back text; bytes that never became a character are U+FFFD."""
        return self.feed(b"", final=True)

    def _suspicious(self, text: str) -> int:
        """Return the length of the longest suffix that begins a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-n:]
            if any(s.startswith(end) for s in self.strings):
                return n
        return 0
