"""The steps of random programs over four sequences, on a context and the reference at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, precondition, rule

from memory.kit import apart
from memory.program_base import N_SEQ, ProgramBase
from memory.reference import DONE, END, REFUSED, UNSUPPORTED, Saved, Verdict
from pykvcache import LlamaBatch
from pykvcache.kv import SequenceKV
from support.ledger import Cells

SEQ = st.integers(0, N_SEQ - 1)


class Edge(NamedTuple):
    """An end of a range: a number of eighths of a sequence's length, plus an offset."""

    eighths: int
    offset: int = 0


OPEN, ZERO, PAST = None, 0, END
LOW, TOP = Edge(0), Edge(8)
EDGES = [Edge(eighths, offset) for eighths in range(9) for offset in (0, -1, 1)]
RANGES = [
    *[(low, top) for low in (OPEN, ZERO, LOW) for top in (OPEN, PAST, TOP)],
    *[(edge, top) for edge in EDGES for top in (OPEN, TOP)],
    *[(low, edge) for edge in EDGES for low in (ZERO, LOW)],
    *[(edge, Edge(eighths)) for edge in EDGES for eighths in range(1, 9)],
]
"""Everything, tails, heads, middles; a few are empty, or lie beyond what is held."""
RANGE = st.one_of(st.sampled_from(RANGES[:9]), st.sampled_from(RANGES))
Range = tuple[Any, Any]


