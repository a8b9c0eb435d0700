"""Checks of the arguments of a `PrefixCache`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

import numpy as np

from pykvcache._arguments import IntArray, TokenInput, as_int, as_list
from pykvcache.context import LlamaContext
from pykvcache.errors import ArgumentError, UnsupportedOperation, shown
from pykvcache.prefix.stores import BlockStore
from pykvcache.sequence.sequence import LlamaSequence

__all__ = [
    "TierInput",
    "as_boundaries",
    "as_namespace",
    "as_seconds",
    "as_tiers",
    "as_tokens",
]

#: A folder, an address, or a store.
TierInput = str | os.PathLike[str] | BlockStore


def as_namespace(namespace: str) -> str:
    """Return a namespace; raise TypeError unless it is a string."""
    if not isinstance(namespace, str):
        raise TypeError(f"namespace must be a str, not {type(namespace).__name__}")
    return namespace if type(namespace) is str else str.__str__(namespace)


def as_tokens(context: LlamaContext, tokens: str | TokenInput) -> IntArray:
    """Return the tokens of a prompt; raise TypeError for None, otherwise as `LlamaSequence`."""
    if tokens is None:
        raise TypeError("tokens must be text or token ids, not None")
    return LlamaSequence(context, tokens).tokens


def as_boundaries(boundaries: Iterable[SupportsIndex], n: int) -> tuple[int, ...]:
    """Return sorted, distinct numbers of tokens in [0, n]."""
    if isinstance(boundaries, str | bytes) or not isinstance(boundaries, Iterable):
        raise TypeError(f"boundaries must be a list of integers, not {type(boundaries).__name__}")
    return tuple(sorted({as_int(at, "a boundary", 0, n) for at in boundaries}))


def as_seconds(value: float, name: str, most: float = math.inf) -> float:
    """Return a time in [0, most]; raise TypeError or ValueError otherwise, and for NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value <= most:
        raise ArgumentError(
            f"{name} is {shown(value)}: it must be in [0, {most}]", name, value, most
        )
    return math.inf if value > sys.float_info.max else float(value)


def as_tiers(tiers: Sequence[TierInput], *, can_check: bool) -> list[TierInput]:
    """Return the tiers as a list; raise TypeError if they are not in a list.

    Raises `UnsupportedOperation` for any tier if records cannot be checked (``can_check``).
    """
    if isinstance(tiers, str | os.PathLike | BlockStore | np.ndarray):
        raise TypeError(f"tiers must be a list of stores, not a {type(tiers).__name__}")
    stores = as_list(tiers, "tiers", "stores")
    if stores and not can_check:
        raise UnsupportedOperation(
            "PrefixCache",
            "it has no tiers for this model: the layout of its states is unknown, so records from "
            "a tier could not be checked. Leave out tiers=",
            "memory",
        )
    return stores
