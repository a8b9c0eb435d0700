"""Which slot of a cache serves which prompt: the policy of Ollama's runner."""

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
from pykvcache.arrays.ollama._family import shared_functions
from pykvcache.arrays.ollama.protocol import Cache
from pykvcache.errors import (
    CacheOrderError,
    CacheValueError,
    NoSlot,
    NotSupported,
    ReentryError,
    ReprocessInputs,
)
from pykvcache.errors._shown import shown

__all__ = ["CheckpointCache", "Input", "InputCache", "Slot"]


@dataclass(frozen=True)
class Input:
    """One input of a model: a token, or a part of an image.

    Parameters
    ----------
    token : int
    multimodal_hash : int
        What tells the images apart; two inputs are the same if token and hash are.
    same_batch : int
        How many inputs after this one must be in the same batch, and are discarded with it.

    Raises
    ------
    TypeError
        One of them is not an integer.
    CacheValueError
        `same_batch` is negative.
    """

    token: int
    multimodal_hash: int = 0
    same_batch: int = 0

    def __post_init__(self) -> None:
        # Plain integers are kept: others may overflow, or change later.
        set_field = object.__setattr__
        set_field(self, "token", as_int("token", self.token))
        set_field(self, "multimodal_hash", as_int("multimodal_hash", self.multimodal_hash))
        set_field(self, "same_batch", as_int("same_batch", self.same_batch, minimum=0))


@dataclass(eq=False)
class Slot:
    """A sequence of the cache, and what it holds.

    Attributes
    ----------
    id : int
        Sequence id in the cache.
    inputs : list of Input
        What the cache holds for it; the caller adds what it evaluates.
    in_use : bool
        Set by ``load_slot``; the caller clears it when done.
    last_used : float
        When ``load_slot`` last chose it, in seconds of ``time.monotonic``; 0 if never.
    """

    id: int
    inputs: list[Input] = field(default_factory=list)
    in_use: bool = False
    last_used: float = 0.0


@runtime_checkable
class CheckpointCache(Protocol):
    """A cache that can only be resumed where it took a checkpoint."""

    def prepare_restore(self, seq: int, pos: int) -> int | None:
        """Return the position at or below `pos` from which to go on, None if there is none."""
        ...


_SAME_BY = operator.attrgetter("token", "multimodal_hash")


def _common_prefix(a: Sequence[Input], b: Sequence[Input]) -> int:
    """Count the inputs at the start of `a` and `b` that are the same."""
    same = list(map(operator.eq, map(_SAME_BY, a), map(_SAME_BY, b)))
    return same.index(False) if False in same else len(same)