class Program(ProgramBase):
    """Every operation on the memory as a rule."""

    saved: Bundle[tuple[SequenceKV, Saved]] = Bundle("saved")
    taken: Bundle[tuple[Any, Saved]] = Bundle("taken")
    taken_all: Bundle[tuple[Any, ...]] = Bundle("taken_all")

    def at(self, seq: int, edge: Edge | int | None) -> int | None:
        """The position that an edge means for a sequence."""
        if not isinstance(edge, Edge):
            return edge
        held = self.ref.positions(seq)
        low, end = (held[0], held[-1] + 1) if held else (0, 0)
        return max(0, low + (end - low) * edge.eighths // 8 + edge.offset)

    def ends(self, seq: int, span: Range) -> tuple[int | None, int | None]:
        return self.at(seq, span[0]), self.at(seq, span[1])

    # Decode --------------------------------------------------------------------------

    @initialize(lengths=st.tuples(*[st.sampled_from([20, 0, 1, 33])] * 2))
    def begin(self, lengths: tuple[int, int]) -> None:
        for seq, n in enumerate(lengths):
            if n:
                self.append(seq, n)

    @rule(seq=SEQ, n=st.sampled_from([1, 2, 5, 9, 15, 25, 32]))
    def decode(self, seq: int, n: int) -> None:
        self.append(seq, n)

    @rule(seq=SEQ)
    def decode_one(self, seq: int) -> None:
        self.append(seq, 1)

    @precondition(lambda self: not self.case.swa_full)
    @rule(seq=SEQ)
    def decode_past_the_window(self, seq: int) -> None:
        """So that the cells of the window are reused."""
        for part in range(5):
            # A fresh run over each of them would be two thirds of what the whole program costs.
            self.append(seq, 32, is_compared=part == 4)

    def append(self, seq: int, n: int, *, is_compared: bool = True) -> None:
        tokens = self.words(n)
        first = max(self.ref.positions(seq), default=-1) + 1
        if self.do("decode", self.ref.decode(seq, tokens), tokens, seq_id=seq):
            if is_compared or self.ledger is not None:
                self.compare_logits(seq, tokens, -1)
        else:
            rows = [(i, seq) for i in range(n)]
            self.keep_what_stayed(rows, {seq: tokens}, {seq: first})

    @rule(lengths=st.tuples(*[st.sampled_from([1, 0, 2, 7])] * N_SEQ), in_turns=st.booleans())
    def decode_batch(self, lengths: tuple[int, ...], in_turns: bool) -> None:
        """Tokens of several sequences in one call."""
        words = {seq: self.words(n) for seq, n in enumerate(lengths) if n}
        first = {seq: max(self.ref.positions(seq), default=-1) + 1 for seq in words}
        rows = [(i, seq) for seq in words for i in range(len(words[seq]))]
        if in_turns:
            rows.sort()
        batch = LlamaBatch()
        for i, seq in rows:
            batch.add(words[seq][i], first[seq] + i, seq, logits=i == len(words[seq]) - 1)
        if self.do("decode", self.ref.decode_batch(words), batch):
            for seq in words:
                self.compare_logits(seq, words[seq], rows.index((len(words[seq]) - 1, seq)))
        else:
            self.keep_what_stayed(rows, words, first)

    @precondition(lambda self: self.case.info.has_memory)
    @rule(seqs=st.permutations(range(N_SEQ)), n_seqs=st.integers(2, 3), n=st.integers(1, 3))
    def decode_coupled(self, seqs: list[int], n_seqs: int, n: int) -> None:
        """Tokens that belong to several sequences at once."""
        seqs, tokens = seqs[:n_seqs], self.words(n)
        first = max(self.ref.positions(seqs[0]), default=-1) + 1
        batch = LlamaBatch()
        for i, token in enumerate(tokens):
            batch.add(token, first + i, seqs, logits=i == n - 1)
        if self.do("decode", self.ref.decode_coupled(seqs, tokens), batch):
            for seq in seqs:
                self.compare_logits(seq, tokens, -1)

    # Copy ----------------------------------------------------------------------------

    @rule(src=SEQ, dst=SEQ, span=RANGE)
    def copy(self, src: int, dst: int, span: Range) -> None:
        p0, p1 = self.ends(src, span)
        verdict = self.ref.copy(src, dst, *plain(p0, p1))
        if self.do("copy_kv_cache_seq", verdict, src, dst, p0, p1) and self.ledger:
            self.ledger.copy(src, dst, *plain(p0, p1))

    @rule(src=SEQ, dst=SEQ, edge=st.sampled_from(EDGES), name=st.sampled_from(["", "_prefix"]))
    def copy_beginning(self, src: int, dst: int, edge: Edge, name: str) -> None:
        n = self.at(src, edge)
        assert n is not None
        if name and (src == dst or n == 0):
            # To itself it keeps the beginning; a beginning of nothing empties.
            removal = self.ref.remove([dst], n, END)
            allowed = {UNSUPPORTED if o == REFUSED else o for o in removal.allowed}
            verdict = Verdict(frozenset(allowed), removal.effect)
            if self.do("copy_prefix", verdict, src, dst, n) and self.ledger:
                self.ledger.remove(dst, n)
        else:
            verdict = self.ref.copy(src, dst, 0, n)
            method = "copy_prefix" if name else "copy_cache"
            if self.do(method, verdict, src, dst, n) and self.ledger:
                self.ledger.copy(src, dst, 0, n)

    # Remove --------------------------------------------------------------------------

    @rule(seq=SEQ, span=RANGE)
    def clear(self, seq: int, span: Range) -> None:
        p0, p1 = self.ends(seq, span)
        verdict = self.ref.remove([seq], *plain(p0, p1))
        if self.do("clear_kv_cache_seq", verdict, seq, p0, p1) and self.ledger:
            self.ledger.remove(seq, *plain(p0, p1))

    @rule(seq=SEQ, how=st.sampled_from(["some", "keep", "everything"]), span=RANGE)
    def forget(self, seq: int, how: str, span: Range) -> None:
        """Operations on several sequences at once."""
        ledger = self.ledger
        if how == "keep":
            self.do("kv_cache_seq_keep", self.ref.keep(seq), seq)
            if ledger:
                ledger.keep(seq)
        elif how == "everything":
            self.do("clear_kv_cache", self.ref.clear())
            if ledger:
                ledger.clear()
        else:
            p0, p1 = self.ends(seq, span)
            verdict = self.ref.remove([*range(N_SEQ)], *plain(p0, p1))
            if self.do("clear_kv_cache_seq", verdict, None, p0, p1) and ledger:
                for each in range(N_SEQ):
                    ledger.remove(each, *plain(p0, p1))

    @rule(seq=SEQ, span=RANGE)
    def remove(self, seq: int, span: Range) -> None:
        """Remove and close the gap, or nothing of it."""
        begin, end = self.ends(seq, span)
        a, b = plain(begin, end)
        verdict = self.ref.remove_and_close(seq, a, b)
        moves = bool(self.ref.within(seq, b, END))
        if self.do("remove", verdict, seq, a, end) and self.ledger and a < b:
            self.ledger.remove(seq, a, b)
            if moves:
                self.ledger.add(seq, b, END, a - b)

    @rule(seq=SEQ, edge=st.sampled_from([ZERO, *EDGES]))
    def resume(self, seq: int, edge: Edge | int) -> None:
        """`can_resume` and what a removal then does are the same."""
        pos = self.at(seq, edge)
        assert pos is not None
        allowed = self.ref.resume(seq, pos)
        asked = Verdict(frozenset({DONE, REFUSED}), lambda: None)
        answer = self.do("can_resume", asked, seq, pos)
        assert answer in allowed, f"can_resume({seq}, {pos}) is {answer}"
        if answer and pos > 0:
            verdict = self.ref.remove([seq], pos, END)
            only_done = Verdict(frozenset({DONE}), verdict.effect)
            self.do("clear_kv_cache_seq", only_done, seq, pos, None)
            if self.ledger:
                self.ledger.remove(seq, pos)
            self.append(seq, 1)

    # Move ----------------------------------------------------------------------------

    @rule(seq=SEQ, span=RANGE, delta=st.sampled_from([1, 0, 2, 7, 40, -1, -3, -20]))
    def add(self, seq: int, span: Range, delta: int) -> None:
        p0, p1 = self.ends(seq, span)
        verdict = self.ref.add(seq, *plain(p0, p1), delta)
        if self.do("kv_cache_seq_add", verdict, seq, p0, p1, delta) and self.ledger:
            self.ledger.add(seq, *plain(p0, p1), delta)

    @rule(seq=SEQ, span=RANGE, d=st.sampled_from([2, 1, 3, 9]))
    def div(self, seq: int, span: Range, d: int) -> None:
        p0, p1 = self.ends(seq, span)
        verdict = self.ref.div(seq, *plain(p0, p1), d)
        if self.do("kv_cache_seq_div", verdict, seq, p0, p1, d) and self.ledger:
            self.ledger.div(seq, *plain(p0, p1), d)

    @rule()
    def update(self) -> None:
        self.do("kv_cache_update", Verdict(frozenset({DONE}), lambda: None))

    # Out and in ----------------------------------------------------------------------

    @rule(target=saved, seq=SEQ)
    def read(self, seq: int) -> tuple[SequenceKV, Saved]:
        """Read keys and values, and compare them with the ledger."""
        if not self.do("kv", self.ref.read(), seq):
            return SequenceKV(np.empty(0, np.int32), []), self.ref.save(seq, None)
        arrays: SequenceKV = self.result
        held = self.ref.positions(seq)
        if self.case.info.memory != "recurrent":
            assert arrays.positions.tolist() == held
        if arrays.recurrent is not None:
            assert arrays.recurrent.position == max(held, default=-1)
        cells = self.ledger.cells(seq) if self.ledger else None
        for part in (arrays, arrays.window) if cells else ():
            if part is not None:
                self.compare_arrays(cells, part)
        return arrays, self.ref.save(seq, cells)

    def compare_arrays(self, cells: Cells, arrays: SequenceKV) -> None:
        """Check keys and values against the ledger; a window may have fewer."""
        assert self.ledger is not None
        order = np.argsort(cells.pos)
        order = order[np.isin(cells.pos[order], arrays.positions)]
        unique = len(set(cells.pos.tolist())) == len(cells.pos)
        for layer in arrays.layers if unique and len(arrays) else ():
            keys = cells.k[layer.layer]
            if self.case.info.has_rope:
                keys = self.ledger.rotate(keys, cells.pos)
            assert apart(layer.keys, keys[order]) < self.case.tolerance
            assert apart(layer.values, cells.v[layer.layer][order]) < self.case.tolerance

    @rule(dst=SEQ, saved=saved)
    def write(self, dst: int, saved: tuple[SequenceKV, Saved]) -> None:
        arrays, what = saved
        if self.do("write_kv", self.ref.load(dst, what), arrays, dst) and self.ledger:
            self.ledger.sequences[dst] = what.ledger

    @rule(target=taken, seq=SEQ)
    def take(self, seq: int) -> tuple[Any, Saved]:
        """Take a sequence as bytes."""
        asked = self.do("state_size", self.ref.take(), seq)
        size = self.result
        if not self.do("get_state", self.ref.take(), seq):
            assert not asked
            return np.zeros(8, np.uint8), self.ref.save(seq, None)
        assert size == len(self.result)
        return self.result, self.ref.save(seq, self.ledger.cells(seq) if self.ledger else None)

    @rule(dst=SEQ, state=taken)
    def put(self, dst: int, state: tuple[Any, Saved]) -> None:
        verdict = self.ref.put(dst, state[1])
        if self.do("set_state", verdict, state[0], dst) and self.ledger:
            self.ledger.sequences[dst] = state[1].ledger

    @rule(target=taken_all)
    def take_all(self) -> tuple[Any, ...]:
        """Take the whole context as bytes."""
        done = self.do("get_state", self.ref.take())
        state = self.result if done else np.zeros(8, np.uint8)
        ledger = dict(self.ledger.sequences) if self.ledger else None
        return state, self.ref.save_all(), ledger

    @rule(state=taken_all)
    def put_all(self, state: tuple[Any, ...]) -> None:
        if self.do("set_state", self.ref.put_all(state[1]), state[0]) and self.ledger:
            self.ledger.sequences = dict(state[2])


def plain(p0: int | None, p1: int | None) -> tuple[int, int]:
    """A range with both ends."""
    return (0 if p0 is None else p0, END if p1 is None else p1)
