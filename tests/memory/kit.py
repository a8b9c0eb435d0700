"""Helpers of the memory tests: the kinds of memories, and a bench for one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache import LlamaContext, LlamaModel
from support.models import EVERY_MODEL, MODELS, RIGHT, ModelInfo, usual

Logits = NDArray[np.float32]
Tokens = NDArray[np.int32]
#: Of the fixture `make_context`.
Make = Callable[..., LlamaContext]
#: Of the fixture `fresh_logits`.
Fresh = Callable[..., Logits]
#: Of the fixture `model`.
Load = Callable[..., LlamaModel]

NAMES = (
    "llama",
    "llama3l",
    "gemma3",
    "qwen2vl",
    "mamba",
    "mamba2",
    "jamba",
    "granitehybrid",
    "granite_nope",
    "lfm2",
    "lfm2_swa",
    "t5",
    "step35",
    "deepseek32",
    "dots3note",
    "minimax_m3",
    "deepseek4",
    "qwen4exp",
    "glm5_next",
)
"""One model per memory and architecture; the others differ in their vocabulary or head size."""


@cache
def _n_vocab(name: str) -> int:
    # Some vocabularies take long to write down.
    return MODELS[name].n_vocab


@dataclass(frozen=True)
class Case:
    """A model with the options that change how its memory works."""

    name: str
    unified: bool = True
    swa_full: bool = True

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return MODELS[self.name]

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return _n_vocab(self.name)

    @property
    def tolerance(self) -> float:
        """Tolerance of logits against a fresh run."""
        # A GELU is a table over f16 values: the last bit of an f32 sum may choose another
        # entry. That is rare and makes up to 3.5e-3; anything wrong makes 0.05 and more.
        return 10 * RIGHT if self.name in ("bert", "gemma3", "t5") else RIGHT

    @property
    def has_states(self) -> bool:
        """Whether its sequences have states."""
        return self.info.has_states

    @property
    def options(self) -> dict[str, Any]:
        """For `make_context`."""
        options: dict[str, Any] = {"kv_unified": self.unified, "swa_full": self.swa_full}
        if not self.swa_full:
            # Otherwise the window's cache is as large as the context, and drops nothing.
            options |= {"n_ctx": 2048, "n_ubatch": 32}
        elif not self.unified:
            options |= {"n_ctx": 1024}
        return options

    def __str__(self) -> str:
        parts = [self.name, "unified" if self.unified else "streams"]
        return "-".join(parts if self.swa_full else [*parts, "window"])


EVERY_CASE = tuple(
    Case(name, unified, swa_full)
    for name in usual(NAMES)
    for unified in (True, False)
    if (MODELS[name].can_unify if unified else MODELS[name].can_stream)
    for swa_full in (True, False)
    if swa_full or MODELS[name].n_swa
)
"""Every kind of memory in every mode, for random programs and oracles."""

_EXAMPLES = (
    *("llama-unified", "llama-streams", "gemma3-unified-window", "gemma3-streams"),
    *("qwen2vl-unified", "mamba-unified", "jamba-streams", "lfm2_swa-unified-window"),
    *("t5-unified", "deepseek4-streams"),
)

CASES = tuple(case for case in EVERY_CASE if EVERY_MODEL or str(case) in _EXAMPLES)
"""The kinds of memory, for examples: in `make test` most of them in one mode."""

KINDS = tuple(
    case
    for case in CASES
    if str(case) in ("llama-streams", "gemma3-unified-window", "mamba-unified", "jamba-streams")
)
"""One of each kind, for refusals that do not depend on the model."""

EVERY_SERVED = tuple(case for case in EVERY_CASE if case.info.can_cache)
SERVED = tuple(case for case in CASES if case.info.can_cache)
"""Those of which a `PrefixCache` can keep something."""

PARTIAL = tuple(case for case in CASES if case.info.can_remove_partial)
"""Those of which parts of a sequence can be removed."""

WHOLE_ONLY = tuple(case for case in CASES if not case.info.can_remove_partial)
"""Those that fold their past into a state, or keep more than cells: whole sequences only."""

SHIFTABLE = tuple(case for case in CASES if case.info.can_shift and case.swa_full)
"""Those whose sequences can be shifted."""


def words(seed: int, n: int) -> list[int]:
    """Return ordinary tokens of every test model."""
    found: list[int] = np.random.default_rng(seed).integers(5, 56, n).tolist()
    return found


def apart(a: NDArray[np.floating[Any]], b: NDArray[np.floating[Any]]) -> float:
    """Largest difference between two rows of logits; a NaN counts as infinite."""
    worst = float(np.abs(a - b).max())
    return worst if worst == worst else float("inf")


def cleared_runs(ctx: LlamaContext) -> Callable[[list[int]], Logits]:
    """Return what gives the logits after tokens, of a context that is cleared before each run."""
    known: dict[tuple[int, ...], Logits] = {}

    def run(tokens: list[int]) -> Logits:
        key = tuple(tokens)
        if key not in known:
            ctx.clear_kv_cache()
            assert not ctx.sequences()
            ctx.decode(tokens)
            known[key] = ctx.logits()
        return known[key]

    return run


class Bench:
    """A context, and what each of its sequences ought to hold, by plain lists.

    `held` maps a sequence to its tokens; the first lies at `start` (0 unless shifted). Tests
    change the context through `ctx` and `held` by hand, so that nothing here repeats the rules.
    """

    def __init__(
        self, case: Case, ctx: LlamaContext, fresh: Callable[..., Logits], seed: int = 0
    ) -> None:
        self.case = case
        self.ctx = ctx
        self.held: dict[int, list[int]] = {}
        self.start: dict[int, int] = {}
        self._fresh = fresh
        self._rng = np.random.default_rng(seed)

    def prompt(self, n: int) -> Tokens:
        """Return n new random tokens."""
        return self._rng.integers(5, self.case.n_vocab - 2, n, dtype=np.int32)

    def feed(self, seq: int, n: int) -> Tokens:
        """Decode n new tokens into a sequence."""
        tokens = self.prompt(n)
        self.ctx.decode(tokens, seq_id=seq)
        self.held.setdefault(seq, []).extend(tokens.tolist())
        return tokens

    def with_two(self) -> Bench:
        """Decode 20 tokens into sequence 0 and 12 into sequence 1."""
        self.feed(0, 20)
        self.feed(1, 12)
        return self

    def fresh(self, tokens: Iterable[int]) -> Logits:
        """Logits of a new context that has seen these tokens."""
        return self._fresh(self.case.name, list(tokens))

    def positions(self) -> None:
        """Check that every sequence reports its expected positions."""
        for seq in range(self.ctx.n_seq_max):
            n, first = len(self.held.get(seq, [])), self.start.get(seq, 0)
            last = first + n - 1 if n else -1
            assert self.ctx.kv_cache_seq_pos_max(seq) == last, f"highest of sequence {seq}"
            lowest = self.ctx.kv_cache_seq_pos_min(seq)
            if n and (self.case.info.n_swa or not self.case.info.can_remove_partial):
                # A window or a state holds less than the sequence means.
                assert first <= lowest <= last, f"lowest of sequence {seq}"
            else:
                assert lowest == (first if n else -1), f"lowest of sequence {seq}"
        self._cells()

    def _cells(self) -> None:
        """Check that the attention cells match the sequences, each at its own position."""
        filled = {seq: tokens for seq, tokens in self.held.items() if tokens}
        assert set(self.ctx.sequences()) == set(filled)
        if self.case.info.memory == "recurrent":
            return
        table = self.ctx.cells("attention")
        assert table.members.any(axis=1).all(), "a cell is used that no sequence holds"
        assert len(table) == self.ctx.n_cells_used
        for seq, tokens in filled.items():
            first = self.start.get(seq, 0)
            pos = sorted(table.pos[table.members[:, seq]].tolist())
            assert pos == [*range(first, first + len(tokens))], f"cells of sequence {seq}: {pos}"

    def check(self, *seqs: int, n: int = 1) -> None:
        """Positions are true, and n more tokens of each sequence get the logits of a fresh run."""
        self.positions()
        for seq in seqs or sorted(self.held):
            if not self.held[seq]:
                continue
            for _ in range(n):
                self.feed(seq, 1)
                difference = apart(self.ctx.logits(), self.fresh(self.held[seq]))
                assert difference < self.case.tolerance, f"sequence {seq} is {difference:.3g} off"
        self.positions()
