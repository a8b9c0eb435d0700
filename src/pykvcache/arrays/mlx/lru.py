"""Prompt caches that are kept for the next request, least recently used out first."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
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


@dataclass(frozen=True)
class _Change:
    """What an insert or a trim does: an entry that comes, those that go, the bytes after it."""

    key: _Key | None
    entry: _Entry | None
    gone: list[_Key]
    nbytes: dict[str, int]


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
        # By type, oldest first; the tokens as a tuple, to be hashed.
        self._held: dict[str, OrderedDict[_Key, _Entry]] = {name: OrderedDict() for name in _TYPES}
        self._nbytes = dict.fromkeys(_TYPES, 0)
        # What is decided and maybe half done: whatever comes next does it first.
        self._change: _Change | None = None
        # The way to its keys, built anew where a call that changed it did not come to an end.
        self._trie: PromptTrie[None] = PromptTrie()
        self._is_indexed = True

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__ | {"_trie": PromptTrie(), "_is_indexed": False}

    def __copy__(self) -> LRUPromptCache:
        # A shallow copy would share the index of what it holds.
        return copy.deepcopy(self)

    def __len__(self) -> int:
        self._settle()
        return sum(map(len, self._held.values()))

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
        self._settle()
        return sum(self._nbytes.values())

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
                key = model, tuple(longer)
                entry = self._entry(key)
                trimmed = _trimmed(entry.layers, len(longer) - prefix)
                if trimmed is not None:
                    hit = trimmed, keys[prefix:]
                    self._held[entry.cache_type].move_to_end(key)
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
        gone = []
        if can_trim_prompt_cache(layers):
            gone = [(model, key[1][:length]) for length in trie.prefixes(model, keys)]
        change = self._planned(self._max_size, self._max_bytes, gone, key, entry)
        self._is_indexed = False
        trie.add(model, keys, None)
        self._do(change)

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
        change = self._planned(entries, limit, [])
        self._is_indexed = False
        self._do(change)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return ``n_sequences`` and ``n_bytes`` for each type."""
        self._settle()
        return {
            name: {"n_sequences": len(self._held[name]), "n_bytes": self._nbytes[name]}
            for name in _TYPES
        }

    def _index(self) -> PromptTrie[None]:
        self._settle()
        if not self._is_indexed:
            trie: PromptTrie[None] = PromptTrie()
            for held in self._held.values():
                for model, tokens in held:
                    trie.add(model, tokens, None)
            self._trie, self._is_indexed = trie, True
        return self._trie

    def _copied(
        self, model: Hashable, keys: list[int], rest: list[int]
    ) -> tuple[list[BaseCache], list[int]]:
        key = model, tuple(keys)
        entry = self._entry(key)
        hit = [layer.copy() for layer in entry.layers], rest
        self._held[entry.cache_type].move_to_end(key)  # last: what fails before is no hit
        return hit

    def _entry(self, key: _Key) -> _Entry:
        return next(held[key] for held in self._held.values() if key in held)

    def _planned(
        self,
        entries: int,
        limit: int,
        gone: list[_Key],
        key: _Key | None = None,
        entry: _Entry | None = None,
    ) -> _Change:
        """Return how there come to be at most so many entries of so many bytes.

        Some keys are to go in any case, and a new entry may come.
        """
        counts = {name: len(held) for name, held in self._held.items()}
        nbytes = self._nbytes.copy()
        apart = {*gone} if key is None else {*gone, key}
        for name, held in self._held.items():
            for old in apart:
                if old in held:
                    counts[name] -= 1
                    nbytes[name] -= held[old].nbytes
        # Read as far as something has to go, which is not far.
        oldest: dict[str, Iterator[tuple[_Key, _Entry]]] = {
            name: ((k, e) for k, e in held.items() if k not in apart)
            for name, held in self._held.items()
        }
        if key is not None and entry is not None:
            counts[entry.cache_type] += 1
            nbytes[entry.cache_type] += entry.nbytes
            oldest[entry.cache_type] = chain(oldest[entry.cache_type], [(key, entry)])
        gone = gone.copy()
        while sum(counts.values()) > entries or (
            sum(nbytes.values()) > limit and any(counts.values())
        ):
            assistant, user, system = (counts[name] for name in _TYPES)
            if assistant and assistant >= user:
                name = _TYPES[0]
            else:
                name = _TYPES[1] if user and user >= system else _TYPES[2]
            first, evicted = next(oldest[name])
            counts[name] -= 1
            nbytes[name] -= evicted.nbytes
            gone.append(first)
        return _Change(key, entry, gone, nbytes)

    def _do(self, change: _Change) -> None:
        """Make a change; until here nothing has changed but the index."""
        self._change = change  # from here on it is done, whatever comes between
        self._settle()
        for model, tokens in change.gone:
            self._trie.pop(model, tokens)
        self._is_indexed = True

    def _settle(self) -> None:
        """Bring a change to its end. Each step may be done twice."""
        change = self._change
        if change is None:
            return
        for held in self._held.values():
            for key in change.gone:
                held.pop(key, None)
            if change.key is not None:
                held.pop(change.key, None)
        if change.key is not None and change.entry is not None and change.key not in change.gone:
            self._held[change.entry.cache_type][change.key] = change.entry
        self._nbytes = change.nbytes
        self._change = None


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
