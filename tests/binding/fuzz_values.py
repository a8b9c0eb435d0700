"""Arguments for the survival fuzz: the wrong and the extreme."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

MAX = 2**31 - 1


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class BadIndex:
    def __index__(self) -> Any:
        return "no integer"


class CallersOwn(Exception):
    """Of the caller's object: must be raised unchanged."""


class Raises:
    def __index__(self) -> int:
        raise CallersOwn("no index today")

    def __len__(self) -> int:
        raise CallersOwn("no length today")

    def __repr__(self) -> str:
        raise CallersOwn("no text today")

    def __iter__(self) -> Any:
        raise CallersOwn("no elements today")


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


INTEGERS: list[Any] = [
    *(0, 1, 2, 3, 4, -1, -2, 5, 19, 20, 255, 256, 257, 319, 320, 511, 512, 10_000),
    *(MAX, MAX - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, 2**32 + 1),
    *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, -(10**40)),
    *(10**5000, -(10**5000)),  # Python writes no more than 4,300 digits
    *(np.int8(-1), np.uint8(255), np.int64(3), np.uint64(2**64 - 1), np.int32(MAX)),
    *(Index(0), Index(3), Index(-1), Index(2**40)),
]

OTHERS: list[Any] = [
    *(None, True, False, 1.0, -0.5, 1e300, float("nan"), float("inf"), -float("inf"), 1j),
    *("", "a", "0", "\0", "\ud800", "f16", "auto", b"", b"\xff\0", bytearray(b"ab")),
    *(memoryview(b"a"), "x" * 100_000, [], [1], [[1]], [None], [1.5], [True], [2**40], ()),
    *((0, 1), {}, {1: 2}, {5}, range(3), [0] * 300),
    *(np.bool_(True), np.float32("nan"), np.str_("a"), decimal.Decimal(1), object(), object, len),
    *(NotImplemented, Ellipsis, BadIndex(), Raises(), Index, iter([1, 2]), slice(1)),
]

ARRAYS: list[Callable[[], Any]] = [
    lambda: np.zeros(0, np.int32),
    lambda: np.arange(5, 12, dtype=np.int32),
    lambda: np.arange(5, 25, dtype=np.int64)[::3],
    lambda: np.arange(5, 25, dtype=np.int32)[::-1],
    lambda: np.arange(6).reshape(2, 3),
    lambda: np.zeros((0, 3), np.int32),
    lambda: np.zeros((3, 0), np.int32),
    lambda: np.zeros((2, 2, 2), np.int32),
    lambda: np.array(5),
    lambda: np.full(3, MAX, np.int32),
    lambda: np.full(3, -1, np.int32),
    lambda: np.full(3, -(2**31), np.int32),
    lambda: np.array([2**63], np.uint64),
    lambda: np.array([2**40, 1]),
    lambda: np.arange(5, 9).astype(">i4"),
    lambda: read_only(np.arange(5, 9, dtype=np.int32)),
    lambda: np.broadcast_to(np.int32(7), 1000),
    lambda: np.full(300, 7, np.int32),
    lambda: np.full(100_000, 7, np.int32),
    lambda: np.zeros(3),
    lambda: np.array([np.nan, 1.0]),
    lambda: np.zeros(3, bool),
    lambda: np.ones((3, 2), np.int8),
    lambda: np.array(["a", "b"]),
    lambda: np.array([1, None]),
    lambda: np.array([1, 2], "M8[s]"),
    lambda: np.zeros(2, [("a", "i4")]),
    lambda: np.ma.masked_array([5, 6, 7], [0, 1, 0]),
    lambda: np.asmatrix([[5, 6]]),
]


def hostile(rng: Random, objects: list[Any]) -> Any:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(INTEGERS)
    if kind < 0.7:
        return rng.choice(OTHERS)
    if kind < 0.9 or not objects:
        return rng.choice(ARRAYS)()
    return rng.choice(objects)
