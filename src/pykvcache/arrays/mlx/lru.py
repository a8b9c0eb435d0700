"""LRUPromptCache: prompt caches for later requests, with LRU eviction."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx.base import BaseCache, as_caches
from pykvcache.arrays.mlx.tokens import Tokens, token_list
from pykvcache.arrays.mlx.trie import PromptTrie
from pykvcache.errors import CacheValueError, shown

__all__ = ["LRUPromptCache"]

# In order of eviction.
_TYPES = ("assistant", "user", "system")


@dataclass(frozen=True)
class _Entry:
    layers: list[BaseCache]
    nbytes: int
    cache_type: str


_Key: TypeAlias = tuple[Hashable, tuple[int, ...]]


class LRUPromptCache:
    """Prompt caches, indexed by their tokens, up to a maximum number and a maximum size.

    Modelled on mlx-lm's ``LRUPromptCache``. A hit makes an entry the newest, and the nearest
    trimmable entry is used. A trimmed fetch copies only the tokens that it returns. An entry larger
    than `max_bytes` is not stored and evicts nothing.

    Entries are copies, independent of inserted and fetched caches. Not thread-safe.

    Parameters
    ----------
    max_size : int
        Maximum number of entries.
    max_bytes : int
        Maximum number of bytes, by the caches' ``nbytes``.
    """

    def __init__(self, max_size: SupportsIndex = 10, max_bytes: SupportsIndex = 1 << 63) -> None:
        self._max_size = as_int("max_size", max_size, minimum=0)
        self._max_bytes = as_int("max_bytes", max_bytes, minimum=0)
        # By type, oldest first; the trie finds keys.
        self._entries: dict[str, OrderedDict[_Key, _Entry]] = {
            name: OrderedDict() for name in _TYPES
        }
        self._nbytes = dict.fromkeys(_TYPES, 0)
        self._trie: PromptTrie[str] = PromptTrie()  # the type of each entry

    def __copy__(self) -> LRUPromptCache:
        # A shallow copy would share the trie.
        return copy.deepcopy(self)

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    @property
    def max_size(self) -> int:
        """Maximum number of entries."""
        return self._max_size

    @property
    def max_bytes(self) -> int:
        """Maximum number of bytes."""
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(self._nbytes.values())

    def fetch_nearest_cache(
        self, model: Hashable, tokens: Tokens
    ) -> tuple[list[BaseCache] | None, list[int]]:
        """Return copies of the best entry's caches, and the tokens left to evaluate.

        The best entry is, in this order: an exact one, which leaves no tokens; the nearest longer
        one whose caches can be trimmed to the common prefix, minus one token if that is the whole
        prompt (empty caches for a prompt of one token); the longest shorter one. Otherwise
        returns None and all tokens.
        """
        keys = token_list(tokens)
        found = self._trie.search(model, keys)
        if found.exact is not None:
            return self._hit(model, keys, 0), []
        short = len(found.shorter) if found.shorter is not None else 0
        prefix = min(len(keys) - 1, found.common_prefix)
        if found.common_prefix > short:
            for longer in self._trie.continuations(model, keys[: found.common_prefix]):
                hit = self._hit(model, longer, len(longer) - prefix)
                if hit is not None:
                    return hit, keys[prefix:]
        if found.shorter is not None:
            return self._hit(model, found.shorter, 0), keys[short:]
        return None, keys

    def _hit(self, model: Hashable, tokens: list[int], n: int) -> list[BaseCache] | None:
        """Return copies of an entry without the newest `n` tokens; the entry becomes the newest.

        None if a layer cannot be trimmed that far.
        """
        entries = self._entries[self._trie.get(model, tokens)]
        key = model, tuple(tokens)
        layers = entries[key].layers
        if n and not _can_trim(layers):
            return None
        copies = []
        for layer in layers:
            copied = layer._copied(n)
            if copied is None:
                return None
            copies.append(copied)
        entries.move_to_end(key)
        return copies

    def insert_cache(
        self,
        model: Hashable,
        tokens: Tokens,
        prompt_cache: Sequence[BaseCache],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store copies of `prompt_cache` as the newest entry.

        Replaces an entry for the same tokens. If the caches can be trimmed, drops entries for
        prefixes of the tokens, because this one covers them. Then evicts entries down to
        `max_size` and `max_bytes`.

        Parameters
        ----------
        cache_type : str
            The role at the end of the tokens: ``"assistant"``, ``"user"`` or ``"system"``.
        """
        if not isinstance(cache_type, str) or cache_type not in _TYPES:
            message = f"cache_type is {shown(cache_type)}; expected one of {_TYPES}"
            raise CacheValueError(message, "cache_type", cache_type, _TYPES)
        keys = token_list(tokens)
        layers = [layer.copy() for layer in as_caches("prompt_cache", prompt_cache)]
        entry = _Entry(layers, sum(layer.nbytes for layer in layers), cache_type)
        if entry.nbytes > self._max_bytes:
            return
        if _can_trim(layers):
            for length in self._trie.prefixes(model, keys):
                self._remove(model, keys[:length])
        if self._trie.search(model, keys).exact is not None:
            self._remove(model, keys)
        self._trie.add(model, keys, cache_type)
        self._entries[cache_type][model, tuple(keys)] = entry
        self._nbytes[cache_type] += entry.nbytes
        self._evict(self._max_size, self._max_bytes)

    def trim_to(
        self, *, n_sequences: SupportsIndex | None = None, n_bytes: SupportsIndex | None = None
    ) -> None:
        """Evict entries down to a maximum number of entries and of bytes.

        Negative numbers count as 0. Evicts the oldest entry of type assistant, unless more entries
        are of type user; then the oldest of those, unless more are of type system.
        """
        entries = len(self) if n_sequences is None else max(as_int("n_sequences", n_sequences), 0)
        limit = self.nbytes if n_bytes is None else max(as_int("n_bytes", n_bytes), 0)
        self._evict(entries, limit)

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return ``n_sequences`` and ``n_bytes`` for each type."""
        return {
            name: {"n_sequences": len(self._entries[name]), "n_bytes": self._nbytes[name]}
            for name in _TYPES
        }

    def _evict(self, entries: int, limit: int) -> None:
        while len(self) > entries or (self.nbytes > limit and len(self)):
            assistant, user, system = (len(self._entries[name]) for name in _TYPES)
            if assistant and assistant >= user:
                name = _TYPES[0]
            else:
                name = _TYPES[1] if user and user >= system else _TYPES[2]
            model, tokens = next(iter(self._entries[name]))
            self._remove(model, tokens)

    def _remove(self, model: Hashable, tokens: Sequence[int]) -> None:
        name = self._trie.pop(model, tokens)
        entry = self._entries[name].pop((model, tuple(tokens)))
        self._nbytes[name] -= entry.nbytes


def _can_trim(layers: Sequence[BaseCache]) -> bool:
    return all(layer.is_trimmable() for layer in layers)