class InputCache:
    """Gives each prompt the slot whose contents save the most work.

    A single user's prompts go to the free slot with the longest common prefix, which keeps the
    footprint small. With several users, that slot is taken only if the prompt extends all of it;
    otherwise the prefix is forked into the slot that was not used for longest.

    It follows Ollama's ``ollamarunner.InputCache``, but that it raises `NoSlot` where all slots
    are in use (the original dereferences nil for several users), never writes to the caller's
    prompt (the original shifts inputs in it), and that an empty prompt is an error. Not safe for
    use by several threads without a lock.

    Parameters
    ----------
    cache : Cache or None
        Set up here; None for models that keep nothing, so that only the slots are managed.
    kv_size : int
        Number of tokens to make room for, over all slots.
    num_slots : int
        Number of sequences, at least 1.
    batch_size : int
        Largest batch; at most ``kv_size // num_slots``.
    multi_user : bool
        Which of the two ways to choose slots.
    dtype : dtype
        What K and V are stored as.

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
            raise CacheValueError(
                f"kv_size must be at least batch_size * num_slots "
                f"(kv_size: {size} batch_size: {batch} num_slots: {slots})",
                "kv_size",
                size,
                batch * slots,
            )
        if isinstance(dtype, str) and dtype in ("q8_0", "q4_0"):
            raise NotSupported(
                f"{dtype} has no NumPy dtype; QuantizedKVCache stores such codes", "dtype", dtype
            )
        if cache is not None:
            cache.init(dtype, slots, size // slots, batch)
        self._cache, self._num_ctx = cache, size // slots
        self._multi_user = bool(multi_user)
        self._slots = [Slot(i) for i in range(slots)]
        # While the cache acts, which may run code of the caller's.
        self._busy = False

    def __copy__(self) -> Any:
        # The default would share the cache and the slots, which count the same tokens twice.
        return copy.deepcopy(self, shared_functions(self._cache))

    def __getstate__(self) -> dict[str, Any]:
        self._check_idle()  # a copy would stay busy for ever
        return self.__dict__

    @property
    def cache(self) -> Cache | None:
        """The cache that the slots are sequences of."""
        return self._cache

    @property
    def num_ctx(self) -> int:
        """Number of inputs that a slot has room for."""
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
        """Choose a slot for a prompt, and drop from it what the prompt does not begin with.

        Parameters
        ----------
        prompt : sequence of Input
            Not changed.
        cache_prompt : bool
            False to evaluate all of the prompt anew.

        Returns
        -------
        slot : Slot
            In use from now on.
        rest : list of Input
            What is left to evaluate, at least one input.

        Raises
        ------
        CacheValueError
            `prompt` is empty.
        TypeError
            `prompt` holds something else than inputs.
        NoSlot
            No slot is free.
        ReentryError
            The cache is in the middle of another call of this one.
        """
        inputs = list(prompt)
        if not inputs:
            raise CacheValueError(
                "the prompt is empty; at least one input is needed", "prompt", 0, 1
            )
        if not all(isinstance(item, Input) for item in inputs):
            raise TypeError("a prompt holds Inputs")
        if not isinstance(cache_prompt, bool):
            raise TypeError(f"cache_prompt must be a bool, not {type(cache_prompt).__name__}")
        self._check_idle()
        self._busy = True
        try:
            return self._load(inputs, cache_prompt)
        finally:
            self._busy = False

    def _load(self, inputs: list[Input], cache_prompt: bool) -> tuple[Slot, list[Input]]:
        slot, past = self._best(inputs) if self._multi_user else self._longest(inputs)
        # One input is left to evaluate: its output is what comes next.
        past = self._resume(slot, inputs, min(past, len(inputs) - 1) if cache_prompt else 0)
        slot.in_use = True
        # A clock may tick more slowly than slots are loaded; their order must not be lost.
        newest = max(other.last_used for other in self._slots)
        slot.last_used = max(time.monotonic(), math.nextafter(newest, math.inf))
        return slot, inputs[past:]

    def _longest(self, prompt: list[Input]) -> tuple[Slot, int]:
        free = [slot for slot in self._slots if not slot.in_use]
        if not free:
            raise NoSlot(
                f"all {len(self._slots)} slots are in use",
                "slots",
                len(self._slots),
                len(self._slots),
            )
        lengths = [_common_prefix(slot.inputs, prompt) for slot in free]
        best = lengths.index(max(lengths))
        return free[best], lengths[best]

    def _best(self, prompt: list[Input]) -> tuple[Slot, int]:
        lengths = [_common_prefix(slot.inputs, prompt) for slot in self._slots]
        longest = max(lengths)
        source = self._slots[lengths.index(longest)]
        if longest == len(source.inputs) and not source.in_use:
            return source, longest
        free = [slot for slot in self._slots if not slot.in_use]
        if not free:
            raise NoSlot(
                f"all {len(self._slots)} slots are in use",
                "slots",
                len(self._slots),
                len(self._slots),
            )
        oldest = min(free, key=operator.attrgetter("last_used"))
        if longest > 0 and source is not oldest:
            # At no time does a slot list inputs that the cache does not hold.
            before, oldest.inputs = oldest.inputs, []
            try:
                if self._cache is not None:
                    self._cache.copy_prefix(source.id, oldest.id, longest)
            except CacheOrderError:
                # The source was left half changed; it is emptied when it is loaded itself.
                oldest.inputs = before
                return oldest, lengths[oldest.id]
            except Exception:
                oldest.inputs = before
                raise
            oldest.inputs = source.inputs[:longest]
        return oldest, longest

    def _resume(self, slot: Slot, inputs: list[Input], past: int) -> int:
        """Cut a slot to the first `past` of these inputs, or fewer; return how many are left."""
        cache = self._cache
        if cache is None:
            slot.inputs = inputs[:past]
            return past
        if past > 0 and isinstance(cache, CheckpointCache):
            past = cache.prepare_restore(slot.id, past) or 0
        elif past > 0 and not cache.can_resume(slot.id, past):
            past = 0
        # Before the cache is cut: no slot may list inputs that it does not hold.
        slot.inputs = inputs[:past]
        try:
            cache.remove(slot.id, past)
        except Exception:
            # Some caches cannot be cut, only emptied.
            slot.inputs, past = [], 0
            cache.remove(slot.id, 0)
        return past

    def shift_discard(self, inputs: Sequence[Input], keep: SupportsIndex) -> int:
        """Return how many inputs after the first `keep` to discard to make room.

        Half of what is not kept is to become free, at least one input. Inputs that must be in
        the same batch go together.

        Raises
        ------
        CacheValueError
            `keep` is negative.
        """
        kept = as_int("keep", keep, minimum=0)
        if not all(isinstance(item, Input) for item in inputs):
            raise TypeError("inputs must hold Inputs")
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
        """Discard the older half of a slot's inputs, but for the first `keep`.

        Raises
        ------
        CacheValueError
            `keep` is negative, or not below the context of a slot.
        ReprocessInputs
            The cache cannot shift. The slot is empty now; evaluate the error's ``inputs``.
        ReentryError
            The cache is in the middle of another call of this one.
        """
        if not isinstance(slot, Slot):
            raise TypeError(f"slot must be a Slot, not {type(slot).__name__}")
        kept = as_int("keep", keep, minimum=0)
        if kept >= self._num_ctx:
            raise CacheValueError(
                f"unable to shift context: keep exceeds it "
                f"(keep: {shown(kept)} context: {self._num_ctx})",
                "keep",
                kept,
                self._num_ctx - 1,
            )
        self._check_idle()
        discard = self.shift_discard(slot.inputs, kept)
        if discard <= 0:
            return
        rest = slot.inputs[:kept] + slot.inputs[kept + discard :]
        self._busy = True
        try:
            self._cut(slot, kept, kept + discard, rest)
        finally:
            self._busy = False

    def _cut(self, slot: Slot, begin: int, end: int, rest: list[Input]) -> None:
        if self._cache is not None:
            slot.inputs = slot.inputs[:begin]
            try:
                self._cache.remove(slot.id, begin, end)
            except Exception as error:
                slot.inputs = []
                self._cache.remove(slot.id, 0)
                raise ReprocessInputs(rest) from error
        slot.inputs = rest

    def _check_idle(self) -> None:
        """Refuse what code of the caller's asks for in the middle of a call."""
        if self._busy:
            raise ReentryError("the InputCache was called from within one of its own calls")
