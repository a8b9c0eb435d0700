"""Prompt caches that are kept for the next request, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import BaseCache, as_caches
from pykvcache.arrays.mlx.prompt import can_trim_prompt_cache
from pykvcache.arrays.mlx.trie import PromptTrie, Tokens, token_list
from pykvcache.errors import CacheValueError

__all__ = ["LRUPromptCache"]

# In the order in which they have to give way.
_TYPES = ("assistant", "user", "system")


@dataclass(frozen=True)
class _Entry:
    layers: list[BaseCache]
    nbytes: int
    cache_type: str


class LRUPromptCache:
    """Prompt caches under their tokens, up to a number and a size.

    It follows mlx-lm's ``LRUPromptCache``. There eviction is first in, first out, a stored
    prefix of one token is never found, and of several longer entries only one is tried; here
    every hit makes an entry the newest, and the nearest entry that can be trimmed serves. A
    trimmed fetch copies the tokens it hands out and no others, caches that do not trim as
    far as asked are not handed out, and one that is larger than all the room is not stored
    instead of driving out the others.

    Entries are copies: neither the caches that were inserted nor those that were fetched
    have anything to do with them. Not safe for several threads at once.

    Parameters
    ----------
    max_size : int
        Entries to keep.
    max_bytes : int
        Bytes to keep, as the caches' ``nbytes`` tell.
    """

    def __init__(self, max_size: SupportsIndex = 10, max_bytes: SupportsIndex = 1 << 63) -> None:
        self._max_size = as_int("max_size", max_size, minimum=0)
        self._max_bytes = as_int("max_bytes", max_bytes, minimum=0)
        self._trie: PromptTrie[_Entry] = PromptTrie()
        # Oldest first; the tokens as a tuple, to be hashed.
        self._order: dict[str, OrderedDict[tuple[Hashable, tuple[int, ...]], None]] = {
            name: OrderedDict() for name in _TYPES
        }
        self._bytes = dict.fromkeys(_TYPES, 0)

    def __len__(self) -> int:
        return sum(len(order) for order in self._order.values())

    @property
    def max_size(self) -> int:
        """Entries to keep."""
        return self._max_size

    @property
    def max_bytes(self) -> int:
        """Bytes to keep."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(self._bytes.values())

    def fetch_nearest_cache(
        self, model: Hashable, tokens: Tokens
    ) -> tuple[list[BaseCache] | None, list[int]]:
        """Return copies of the caches that save most work, and the tokens left to evaluate.

        An entry for exactly these tokens leaves none. Else the nearest longer one whose caches can
        be trimmed to what is in common, less one if that is everything (of one token that
        leaves empty caches); else the longest shorter one; else None and all tokens.
        """
        keys = token_list(tokens)
        found = self._trie.search(model, keys)
        if found.exact is not None:
            return [layer.copy() for layer in self._hit(model, found.exact).layers], []
        short = len(found.shorter) if found.shorter is not None else 0
        prefix = min(len(keys) - 1, found.common_prefix)
        if found.common_prefix > short:
            for longer in self._trie.continuations(model, keys[: found.common_prefix]):
                entry = self._trie.get(model, longer)
                trimmed = _trimmed(entry.layers, len(longer) - prefix)
                if trimmed is not None:
                    self._hit(model, longer)
                    return trimmed, keys[prefix:]
        if found.shorter is not None:
            layers = self._hit(model, found.shorter).layers
            return [layer.copy() for layer in layers], keys[short:]
        return None, keys

    def insert_cache(
        self,
        model: Hashable,
        tokens: Tokens,
        prompt_cache: Sequence[BaseCache],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store copies of `prompt_cache` as the newest entry.

        An entry for the same tokens is replaced; if the caches can be trimmed, entries for
        prefixes of the tokens go, because this one serves for them. Then entries are
        evicted until there are at most `max_size`, of at most `max_bytes`.

        Parameters
        ----------
        cache_type : str
            Who ends the tokens: ``"assistant"``, ``"user"`` or ``"system"``.
        """
        if not isinstance(cache_type, str) or cache_type not in _TYPES:
            raise CacheValueError(
                f"cache_type is {cache_type!r}; expected one of {_TYPES}",
                "cache_type",
                cache_type,
                _TYPES,
            )
        keys = token_list(tokens)
        layers = [layer.copy() for layer in as_caches("prompt_cache", prompt_cache)]
        entry = _Entry(layers, sum(layer.nbytes for layer in layers), cache_type)
        if entry.nbytes > self._max_bytes:
            return
        if self._trie.search(model, keys).exact is not None:
            self._forget(model, keys, self._trie.pop(model, keys))
        self._trie.add(model, keys, entry)
        self._order[cache_type][model, tuple(keys)] = None
        self._bytes[cache_type] += entry.nbytes
        if can_trim_prompt_cache(layers):
            for length, prefix in self._trie.pop_prefixes(model, keys):
                self._forget(model, keys[:length], prefix)
        self.trim_to(n_sequences=self._max_size, n_bytes=self._max_bytes)

    def trim_to(
        self, *, n_sequences: SupportsIndex | None = None, n_bytes: SupportsIndex | None = None
    ) -> None:
        """Evict entries until there are at most so many, of at most so many bytes.

        Below 0 counts as 0. The oldest of the assistant's go, unless there are more of the
        user's; then of those, unless there are more of the system's.
        """
        entries = len(self) if n_sequences is None else max(as_int("n_sequences", n_sequences), 0)
        limit = self.nbytes if n_bytes is None else max(as_int("n_bytes", n_bytes), 0)
        while len(self) > entries or (self.nbytes > limit and len(self)):
            self._evict()

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return ``n_sequences`` and ``n_bytes`` for each type."""
        return {
            name: {"n_sequences": len(self._order[name]), "n_bytes": self._bytes[name]}
            for name in _TYPES
        }

    def _hit(self, model: Hashable, keys: list[int]) -> _Entry:
        entry = self._trie.get(model, keys)
        self._order[entry.cache_type].move_to_end((model, tuple(keys)))
        return entry

    def _forget(self, model: Hashable, keys: list[int], entry: _Entry) -> None:
        del self._order[entry.cache_type][model, tuple(keys)]
        self._bytes[entry.cache_type] -= entry.nbytes

    def _evict(self) -> None:
        lengths = [len(self._order[name]) for name in _TYPES]
        if lengths[0] and lengths[0] >= lengths[1]:
            name = _TYPES[0]
        else:
            name = _TYPES[1] if lengths[1] and lengths[1] >= lengths[2] else _TYPES[2]
        model, tokens = next(iter(self._order[name]))
        self._forget(model, list(tokens), self._trie.pop(model, tokens))


def _trimmed(layers: Sequence[BaseCache], n: int) -> list[BaseCache] | None:
    """Return copies without the newest `n` tokens; None if a layer cannot go back so far."""
    if not can_trim_prompt_cache(layers):
        return None
    copies = []
    for layer in layers:
        shorter = layer._copy_trimmed(n)
        if shorter is None:
            return None
        copies.append(shorter)
    return copies
