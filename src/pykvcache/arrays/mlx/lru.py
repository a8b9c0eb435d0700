"""Prompt caches that are kept for the next request, least recently used out first."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import BaseCache, as_caches
from pykvcache.arrays.mlx.prompt import can_trim_prompt_cache
from pykvcache.arrays.mlx.trie import PromptTrie, Tokens, token_list
from pykvcache.errors import CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["LRUPromptCache"]

# In the order in which they have to give way.
_TYPES = ("assistant", "user", "system")


@dataclass(frozen=True)
class _Entry:
    layers: list[BaseCache]
    nbytes: int
    cache_type: str


_Key: TypeAlias = tuple[Hashable, tuple[int, ...]]
_Held: TypeAlias = "OrderedDict[_Key, _Entry]"


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
        # Oldest first; the tokens as a tuple, to be hashed. It is replaced as a whole.
        self._held: _Held = OrderedDict()
        # The way to its keys, built anew where a call that changed it did not come to an end.
        self._trie: PromptTrie[None] = PromptTrie()
        self._is_indexed = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trie": PromptTrie(), "_is_indexed": False}

    def __copy__(self) -> LRUPromptCache:
        # A shallow copy would share the index of what it holds.
        return copy.deepcopy(self)

    def __len__(self) -> int:
        return len(self._held)

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
        return sum(entry.nbytes for entry in self._held.values())

    def fetch_nearest_cache(
        self, model: Hashable, tokens: Tokens
    ) -> tuple[list[BaseCache] | None, list[int]]:
        """Return copies of the caches that save most work, and the tokens left to evaluate.

        An entry for exactly these tokens leaves none. Else the nearest longer one whose caches can
        be trimmed to what is in common, less one if that is everything (of one token that
        leaves empty caches); else the longest shorter one; else None and all tokens.
        """
        keys = token_list(tokens)
        trie = self._index()
        found = trie.search(model, keys)
        if found.exact is not None:
            return self._copied(model, found.exact, [])
        short = len(found.shorter) if found.shorter is not None else 0
        prefix = min(len(keys) - 1, found.common_prefix)
        if found.common_prefix > short:
            for longer in trie.continuations(model, keys[: found.common_prefix]):
                entry = self._held[model, tuple(longer)]
                trimmed = _trimmed(entry.layers, len(longer) - prefix)
                if trimmed is not None:
                    hit = trimmed, keys[prefix:]
                    self._held.move_to_end((model, tuple(longer)))
                    return hit
        if found.shorter is not None:
            return self._copied(model, found.shorter, keys[short:])
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
                f"cache_type is {shown(cache_type)}; expected one of {_TYPES}",
                "cache_type",
                cache_type,
                _TYPES,
            )
        keys = token_list(tokens)
        layers = [layer.copy() for layer in as_caches("prompt_cache", prompt_cache)]
        entry = _Entry(layers, sum(layer.nbytes for layer in layers), cache_type)
        if entry.nbytes > self._max_bytes:
            return
        trie, key = self._index(), (model, tuple(keys))
        held = self._held.copy()
        held[key] = entry
        held.move_to_end(key)
        gone = []
        if can_trim_prompt_cache(layers):
            gone = [(model, key[1][:length]) for length in trie.prefixes(model, keys)]
        for prefix in gone:
            del held[prefix]
        gone += _evicted(held, self._max_size, self._max_bytes)
        self._is_indexed = False
        trie.add(model, keys, None)
        self._replace(held, gone)

    def trim_to(
        self, *, n_sequences: SupportsIndex | None = None, n_bytes: SupportsIndex | None = None
    ) -> None:
        """Evict entries until there are at most so many, of at most so many bytes.

        Below 0 counts as 0. The oldest of the assistant's go, unless there are more of the
        user's; then of those, unless there are more of the system's.
        """
        entries = len(self) if n_sequences is None else max(as_int("n_sequences", n_sequences), 0)
        limit = self.nbytes if n_bytes is None else max(as_int("n_bytes", n_bytes), 0)
        self._index()
        held = self._held.copy()
        gone = _evicted(held, entries, limit)
        self._is_indexed = False
        self._replace(held, gone)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return ``n_sequences`` and ``n_bytes`` for each type."""
        stats = {name: {"n_sequences": 0, "n_bytes": 0} for name in _TYPES}
        for entry in self._held.values():
            stats[entry.cache_type]["n_sequences"] += 1
            stats[entry.cache_type]["n_bytes"] += entry.nbytes
        return stats

    def _index(self) -> PromptTrie[None]:
        if not self._is_indexed:
            trie: PromptTrie[None] = PromptTrie()
            for model, tokens in self._held:
                trie.add(model, tokens, None)
            self._trie, self._is_indexed = trie, True
        return self._trie

    def _copied(
        self, model: Hashable, keys: list[int], rest: list[int]
    ) -> tuple[list[BaseCache], list[int]]:
        key = model, tuple(keys)
        hit = [layer.copy() for layer in self._held[key].layers], rest
        self._held.move_to_end(key)  # last: what fails before is no hit
        return hit

    def _replace(self, held: _Held, gone: list[_Key]) -> None:
        """Hold this instead, without those keys; until here nothing has changed but the index."""
        for model, tokens in gone:
            self._trie.pop(model, tokens)
        # Without a call between, no interrupt comes between.
        self._held = held
        self._is_indexed = True


def _evicted(held: _Held, entries: int, limit: int) -> list[_Key]:
    """Take out of `held` what is more than so many entries of so many bytes; return its keys."""
    nbytes = sum(entry.nbytes for entry in held.values())
    if len(held) <= entries and nbytes <= limit:
        return []
    oldest: dict[str, deque[_Key]] = {name: deque() for name in _TYPES}
    for key, entry in held.items():
        oldest[entry.cache_type].append(key)
    gone = []
    while len(held) > entries or (nbytes > limit and held):
        lengths = [len(oldest[name]) for name in _TYPES]
        if lengths[0] and lengths[0] >= lengths[1]:
            name = _TYPES[0]
        else:
            name = _TYPES[1] if lengths[1] and lengths[1] >= lengths[2] else _TYPES[2]
        key = oldest[name].popleft()
        nbytes -= held.pop(key).nbytes
        gone.append(key)
    return gone


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
