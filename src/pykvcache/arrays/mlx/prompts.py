"""Prompts by their token ids: a growing buffer, a trie, and a cache with LRU eviction."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, SupportsIndex, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, as_ints
from pykvcache.arrays.mlx.base import BaseCache, as_caches, row_counts
from pykvcache.arrays.mlx.token_pair import grow, grown_capacity
from pykvcache.errors import CacheKeyError, CacheValueError, shown

__all__ = ["LRUPromptCache", "PromptTrie", "PromptTrieResult", "TokenBuffer"]

V = TypeVar("V")
#: Token ids from a caller.
Tokens: TypeAlias = Sequence[int] | NDArray[Any]

_INT32 = np.iinfo(np.int32)


class TokenBuffer:
    """A growing row of int32 token ids, with a capacity in multiples of 256.

    Modelled on mlx-lm's ``TokenBuffer``; appending costs O(1) copies on average.

    Parameters
    ----------
    tokens : sequence of int, optional
        The first tokens.
    """

    def __init__(self, tokens: Tokens = ()) -> None:
        self._buffer = np.empty(0, np.int32)
        self._size = 0
        self.update(tokens)

    def __len__(self) -> int:
        return self._size

    def update(self, tokens: Tokens) -> NDArray[np.int32]:
        """Append `tokens`; return a read-only view of all tokens.

        Raises
        ------
        CacheDTypeError
            `tokens` are not integers.
        CacheValueError
            `tokens` is not one-dimensional, or an id does not fit int32.
        """
        new = row_counts("tokens", tokens, signed=True)
        if new.size and (new.min() < _INT32.min or new.max() > _INT32.max):
            found, message = (int(new.min()), int(new.max())), "a token id does not fit int32"
            raise CacheValueError(message, "tokens", found, (_INT32.min, _INT32.max))
        end = self._size + new.size
        if end > self._buffer.size:
            capacity = grown_capacity(self._buffer.size, end)
            self._buffer = grow(self._buffer, 0, self._size, capacity, axis=0)
        self._buffer[self._size : end] = new
        self._size = end
        return self.tokens

    def __copy__(self) -> TokenBuffer:
        # A shallow copy would share the buffer but not its length.
        return type(self)(self.tokens)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens as a read-only view."""
        view = self._buffer[: self._size]
        view.flags.writeable = False
        return view

    @property
    def state(self) -> NDArray[np.int32]:
        """All tokens as a view (mlx-lm includes spare room)."""
        return self.tokens


def token_list(tokens: Tokens) -> list[int]:
    """Return token ids as a new list; raise `CacheDTypeError` unless all are integers."""
    if type(tokens) is list and {int}.issuperset(map(type, tokens)):
        return tokens.copy()
    found: list[int] = as_ints("tokens", tokens).tolist()
    return found


@dataclass(frozen=True)
class PromptTrieResult:
    """The result of `PromptTrie.search`.

    Attributes
    ----------
    model : hashable
        The model of the search.
    exact : list of int, optional
        The tokens, if they have a value; then `shorter` and `longer` are None.
    shorter : list of int, optional
        The longest non-empty prefix of the tokens that has a value.
    longer : list of int, optional
        The shortest sequence with a value that extends the common prefix.
    common_prefix : int
        Length of the longest common prefix with any stored sequence.
    """

    model: Hashable
    exact: list[int] | None
    shorter: list[int] | None
    longer: list[int] | None
    common_prefix: int


class _Node(Generic[V]):
    __slots__ = ("children", "values")

    def __init__(self) -> None:
        self.children: dict[int, _Node[V]] = {}
        self.values: list[V] = []  # empty or one value, which may be None


