import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.arrays import PromptTrie, PromptTrieResult, TokenBuffer
from pykvcache.errors import CacheDTypeError, CacheKeyError, CacheValueError


def trie(*sequences):
    made = PromptTrie()
    for tokens in sequences:
        made.add("m", tokens, tuple(tokens))
    return made


def test_trie_add_returns_the_previous_value():
    """PromptTrie add / get."""
    made = PromptTrie()
    assert made.add("m", [1, 2], "a") is None
    assert made.add("m", np.array([1, 2]), "b") == "a"
    assert made.get("m", (1, 2)) == "b"
    for model, tokens in (("m", [1]), ("m", [1, 2, 3]), ("m", [9]), ("other", [1, 2])):
        with pytest.raises(CacheKeyError) as caught:
            made.get(model, tokens)
        assert isinstance(caught.value, KeyError)


def test_trie_pop_prunes():
    """PromptTrie pop (prunes)."""
    made = trie([1, 2, 3], [1, 2], [1, 5])
    assert made.pop("m", [1, 2, 3]) == (1, 2, 3)
    assert made.search("m", [1, 2, 3]).common_prefix == 2
    assert made.pop("m", [1, 2]) == (1, 2)
    assert made.search("m", [1, 2, 3]).common_prefix == 1
    with pytest.raises(CacheKeyError):
        made.pop("m", [1, 2])
    assert made.pop("m", [1, 5]) == (1, 5)
    assert made.search("m", [1]) == PromptTrieResult("m", None, None, None, 0)
    made.add("m", [], 0)
    assert made.pop("m", []) == 0


def test_trie_pop_prefixes():
    """PromptTrie pop_prefixes: the values of shorter prefixes with their lengths."""
    made = trie([], [1], [1, 2, 3], [1, 2, 3, 4], [1, 9])
    assert made.pop_prefixes("m", [1, 2, 3, 4]) == [(0, ()), (1, (1,)), (3, (1, 2, 3))]
    assert made.get("m", [1, 2, 3, 4])
    assert made.get("m", [1, 9])
    assert made.pop_prefixes("m", [1, 2, 3, 4]) == []
    assert made.pop_prefixes("other", [1]) == []
    assert made.pop_prefixes("m", [1, 9, 8, 7]) == [(2, (1, 9))]  # nothing is stored there


def test_trie_search_result():
    """PromptTrie search -> {exact, shorter, longer, common_prefix}."""
    made = trie([1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 9])
    assert made.search("m", [1, 2]).exact == [1, 2]
    found = made.search("m", [1, 2, 3])
    assert (found.exact, found.shorter, found.longer) == (None, [1, 2], [1, 2, 3, 9])
    assert found.common_prefix == 3
    found = made.search("m", [1, 2, 3, 4, 6])
    assert (found.shorter, found.longer, found.common_prefix) == ([1, 2], [1, 2, 3, 4, 5], 4)
    assert made.search("m", [7]) == PromptTrieResult("m", None, None, None, 0)
    assert made.search("other", [1]) == PromptTrieResult("other", None, None, None, 0)
    assert made.search("m", [1, 2, 3, 4, 5, 6]).longer is None


def test_a_stored_prefix_of_one_token_is_found():
    """Upstream bug: a one-token stored prefix never matches (last_index > 0)."""
    assert trie([1]).search("m", [1, 2]).shorter == [1]


sequences = st.lists(st.integers(0, 2), max_size=5)


@given(stored=st.lists(sequences, max_size=6), asked=sequences, popped=st.booleans())
def test_trie_is_a_plain_dictionary(stored, asked, popped):
    made, plain = PromptTrie(), {}
    for i, tokens in enumerate(stored):
        assert made.add("m", tokens, i) == plain.get(tuple(tokens))
        plain[tuple(tokens)] = i
    if popped and stored:
        key = stored[0]
        gone = {k: v for k, v in plain.items() if k == tuple(key[: len(k)]) and len(k) < len(key)}
        assert made.pop_prefixes("m", key) == sorted((len(k), v) for k, v in gone.items())
        plain = {k: v for k, v in plain.items() if k not in gone}
    found, key = made.search("m", asked), tuple(asked)
    common = max((n for n in range(len(key) + 1) for k in plain if k[:n] == key[:n]), default=0)
    assert found.common_prefix == common
    if key in plain:
        assert found.exact == asked
        assert found.shorter is found.longer is None
        assert made.get("m", asked) == plain[key]
        return
    prefixes = [k for k in plain if k and key[: len(k)] == k]
    assert found.shorter == (list(max(prefixes, key=len)) if prefixes else None)
    beyond = [k for k in plain if k[:common] == key[:common] and len(k) > common and common]
    assert (found.longer is None) == (not beyond)
    if beyond:
        assert tuple(found.longer) in beyond
        assert len(found.longer) == min(map(len, beyond))


def test_token_buffer_appends():
    """TokenBuffer (step 256)."""
    buffer = TokenBuffer([1, 2])
    assert buffer.update(np.array([3])).tolist() == [1, 2, 3]
    assert buffer.tokens.dtype == np.int32
    assert len(buffer) == 3
    assert buffer.update([]).tolist() == buffer.state.tolist() == [1, 2, 3]
    addresses = set()
    for n in range(2000):
        addresses.add(buffer.update([n]).__array_interface__["data"][0])
    assert len(addresses) <= 8
    assert buffer.tokens.tolist() == [1, 2, 3, *range(2000)]
    refused = [
        ([1.5], CacheDTypeError),
        ([True], CacheDTypeError),
        ([2**31], CacheValueError),
        ([[1]], CacheValueError),
    ]
    for bad, error in refused:
        with pytest.raises(error):
            buffer.update(bad)
    assert len(buffer) == 2003
