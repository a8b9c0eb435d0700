"""InputCache: the slot policy of Ollama's runner, which assigns prompts to slots."""

from __future__ import annotations

import copy
import math
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from pykvcache.arrays._checks import MOST, as_int
from pykvcache.arrays.ollama.cache import Cache
from pykvcache.errors import CacheValueError, NoSlot, NotSupported, ReprocessInputs, shown

__all__ = ["CheckpointCache", "Input", "InputCache", "Slot"]


@dataclass(frozen=True)
class Input:
    """One input of a model: a token, or a part of an image.

    Parameters
    ----------
    token : int
    multimodal_hash : int
        Hash of the image; inputs are equal if token and hash are.
    same_batch : int
        Number of following inputs that must be in the same batch, and are discarded together.
    """

    token: int
    multimodal_hash: int = 0
    same_batch: int = 0

    def __post_init__(self) -> None:
        # Plain ints cannot overflow or change.
        set_field = object.__setattr__
        set_field(self, "token", as_int("token", self.token))
        set_field(self, "multimodal_hash", as_int("multimodal_hash", self.multimodal_hash))
        set_field(self, "same_batch", as_int("same_batch", self.same_batch, minimum=0))


@dataclass(eq=False)
class Slot:
    """A sequence of the cache, and its inputs.

    Attributes
    ----------
    id : int
        Sequence id in the cache.
    inputs : list of Input
        The inputs in the cache; the caller appends evaluated ones.
    in_use : bool
        Set by ``load_slot``; the caller clears it when done.
    last_used : float
        Time of its last ``load_slot``, in seconds of ``time.monotonic``; 0 if never.
    """

    id: int
    inputs: list[Input] = field(default_factory=list)
    in_use: bool = False
    last_used: float = 0.0


@runtime_checkable
class CheckpointCache(Protocol):
    """A cache that can be resumed only at checkpoints."""

    def prepare_restore(self, seq: int, pos: int) -> int | None:
        """Return the position at or below `pos` from which to continue, or None."""
        ...