class PromptTrie(Generic[V]):
    """One value for each model and token sequence.

    Modelled on mlx-lm's ``PromptTrie``.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[V]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Pickled as a list of entries: nested nodes would exceed pickle's recursion limit.
        return self.__dict__ | {"_roots": list(self._entries())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_roots": {}})
        for model, tokens, value in state["_roots"]:
            self.add(model, tokens, value)

    def __copy__(self) -> PromptTrie[V]:
        # A shallow copy would share the nodes.
        twin = object.__new__(type(self))
        twin.__setstate__(self.__getstate__())
        return twin

    def _entries(self) -> Iterator[tuple[Hashable, list[int], V]]:
        """Yield model, tokens and value of all entries."""
        for model, root in self._roots.items():
            waiting: list[tuple[_Node[V], Any]] = [(root, None)]
            while waiting:
                node, way = waiting.pop()
                if node.values:
                    yield model, _unwound(way), node.values[0]
                children = [(child, (token, way)) for token, child in node.children.items()]
                waiting.extend(reversed(children))

    def add(self, model: Hashable, tokens: Tokens, value: V) -> V | None:
        """Store `value`; return the replaced one, or None."""
        keys = token_list(tokens)
        node = self._roots.setdefault(model, _Node())
        for token in keys:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node()
            node = child
        previous = node.values[0] if node.values else None
        node.values = [value]
        return previous

    def get(self, model: Hashable, tokens: Tokens) -> V:
        """Return the value of exactly these tokens, or raise ``CacheKeyError``."""
        return self._path(model, token_list(tokens))[-1].values[0]

    def pop(self, model: Hashable, tokens: Tokens) -> V:
        """Remove and return a value, or raise ``CacheKeyError``; prune empty branches."""
        keys = token_list(tokens)
        path = self._path(model, keys)
        value = path[-1].values[0]
        if path[-1].children:
            path[-1].values = []
            return value
        # Cut below the last node still in use.
        for depth in range(len(keys) - 1, -1, -1):
            above = path[depth]
            if above.values or len(above.children) > 1:
                del above.children[keys[depth]]
                return value
        del self._roots[model]
        return value

    def pop_prefixes(self, model: Hashable, tokens: Tokens) -> list[tuple[int, V]]:
        """Remove the values of all proper prefixes; return them with their lengths.

        The value of `tokens` itself, if any, stays.
        """
        keys = token_list(tokens)
        return [(length, self.pop(model, keys[:length])) for length in self.prefixes(model, keys)]

    def prefixes(self, model: Hashable, tokens: Tokens) -> list[int]:
        """Return the lengths of all proper prefixes that have a value."""
        node = self._roots.get(model)
        lengths = []
        for length, token in enumerate(token_list(tokens)):
            if node is None:
                break
            if node.values:
                lengths.append(length)
            node = node.children.get(token)
        return lengths

    def search(self, model: Hashable, tokens: Tokens) -> PromptTrieResult:
        """Find the value of `tokens`, or the nearest shorter and longer sequences."""
        keys = token_list(tokens)
        node = self._roots.get(model)
        if node is None:
            return PromptTrieResult(model, None, None, None, 0)
        best = common = 0
        for token in keys:
            child = node.children.get(token)
            if child is None:
                break
            node = child
            common += 1
            if node.values:
                best = common
        if common == len(keys) and node.values:
            return PromptTrieResult(model, keys, None, None, common)
        shorter = keys[:best] if best else None
        longer = next(_below(node), None) if common else None
        if longer is not None:
            longer = keys[:common] + longer
        return PromptTrieResult(model, None, shorter, longer, common)

    def continuations(self, model: Hashable, tokens: Tokens) -> Iterator[list[int]]:
        """Yield longer sequences with a value that begin with `tokens`, shortest first.

        The trie must not change during iteration.
        """
        keys = token_list(tokens)
        node = self._roots.get(model)
        for token in keys:
            if node is None:
                return
            node = node.children.get(token)
        if node is not None:
            for rest in _below(node):
                yield keys + rest

    def _path(self, model: Hashable, keys: list[int]) -> list[_Node[V]]:
        node = self._roots.get(model)
        path = []
        for token in keys:
            if node is None:
                break
            path.append(node)
            node = node.children.get(token)
        if node is None or not node.values:
            message = f"nothing is stored for model {shown(model)} and these {len(keys)} tokens"
            raise CacheKeyError(message, "model and tokens", (model, len(keys)))
        return [*path, node]


def _below(node: _Node[V]) -> Iterator[list[int]]:
    # Breadth-first, so that the nearest value comes first. `way` links a node's tokens upwards.
    level: list[tuple[_Node[V], Any]] = [(node, None)]
    while level:
        below = []
        for parent, way in level:
            for token, child in parent.children.items():
                if child.values:
                    yield _unwound((token, way))
                below.append((child, (token, way)))
        level = below


def _unwound(way: Any) -> list[int]:
    tokens = []
    while way is not None:
        token, way = way
        tokens.append(token)
    return tokens[::-1]


# In order of eviction.
_TYPES = ("assistant", "user", "system")


@dataclass(frozen=True)
class _Entry:
    layers: list[BaseCache]
    nbytes: int


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
        entry = _Entry(layers, sum(layer.nbytes for layer in layers))
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
