"""The ledger against plain lists, and text against Python's own decoding and searching."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache.errors import ArgumentError
from pykvcache.sequence.checkpoints import (
    CheckpointPolicy,
    Checkpoints,
    WindowChunk,
    fit,
    total_bytes,
)
from pykvcache.sequence.ledger import Ledger, common_prefix
from pykvcache.sequence.text import Stop, TextStream

WORDS = st.lists(st.integers(0, 2), max_size=8)


def ints(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_the_ledger_tracks_tokens_and_held_tokens() -> None:
    rng = np.random.default_rng(1)
    ledger, tokens, memory = Ledger(), list[int](), list[int]()
    for _ in range(1000):
        before = ledger.tokens
        copy = before.tolist()
        match rng.choice(["append", "truncate", "evaluate", "rewind"]):
            case "append":
                more = rng.integers(0, 2, int(rng.integers(1, 6))).tolist()
                ledger.append(ints(more))
                tokens += more
            case "truncate":
                n = int(rng.integers(len(tokens) + 1))
                ledger.truncate(n)
                del tokens[n:]
            case "evaluate":
                memory = list(tokens)
                ledger.holds(len(tokens))
            case "rewind":
                n = int(rng.integers(ledger.n_evaluated + 1))
                del memory[n:]
                ledger.holds(n)
        assert before.tolist() == copy, "an array that was handed out changed"
        assert ledger.tokens.tolist() == tokens
        assert ledger.tokens[: ledger.n_evaluated].tolist() + ledger.stale.tolist() == memory
        assert ledger.n_held == len(memory)
        assert ledger.pending.tolist() == tokens[ledger.n_evaluated :]
        # Nothing that is held would be evaluated again.
        assert ledger.n_evaluated == common_prefix(ints(tokens), ints(memory))


@given(WORDS, WORDS)
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_prefix(ints(a), ints(b)) == n


PIECES = st.lists(st.binary(max_size=4), max_size=12)


@given(PIECES)
def test_streamed_text_equals_decoding_all_bytes_at_once(pieces: list[bytes]) -> None:
    stream = TextStream()
    text = "".join(map(stream.feed, pieces)) + stream.finish()
    assert text == b"".join(pieces).decode("utf-8", "replace")


@given(
    st.text("abcä", max_size=30),
    st.lists(st.text("abcä", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), max_size=40),
)
def test_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    stream, given_out, at = TextStream(stops), "", 0
    data = text.encode()
    for length in [*lengths, len(data)]:
        given_out += stream.feed(data[at : at + length])
        at += length
        for stop in stops:
            assert stop not in given_out
        if stream.stopped is not None:
            break
    given_out += stream.finish()
    found = [text.find(stop) for stop in stops if stop in text]
    assert (stream.stopped is not None) == bool(found)
    if not found:
        assert given_out == text
    else:
        # The first complete one ends it; another may have begun before it.
        assert text.startswith(given_out)
        assert text[len(given_out) :].startswith(stream.stopped or "")


def test_an_invalid_stop_raises() -> None:
    assert Stop.of("x", 10) == Stop(("x",))
    assert Stop.of(3, 10) == Stop((), frozenset([3]))
    assert Stop.of(["x", np.int64(3), "x"], 10) == Stop(("x",), frozenset([3]))
    assert Stop.of((), 10) == Stop()
    for wrong in ("", ["a", ""], 10, [-1]):
        with pytest.raises(ValueError, match="stop"):
            Stop.of(wrong, 10)
    assert Stop.of(None, 10) == Stop()
    for mistyped in (b"x", [b"x"], 1.5, [None], [True]):
        with pytest.raises(TypeError, match="stop"):
            Stop.of(mistyped, 10)  # type: ignore[arg-type]


def test_a_policy_takes_every_integer_and_nothing_else() -> None:
    policy = CheckpointPolicy(np.int64(5), np.uint8(3))  # type: ignore[arg-type]
    assert (policy.max_bytes, policy.spacing) == (5, 3)
    assert type(policy.spacing) is int
    for bad in (True, 1.5, "8"):
        with pytest.raises(TypeError, match="max_bytes must be an integer"):
            CheckpointPolicy(bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="spacing is -1: it must be at least 0") as caught:
        CheckpointPolicy(spacing=-1)
    assert (caught.value.what, caught.value.value, caught.value.limit) == ("spacing", -1, 0)


def test_checkpoints_that_are_cheap_to_recompute_leave_first() -> None:
    saved = {name: np.zeros(10, np.uint8) for name in "abcdvwxyz"}
    one, other = Checkpoints(), Checkpoints()
    for checkpoints, n, name in ((one, 50, "d"), (one, 20, "a"), (one, 25, "c"), (other, 12, "b")):
        checkpoints.add_state(n, saved[name])  # type: ignore[arg-type]
    one.windows = [WindowChunk(10 * i, 10, 10, saved[name]) for i, name in enumerate("vwxyz")]
    every = [other, one, one.up_to(45)]
    assert total_bytes(every) == 90, "what forks share counts once"
    order = ""
    while total_bytes(every):
        fit(every, total_bytes(every) - 1, n_swa=10)
        left = [id(one) for checkpoints in every for one in checkpoints]
        order += "".join(
            name for name in saved if name not in order and id(saved[name]) not in left
        )
    assert order == "vwxcaybdz"
