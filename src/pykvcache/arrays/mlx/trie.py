"""PromptTrie: values indexed by token sequences, found by longest common prefix."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pykvcache.arrays.mlx.tokens import Tokens, token_list
from pykvcache.errors import CacheKeyError, shown

__all__ = ["PromptTrie", "PromptTrieResult"]

V = TypeVar("V")


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
