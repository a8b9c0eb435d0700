"""The steps of random programs over four sequences, on a context and the reference at once."""

from __future__ import annotations

from memory.program_runner import N_SEQ, Runner, in_turn, plain
from memory.reference import DONE, END, FULL, REFUSED, UNSUPPORTED, Verdict
from pykvcache import (
    LlamaBatch,
)

OPERATIONS = {
    "decode": 14,
    "batch": 3,
    "copy": 5,
    "copy_prefix": 2,
    "clear": 5,
    "clear_all": 0.5,
    "remove": 2,
    "keep": 0.5,
    "add": 3,
    "div": 2,
    "update": 1,
    "resume": 2,
    "wipe": 0.2,
}


class Program(Runner):
    """Every operation as a step."""

    operations = OPERATIONS

    def decode(self, seq: int | None = None, n: int | None = None) -> None:
        seq = self.seq() if seq is None else seq
        if n is None and not self.case.swa_full and self.random.random() < 0.05:
            # Past the window every now and then, so that its cells are reused.
            for _ in range(9):
                self.decode(seq, 32)
        sizes = [1, 1, 2, 5, 9, 15, 25] if self.case.swa_full else [1, 1, 5, 25, 32, 32]
        n = self.random.choice(sizes) if n is None else n
        tokens = self.words(n)
        first = max(self.ref.positions(seq), default=-1) + 1
        if self.do("decode", self.ref.decode(seq, tokens), tokens, seq_id=seq):
            self.compare_logits(seq, tokens, -1)
        else:
            rows = [(i, seq) for i in range(n)]
            self.keep_what_stayed(rows, {seq: tokens}, {seq: first})

    def batch(self) -> None:
        """Tokens of several sequences in one call, in turns."""
        seqs = self.random.sample(range(N_SEQ), self.random.randint(2, N_SEQ))
        words = {seq: self.words(self.random.choice([1, 2, 7])) for seq in seqs}
        first = {seq: max(self.ref.positions(seq), default=-1) + 1 for seq in seqs}
        rows = [(i, seq) for seq in seqs for i in range(len(words[seq]))]
        if self.random.random() < 0.5:
            rows.sort()
        batch = LlamaBatch()
        for i, seq in rows:
            batch.add(words[seq][i], first[seq] + i, seq, logits=i == len(words[seq]) - 1)
        verdicts = [self.ref.decode(seq, words[seq]) for seq in seqs]
        allowed = set().union(*(verdict.allowed for verdict in verdicts))
        if self.ref.unified and self.case.info.memory != "recurrent" and not self.case.info.n_swa:
            fits = self.ref.n_used() + len(rows) <= self.ref.n_cells
            allowed = {DONE if fits else FULL}
        elif FULL in allowed and not self.case.info.n_swa:
            allowed = {FULL}
        verdict = Verdict(frozenset(allowed), lambda: in_turn([v.effect for v in verdicts]))
        if self.do("decode", verdict, batch):
            for seq in seqs:
                self.compare_logits(seq, words[seq], rows.index((len(words[seq]) - 1, seq)))
        else:
            self.keep_what_stayed(rows, words, first)

    def copy(self) -> None:
        src, dst = self.seq(), self.seq()
        p0, p1 = self.span(src)
        verdict = self.ref.copy(src, dst, *plain(p0, p1))
        if self.do("copy_kv_cache_seq", verdict, src, dst, p0, p1) and self.ledger:
            self.ledger.copy(src, dst, *plain(p0, p1))

    def copy_prefix(self) -> None:
        src, dst = self.seq(), self.seq()
        n = self.random.randint(1, max(self.ref.positions(src), default=0) + 2)
        if src == dst:
            return
        if self.do("copy_prefix", self.ref.copy(src, dst, 0, n), src, dst, n) and self.ledger:
            self.ledger.copy(src, dst, 0, n)

    def clear(self) -> None:
        seq = self.seq()
        p0, p1 = self.span(seq)
        verdict = self.ref.remove([seq], *plain(p0, p1))
        if self.do("clear_kv_cache_seq", verdict, seq, p0, p1) and self.ledger:
            self.ledger.remove(seq, *plain(p0, p1))

    def clear_all(self) -> None:
        p0, p1 = self.span(self.seq())
        verdict = self.ref.remove([*range(N_SEQ)], *plain(p0, p1))
        if self.do("clear_kv_cache_seq", verdict, None, p0, p1) and self.ledger:
            for seq in range(N_SEQ):
                self.ledger.remove(seq, *plain(p0, p1))

    def remove(self) -> None:
        """Remove and close the gap, or nothing of it."""
        seq = self.seq()
        top = max(self.ref.positions(seq), default=0)
        begin, end = sorted(self.random.randint(0, top + 1) for _ in range(2))
        rest = self.ref.within(seq, end, END)
        whole = self.ref.covers(seq, begin, end)
        removal = self.ref.remove([seq], begin, end)
        allowed = {UNSUPPORTED if o == REFUSED else o for o in removal.allowed}
        effects = [removal.effect]
        if rest and begin < end and not whole:
            shift = self.ref.without(seq, begin, end).add(seq, end, END, begin - end)
            if DONE not in shift.allowed:
                allowed.discard(DONE)
            allowed |= shift.allowed - {DONE}
            if self.ref.whole_only:
                # Also where it could be done: nothing is removed and all of it moves.
                allowed.add(UNSUPPORTED)
            effects.append(lambda: self.ref.add(seq, end, END, begin - end).effect())
        verdict = Verdict(frozenset(allowed), lambda: in_turn(effects))
        if self.do("remove", verdict, seq, begin, end) and self.ledger and begin < end:
            self.ledger.remove(seq, begin, end)
            if rest:
                self.ledger.add(seq, end, END, begin - end)

    def keep(self) -> None:
        seq = self.seq()
        self.do("kv_cache_seq_keep", self.ref.keep(seq), seq)
        if self.ledger:
            self.ledger.keep(seq)

    def add(self) -> None:
        seq = self.seq()
        p0, p1 = self.span(seq)
        delta = self.random.choice([0, 1, 2, 7, 40, -1, -3, -20])
        verdict = self.ref.add(seq, *plain(p0, p1), delta)
        if self.do("kv_cache_seq_add", verdict, seq, p0, p1, delta) and self.ledger:
            self.ledger.add(seq, *plain(p0, p1), delta)

    def div(self) -> None:
        seq = self.seq()
        p0, p1 = self.span(seq)
        d = self.random.choice([1, 2, 2, 3, 9])
        verdict = self.ref.div(seq, *plain(p0, p1), d)
        if self.do("kv_cache_seq_div", verdict, seq, p0, p1, d) and self.ledger:
            self.ledger.div(seq, *plain(p0, p1), d)

    def update(self) -> None:
        self.do("kv_cache_update", self.ref.remove([], 0, 0))

    def wipe(self) -> None:
        self.do("clear_kv_cache", self.ref.clear())
        if self.ledger:
            self.ledger.clear()

    def resume(self) -> None:
        """`can_resume` and what a removal then does are the same."""
        seq = self.seq()
        held = self.ref.positions(seq)
        top = max(held, default=-1)
        pos = self.random.choice([0, top + 1, max(top, 0), self.random.randint(0, top + 2)])
        told = self.ctx.can_resume(seq, pos)
        self.log.append(f"ctx.can_resume({seq}, {pos})  # {told}")
        if pos == 0:
            assert told
        elif pos - 1 not in held:
            assert not told, "a decode there would leave a gap"
        elif self.ref.whole_only:
            assert told == (pos == top + 1)
        elif not self.ref.may_refuse:
            assert told
        if told and pos > 0:
            verdict = self.ref.remove([seq], pos, END)
            only_done = Verdict(frozenset({DONE}), verdict.effect)
            self.do("clear_kv_cache_seq", only_done, seq, pos, None)
            if self.ledger:
                self.ledger.remove(seq, pos)
