"""Tokens and the trie of prompts: a dictionary of token sequences."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_support import pickled

from pykvcache.arrays import LRUPromptCache, PromptTrie, PromptTrieResult, TokenBuffer
from pykvcache.errors import CacheDTypeError, CacheKeyError, CacheValueError
from support.examples import examples

SEQUENCES = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=examples(200), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "add", "pop", "prefixes", "copy"]), SEQUENCES),
        max_size=10,
    ),
    asked=SEQUENCES,
)
def test_a_trie_is_a_dictionary(steps: list[tuple[str, list[int]]], asked: list[int]) -> None:
    trie: PromptTrie[int] = PromptTrie()
    plain: dict[tuple[int, ...], int] = {}
    for i, (step, tokens) in enumerate(steps):
        key = tuple(tokens)
        if step == "add":
            assert trie.add("m", tokens, i) == plain.get(key)
            plain[key] = i
        elif step == "copy":
            trie = copy.copy(trie) if i % 2 else pickled(trie)
        elif step == "prefixes":
            gone = {k: plain.pop(k) for k in [*plain] if k != key and k == key[: len(k)]}
            assert trie.prefixes("m", tokens) == sorted(map(len, gone))
            assert trie.pop_prefixes("m", tokens) == sorted((len(k), v) for k, v in gone.items())
        elif key in plain:
            assert trie.get("m", np.array(tokens, np.int64)) == plain[key]
            assert trie.pop("m", tokens) == plain.pop(key)
        else:
            for call in (trie.pop, trie.get):
                with pytest.raises(CacheKeyError):
                    call("m", tokens)
    check_search(trie, plain, asked)
    for key in [*plain]:
        trie.pop("m", key)
    assert trie._roots == {}  # pop prunes empty branches


def check_search(trie: PromptTrie[int], plain: dict[tuple[int, ...], int], asked: Any) -> None:
    assert trie.search("other", asked) == PromptTrieResult("other", None, None, None, 0)
    found, key = trie.search("m", asked), tuple(asked)
    longer = sorted((k for k in plain if k[: len(key)] == key and k != key), key=len)
    continued = [tuple(tokens) for tokens in trie.continuations("m", asked)]
    assert sorted(continued) == sorted(longer)
    assert [*map(len, continued)] == [*map(len, longer)]
    common = max((n for n in range(len(key) + 1) for k in plain if k[:n] == key[:n]), default=0)
    assert found.common_prefix == common
    if key in plain:
        assert (found.exact, found.shorter, found.longer) == (asked, None, None)
        return
    prefixes = [k for k in plain if k and key[: len(k)] == k]
    assert found.exact is None
    assert found.shorter == (list(max(prefixes, key=len)) if prefixes else None)
    beyond = [k for k in plain if k[:common] == key[:common] and len(k) > common and common]
    assert (found.longer is None) == (not beyond)
    if found.longer is not None:
        assert tuple(found.longer) in beyond
        assert len(found.longer) == min(map(len, beyond))


@pytest.mark.parametrize("tokens", [[1.0, 2], [True, 1], "text", [1, 2, [3]], [None], 5])
def test_tokens_are_integers(tokens: Any) -> None:
    lru, trie = LRUPromptCache(), PromptTrie[str]()
    for call in (
        lambda: lru.insert_cache("m", tokens, []),
        lambda: lru.fetch_nearest_cache("m", tokens),
        lambda: trie.add("m", tokens, "value"),
        lambda: trie.add([], [1], "value"),  # type: ignore[arg-type]
        lambda: trie.get("m", tokens),
        lambda: trie.pop("m", tokens),
        lambda: trie.pop_prefixes("m", tokens),
        lambda: trie.search("m", tokens),
        lambda: [*trie.continuations("m", tokens)],
    ):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(CacheDTypeError):
        trie.search("m", np.array([1.0]))
    with pytest.raises(CacheValueError):
        trie.search("m", np.array([[1]]))
    assert len(lru) == 0
    assert trie._roots == {}


def test_long_prompts_are_copied_and_pickled() -> None:
    """One node within another for each token would be too deep for pickle."""
    tokens = [*range(5000)]
    trie: PromptTrie[int] = PromptTrie()
    for branch in ([9, 1, 1], [9, 2], [9], [*tokens], []):
        trie.add("m", branch, len(branch))
    for twin in (copy.deepcopy(trie), copy.copy(trie), pickled(trie)):
        assert twin.get("m", tokens) == 5000
        assert [*twin.continuations("m", [])] == [*trie.continuations("m", [])]
        twin.add("m", [8], 1)
        assert trie.search("m", [8]).common_prefix == 0


def test_a_token_buffer_appends() -> None:
    buffer = TokenBuffer([1, 2])
    assert buffer.update(np.array([3])).tolist() == [1, 2, 3]
    assert buffer.tokens.dtype == np.int32
    assert not buffer.tokens.flags.writeable
    assert len(buffer) == 3
    assert buffer.update([]).tolist() == buffer.state.tolist() == [1, 2, 3]
    twin = copy.copy(buffer)
    twin.update([9])
    addresses = set()
    for n in range(2000):
        addresses.add(buffer.update([n]).__array_interface__["data"][0])
    assert len(addresses) <= 8
    assert buffer.tokens.tolist() == [1, 2, 3, *range(2000)]
    assert twin.tokens.tolist() == [1, 2, 3, 9]
    for bad, error in (
        ([1.5], CacheDTypeError),
        ([3, True], CacheDTypeError),
        ([[1], [2, 3]], CacheDTypeError),
        ([2**31], CacheValueError),
        ([-(2**31) - 1], CacheValueError),
        ([[1]], CacheDTypeError),
    ):
        with pytest.raises(error):
            buffer.update(bad)
    assert len(buffer) == 2003