class InputCache:
    """Assigns each prompt the slot with the most reusable contents.

    A single user's prompts go to the free slot with the longest common prefix, which keeps the
    footprint small. With several users, that slot is used only if the prompt extends all of it;
    otherwise the prefix is forked into the least recently used slot.

    Modelled on Ollama's ``ollamarunner.InputCache``. It raises `NoSlot` if all slots are in use,
    and never changes the caller's prompt. Not thread-safe.

    Parameters
    ----------
    cache : Cache or None
        Set up by the constructor; None manages slots only, for models without a cache.
    kv_size : int
        Number of tokens to reserve room for, over all slots.
    num_slots : int
        Number of sequences, at least 1.
    batch_size : int
        Largest batch; at most ``kv_size // num_slots``.
    multi_user : bool
        Policy for choosing slots; see above.
    dtype : dtype
        Dtype of the stored K and V.

    Raises
    ------
    CacheValueError
        A number is below 1, or the context of a slot is smaller than a batch.
    NotSupported
        `dtype` is one of llama.cpp's quantised types, which NumPy lacks.
    """

    def __init__(
        self,
        cache: Cache | None,
        kv_size: SupportsIndex,
        num_slots: SupportsIndex,
        batch_size: SupportsIndex,
        multi_user: bool = False,
        dtype: DTypeLike = np.float16,
    ) -> None:
        if cache is not None and not isinstance(cache, Cache):
            raise TypeError(f"a cache is needed, not {type(cache).__name__}")
        slots = as_int("num_slots", num_slots, minimum=1, maximum=MOST)
        size = as_int("kv_size", kv_size, minimum=1, maximum=MOST)
        batch = as_int("batch_size", batch_size, minimum=1, maximum=MOST)
        if size // slots < batch:
            message = (
                f"kv_size must be at least batch_size * num_slots "
                f"(kv_size: {size} batch_size: {batch} num_slots: {slots})"
            )
            raise CacheValueError(message, "kv_size", size, batch * slots)
        if isinstance(dtype, str) and dtype in ("q8_0", "q4_0"):
            message = f"{dtype} has no NumPy dtype; QuantizedKVCache stores such codes"
            raise NotSupported(message, "dtype", dtype)
        if cache is not None:
            cache.init(dtype, slots, size // slots, batch)
        self._cache, self._num_ctx = cache, size // slots
        self._multi_user = bool(multi_user)
        self._slots = [Slot(i) for i in range(slots)]

    def __copy__(self) -> Any:
        # A shallow copy would share cache and slots.
        return copy.deepcopy(self)

    @property
    def cache(self) -> Cache | None:
        """The cache whose sequences are the slots."""
        return self._cache

    @property
    def num_ctx(self) -> int:
        """Capacity of a slot in inputs."""
        return self._num_ctx

    @property
    def slots(self) -> list[Slot]:
        """The slots, by id."""
        return self._slots

    def close(self) -> None:
        """Close the cache."""
        if self._cache is not None:
            self._cache.close()

    def load_slot(
        self, prompt: Sequence[Input], cache_prompt: bool = True
    ) -> tuple[Slot, list[Input]]:
        """Choose a slot for a prompt, and truncate it to the common prefix.

        Parameters
        ----------
        prompt : sequence of Input
            Not changed.
        cache_prompt : bool
            False to evaluate the whole prompt again.

        Returns
        -------
        slot : Slot
            The slot, now in use.
        rest : list of Input
            The inputs left to evaluate, at least one.

        Raises
        ------
        CacheValueError
            `prompt` is empty.
        NoSlot
            No slot is free.
        """
        inputs = list(prompt)
        if not inputs:
            message = "the prompt is empty; at least one input is needed"
            raise CacheValueError(message, "prompt", 0, 1)
        if not all(isinstance(item, Input) for item in inputs):
            raise TypeError("a prompt must hold only Input objects")
        if not isinstance(cache_prompt, bool):
            raise TypeError(f"cache_prompt must be a bool, not {type(cache_prompt).__name__}")
        free = [slot for slot in self._slots if not slot.in_use]
        if not free:
            count = len(self._slots)
            raise NoSlot(f"all {count} slots are in use", "slots", count, count)
        slot, past = self._best(inputs, free) if self._multi_user else _longest(inputs, free)
        # Leave at least one input to evaluate, for its output.
        past = self._resume(slot, inputs, min(past, len(inputs) - 1) if cache_prompt else 0)
        slot.in_use = True
        # Keep the order of loads even if a slow clock does not tick between them.
        newest = max(other.last_used for other in self._slots)
        slot.last_used = max(time.monotonic(), math.nextafter(newest, math.inf))
        return slot, inputs[past:]

    def _best(self, prompt: list[Input], free: list[Slot]) -> tuple[Slot, int]:
        """Return a slot that the prompt extends, or the oldest one with a forked prefix."""
        source, longest = _longest(prompt, self._slots)
        if longest == len(source.inputs) and not source.in_use:
            return source, longest
        oldest = min(free, key=operator.attrgetter("last_used"))
        if longest > 0 and source is not oldest:
            if self._cache is not None:
                self._cache.copy_prefix(source.id, oldest.id, longest)
            oldest.inputs = source.inputs[:longest]
        return oldest, longest

    def _resume(self, slot: Slot, inputs: list[Input], past: int) -> int:
        """Truncate a slot to the first `past` inputs or fewer; return the number left."""
        cache = self._cache
        if cache is not None:
            if past > 0 and isinstance(cache, CheckpointCache):
                past = cache.prepare_restore(slot.id, past) or 0
            elif past > 0 and not cache.can_resume(slot.id, past):
                past = 0
            try:
                cache.remove(slot.id, past)
            except Exception:
                # Some caches cannot be truncated, only emptied.
                past = 0
                cache.remove(slot.id, 0)
        slot.inputs = inputs[:past]
        return past

    def shift_discard(self, inputs: Sequence[Input], keep: SupportsIndex) -> int:
        """Return how many inputs after the first `keep` to discard to make room.

        This frees half of the room after the kept inputs, at least one input. Inputs that must be
        in the same batch are discarded together.
        """
        kept = as_int("keep", keep, minimum=0)
        if not all(isinstance(item, Input) for item in inputs):
            raise TypeError("inputs must hold only Input objects")
        wanted = max((self._num_ctx - kept) // 2, 1) - (self._num_ctx - len(inputs))
        discard = group_end = 0
        for item in inputs[kept:]:
            if discard >= max(wanted, group_end):
                break
            discard += 1
            if item.same_batch > 0:
                group_end = max(group_end, discard + item.same_batch)
        return discard

    def shift_slot(self, slot: Slot, keep: SupportsIndex) -> None:
        """Discard the older half of a slot's inputs, except the first `keep`.

        Raises
        ------
        CacheValueError
            `keep` is negative, or not below the context of a slot.
        ReprocessInputs
            The cache cannot shift. The slot is empty now; evaluate the error's ``inputs``.
        """
        if not isinstance(slot, Slot):
            raise TypeError(f"slot must be a Slot, not {type(slot).__name__}")
        kept = as_int("keep", keep, minimum=0)
        if kept >= self._num_ctx:
            message = (
                f"unable to shift context: keep exceeds it "
                f"(keep: {shown(kept)} context: {self._num_ctx})"
            )
            raise CacheValueError(message, "keep", kept, self._num_ctx - 1)
        discard = self.shift_discard(slot.inputs, kept)
        if discard <= 0:
            return
        rest = slot.inputs[:kept] + slot.inputs[kept + discard :]
        if self._cache is not None:
            try:
                self._cache.remove(slot.id, kept, kept + discard)
            except Exception as error:
                slot.inputs = []
                self._cache.remove(slot.id, 0)
                raise ReprocessInputs(rest) from error
        slot.inputs = rest


_SAME_BY = operator.attrgetter("token", "multimodal_hash")


def _common_prefix(a: Sequence[Input], b: Sequence[Input]) -> int:
    """Count the inputs at the start of `a` and `b` that are the same."""
    same = list(map(operator.eq, map(_SAME_BY, a), map(_SAME_BY, b)))
    return same.index(False) if False in same else len(same)


def _longest(prompt: list[Input], slots: list[Slot]) -> tuple[Slot, int]:
    """Return the first slot with the longest common prefix, and its length."""
    lengths = [_common_prefix(slot.inputs, prompt) for slot in slots]
    best = lengths.index(max(lengths))
    return slots[best], lengths[best]
