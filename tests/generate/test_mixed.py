"""Random programs that mix sequences, streams and requests: all as if each were alone."""

from __future__ import annotations

import codecs
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, EVERY_CASE, Case, Logits, Make, apart
from prefix.accounts import check_accounts
from pykvcache import (
    BatchGenerator,
    CheckpointPolicy,
    LlamaContext,
    LlamaSequence,
    PrefixCache,
    Sampler,
)
from pykvcache.errors import (
    DecodeAborted,
    DecodeError,
    InvalidBatch,
    NoKvCacheSlot,
    UnsupportedOperation,
)

PROGRAMS = max(1, int(os.environ.get("PYKVCACHE_FUZZ_CALLS", "3000")) // 3000)
SERVED = tuple(case for case in EVERY_CASE if case.name != "t5")
SEED = int(os.environ.get("PYKVCACHE_FUZZ_SEED", "1"))
GRAMMAR = 'root ::= [a-zA-Z0-9 ▁<>_|]{0,12} "\\x00"'
MOST = 70
ODDS = {
    "new": 3, "append": 3, "truncate": 3, "sync": 2, "fork": 3, "discard": 1, "park": 1,
    "close": 1, "generate": 3, "begin": 3, "go_on": 8, "files": 1, "compact": 1,
    "submit": 4, "submit_held": 2, "bad": 1, "step": 8, "abort": 1, "threads": 1,
    "by_hand": 1, "whole": 2,
}  # fmt: skip
ABORTED = {
    "new": 3, "append": 2, "truncate": 2, "sync": 1, "fork": 2, "discard": 1, "park": 1,
    "close": 2, "evaluate": 4, "go_on_after": 3, "files": 1, "submit": 3, "submit_held": 1,
    "step": 8, "abort": 1, "whole": 1,
}  # fmt: skip
"""Of programs whose decodes are aborted: what is called can be called again."""


@dataclass
class Held:
    """A sequence, and the tokens that it should have."""

    sequence: LlamaSequence
    tokens: list[int]
    streams: list[Stream] = field(default_factory=list)


@dataclass
class Stream:
    """A generation that was begun, its shadow, and what came of it."""

    tokens: Iterator[int]
    shadow: Sampler
    left: int


@dataclass
class Asked:
    """A request, and how it can be made alone."""

    handle: Any
    prompt: list[int]
    settings: dict[str, Any]
    i: int
    limit: int
    stop: list[str | int]
    held: Held | None
    aborted: bool = False


class Mixed:
    """One context and everything that lives in it; `log` tells what was done.

    `plain` is a context of one sequence, in which each generation is made by hand, one decode after
    the other.
    """

    def __init__(
        self,
        case: Case,
        ctx: LlamaContext,
        plain: LlamaContext,
        folder: Path,
        seed: Any,
        *,
        aborts: bool = False,
    ) -> None:
        self.case, self.ctx, self.plain = case, ctx, plain
        self.rng = np.random.default_rng(seed)
        self.log: list[str] = []
        self.folder = folder
        self.policy = CheckpointPolicy(
            max_bytes=int(self.rng.choice([0, 1 << 20, 1 << 28])),
            spacing=int(self.rng.choice([0, 8])),
        )
        self.held: list[Held] = []
        self.asked: list[Asked] = []
        self.n_checked = self.n_other = self.n_aborted = 0
        chunk = int(self.rng.choice([1, 5, 64]))
        # The steps of a graph after which a decode is stopped, at most.
        self.reach = int(self.rng.choice([30, 120, 500])) if aborts else 0
        self.cache = self._cache() if aborts and case.has_states else None
        self.generators = [BatchGenerator(self.cache or ctx, n_chunk=chunk), BatchGenerator(ctx)]

    def _cache(self) -> PrefixCache | None:
        if self.rng.random() < 0.3:
            return None
        return PrefixCache(
            self.ctx,
            block_size=8,
            ram_bytes=int(self.rng.choice([0, 1 << 20])),
            checkpoint_bytes=self.policy.max_bytes,
            keep_logits=bool(self.rng.random() < 0.4),
        )

    def until_done(self, call: Callable[[], Any]) -> Any:
        """Call; again after each abort, or leave it at that."""
        native = self.ctx.native
        for _ in range(int(self.rng.integers(3)) if self.reach else 0):
            native.abort_at(int(self.rng.integers(1, self.reach)))
            try:
                return call()
            except DecodeAborted:
                self.n_aborted += 1
                self.log.append("aborted")
                assert native.abort_at(0) == 0, self.log
                if self.rng.random() < 0.3:
                    return None
            finally:
                native.abort_at(0)
        return call()

    # Draws ------------------------------------------------------------------------------------

    def words(self, least: int, most: int) -> list[int]:
        n = int(self.rng.integers(least, max(least, most) + 1))
        top = 8 if self.rng.random() < 0.5 else self.case.n_vocab - 2
        found: list[int] = self.rng.integers(5, top, n).tolist()
        return found

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = {"temperature": 0}
        if self.rng.random() < 0.7:
            found = {"temperature": 1, "top_k": 30, "seed": int(self.rng.integers(1, 9))}
        if self.rng.random() < 0.5:
            found |= {"repeat_penalty": 1.3, "presence_penalty": 0.5, "penalty_last_n": 20}
        chance = self.rng.random()
        if chance < 0.15:
            found |= {"grammar": GRAMMAR, "model": self.ctx.model}
        elif chance < 0.4:
            bias = {int(t): 4.0 for t in self.rng.integers(0, self.case.n_vocab, 3)}
            found |= {"logit_bias": bias}
        return found

    def stops(self, prompt: list[int], settings: dict[str, Any]) -> list[str | int]:
        """Return some out of what would be made: they overlap, lie in one token, or across two."""
        if not prompt or self.rng.random() < 0.5:
            return []
        made = self.alone(prompt, settings, 0, 10, [])[0]
        text = b"".join(map(self.ctx.model.token_to_piece, made)).decode("utf-8", "replace")
        found: list[str | int] = ["never there"]
        for _ in range(int(self.rng.integers(1, 4))):
            if text:
                at = int(self.rng.integers(len(text)))
                found.append(text[at : at + int(self.rng.integers(1, 5))])
        if made and self.rng.random() < 0.3:
            found.append(made[-1])
        return found

    # What it should be ------------------------------------------------------------------------

    def fresh(self, tokens: list[int]) -> Logits:
        self.plain.clear_kv_cache()
        self.plain.decode(tokens, seq_id=0)
        row: Logits = self.plain.logits()
        return row

    def sampler(self, settings: dict[str, Any], i: int = 0) -> Sampler:
        more = {"seed": settings["seed"] + i} if "seed" in settings else {}
        return Sampler(**settings | more)

    def alone(
        self, prompt: list[int], settings: dict[str, Any], i: int, limit: int, stop: Any
    ) -> tuple[list[int], str]:
        """Make a generation by hand: tokens, and how it ended."""
        sampler, made, data = self.sampler(settings, i), [], b""
        model = self.plain.model
        self.plain.clear_kv_cache()
        more, n = list(prompt), 0
        while len(made) < limit:
            if n + len(more) > self.ctx.n_ctx_seq and self.ctx.memory_kind != "recurrent":
                return made, "full"
            self.plain.decode(more, seq_id=0)
            n += len(more)
            try:
                token = sampler.sample(self.plain)
            except DecodeError:
                return made, "error"
            if model.is_eog(token):
                return made, "stop"
            made.append(token)
            more = [token]
            if token in stop:
                return made, "stop"
            data += model.token_to_piece(token)
            text = codecs.utf_8_decode(data, "replace", False)[0]
            if any(isinstance(one, str) and one in text for one in stop):
                return made, "stop"
        return made, "length"

    def check_text(self, text: str, tokens: list[int], stop: list[str | int]) -> None:
        if tokens and tokens[-1] in stop:
            tokens = tokens[:-1]
        whole = b"".join(map(self.ctx.model.token_to_piece, tokens)).decode("utf-8", "replace")
        places = [whole.find(one) for one in stop if isinstance(one, str) and one in whole]
        assert text == whole[: min(places, default=len(whole))], (text, whole, stop, self.log)

    # Operations -------------------------------------------------------------------------------

    def look(self, one: Held) -> None:
        assert one.sequence.tokens.tolist() == one.tokens, self.log
        if one.tokens:
            difference = apart(one.sequence.logits(), self.fresh(one.tokens))
            assert difference < self.case.tolerance, (difference, self.log)
            assert one.sequence.n_evaluated == len(one.tokens), self.log

    def run(self, n_steps: int) -> None:
        names = ABORTED if self.reach else ODDS
        odds = np.array(list(names.values())) / sum(names.values())
        for _ in range(n_steps):
            name = str(self.rng.choice(list(names), p=odds))
            self.log.append(name)
            free = [one for one in self.held if not self.is_busy(one)]
            one = free[int(self.rng.integers(len(free)))] if free else None
            getattr(self, name)(one)
            self.collect()
            if one is not None and one in self.held and self.rng.random() < 0.3:
                self.look(one)
        for generator in self.generators:
            generator.run(progress=False)
        self.collect()
        assert not self.asked, self.log
        for one in self.held:
            self.look(one)
            one.sequence.close()
        if self.cache is not None:
            self.generators[0].close()
            check_accounts(self.cache)
            self.cache.close()
        assert not self.ctx.sequences(), self.log

    def is_busy(self, one: Held) -> bool:
        return any(ask.held is one for ask in self.asked)

    def new(self, one: Held | None) -> None:
        if len(self.held) < 6:
            long = self.rng.random() < 0.1
            tokens = self.words(0, 20) + (self.words(100, 230) if long else [])
            if self.cache is not None and self.rng.random() < 0.5:
                sequence: LlamaSequence = self.cache.sequence(tokens)
            else:
                sequence = LlamaSequence(self.ctx, tokens, checkpoints=self.policy)
            self.held.append(Held(sequence, tokens))

    def append(self, one: Held | None) -> None:
        if one is not None:
            more = self.words(0, min(12, MOST - len(one.tokens)))
            one.sequence.append(more)
            one.tokens += more

    def truncate(self, one: Held | None) -> None:
        if one is not None:
            n = int(self.rng.integers(0, len(one.tokens) + 1))
            one.sequence.truncate(n)
            del one.tokens[n:]

    def sync(self, one: Held | None) -> None:
        if one is not None:
            wanted = one.tokens[: int(self.rng.integers(0, len(one.tokens) + 1))] + self.words(0, 8)
            one.sequence.sync(wanted)
            one.tokens = wanted

    def fork(self, one: Held | None) -> None:
        if one is not None and len(self.held) < 8:
            n = int(self.rng.integers(0, len(one.tokens) + 1))
            self.held.append(Held(one.sequence.fork(n), one.tokens[:n]))

    def discard(self, one: Held | None) -> None:
        if one is not None and not self.case.info.can_shift:
            begin, end = sorted(self.rng.integers(0, len(one.tokens) + 1, 2).tolist())
            one.sequence.discard(begin, end, reevaluate=True)
            del one.tokens[begin:end]

    def park(self, one: Held | None) -> None:
        for held in self.held:
            if self.rng.random() < 0.4:
                held.sequence.park()  # those that a generator runs, too

    def close(self, one: Held | None) -> None:
        if one is not None:
            self.held.remove(one)
            if self.rng.random() < 0.5:
                one.sequence.close()

    def compact(self, one: Held | None) -> None:
        with contextlib.suppress(UnsupportedOperation):  # a plain build
            self.ctx.kv_cache_compact()

    def by_hand(self, one: Held | None) -> None:
        """Clear or overwrite what somebody believes to hold."""
        seq_id = int(self.rng.integers(self.ctx.n_seq_max))
        self.ctx.clear_kv_cache_seq(seq_id)
        if self.rng.random() < 0.5 and one is not None and one.sequence.seq_id == seq_id:
            self.ctx.decode(self.words(1, 5), seq_id=seq_id)

    def files(self, one: Held | None) -> None:
        if one is not None and self.case.has_states:
            path = self.folder / "sequence"
            one.sequence.save(path, sync=False)
            self.held.remove(one)
            if self.rng.random() < 0.5:
                one.sequence.close()
            loaded = LlamaSequence.load(self.ctx, path, checkpoints=self.policy)
            assert loaded.tokens.tolist() == one.tokens, self.log
            self.held.append(Held(loaded, one.tokens))

    def generate(self, one: Held | None) -> None:
        """From its beginning to its end: tokens, text and reason are those of one by hand."""
        if one is None or not one.tokens:
            return
        settings, limit = self.settings(), int(self.rng.choice([0, 1, 3, 9]))
        stop = self.stops(one.tokens, settings)
        wanted, reason = self.alone(one.tokens, settings, 0, limit, stop)
        how = self.sampler(settings)
        one.streams.clear()
        try:
            if self.rng.random() < 0.5:
                tokens = one.sequence.generate(limit, how, stop=stop, on_full="stop")
                assert list(tokens) == wanted, self.log
                ended = tokens.finish_reason
            else:
                stream = one.sequence.stream(limit, how, stop=stop, on_full="stop")
                pieces = list(stream)
                ended = stream.finish_reason
                self.check_text("".join(pieces), wanted, stop)
        except DecodeError:  # a grammar
            ended = "error"
        one.tokens += wanted
        assert one.sequence.tokens.tolist() == one.tokens, self.log
        assert ended == reason, (ended, reason, self.log)

    def evaluate(self, one: Held | None) -> None:
        if one is not None and one.tokens:
            self.until_done(one.sequence.evaluate)

    def go_on_after(self, one: Held | None) -> None:
        """Generate: what was made before an abort stays, and the sampler goes on after it."""
        if one is None or not one.tokens:
            return
        settings, limit = {"temperature": 1, "top_k": 20, "repeat_penalty": 1.2, "seed": 3}, 6
        wanted, _ = self.alone(one.tokens, settings, 0, limit, [])
        choose, found = self.sampler(settings), list[int]()

        def go_on() -> bool:
            found.extend(one.sequence.generate(limit - len(found), choose))
            return True

        is_whole = self.until_done(go_on)
        assert found == (wanted if is_whole else wanted[: len(found)]), self.log
        one.tokens += found

    def begin(self, one: Held | None) -> None:
        """Begin a generation that goes on now and then; an older one of the sequence ends."""
        if one is not None:
            settings, limit = self.settings(), int(self.rng.integers(1, 20))
            tokens = one.sequence.generate(limit, self.sampler(settings))
            one.streams = [Stream(tokens, self.sampler(settings), limit)]

    def go_on(self, one: Held | None) -> None:
        """Take a token: the one that its sampler chooses after the tokens as they are now."""
        if one is None or not one.streams or not one.tokens:
            return
        stream = one.streams[0]
        if len(one.tokens) > self.ctx.n_ctx_seq and self.ctx.memory_kind != "recurrent":
            return
        if not stream.left:
            assert next(stream.tokens, None) is None, self.log
            return
        row = self.fresh(one.tokens)
        try:
            wanted = stream.shadow.sample(row)
        except DecodeError:
            wanted = -1
        except ValueError:
            wanted = -1
        try:
            token = next(stream.tokens, None)
        except DecodeError:
            token = -1
        self.n_checked += 1
        if wanted >= 0 and self.ctx.model.is_eog(wanted):
            wanted = None  # type: ignore[assignment]
        stream.left -= 1
        if token != wanted:
            self.n_other += 1  # two that are as likely, to the last bit
        if token != wanted or token is None or token < 0:
            one.streams.clear()
        if token is not None and token >= 0:
            one.tokens.append(token)
        assert one.sequence.tokens.tolist() == one.tokens, self.log

    # Requests ---------------------------------------------------------------------------------

    def ask(self, prompt: Any, tokens: list[int], held: Held | None, n: int) -> None:
        settings, limit = self.settings(), int(self.rng.choice([0, 1, 4, 12]))
        stop = self.stops(tokens, settings)
        generator = self.generators[int(self.rng.integers(2))]
        handles = generator.submit(
            prompt, limit, self.sampler(settings), n=n, stop=stop,
            priority=int(self.rng.integers(3)), logprobs=int(self.rng.choice([0, 2])),
        )  # fmt: skip
        for i, handle in enumerate(handles if isinstance(handles, list) else [handles]):
            own = held if i == 0 else None
            self.asked.append(Asked(handle, list(tokens), settings, i, limit, stop, own))

    def submit(self, one: Held | None) -> None:
        if len(self.asked) < 12:
            tokens = self.words(1, 25) + (self.words(60, 150) if self.rng.random() < 0.2 else [])
            if len(tokens) <= self.ctx.n_ctx_seq:
                self.ask(tokens, tokens, None, int(self.rng.choice([1, 1, 3])))

    def submit_held(self, one: Held | None) -> None:
        if one is not None and one.tokens and len(one.tokens) <= self.ctx.n_ctx_seq:
            one.streams.clear()
            if self.rng.random() < 0.5:
                self.ask(one.sequence, one.tokens, one, int(self.rng.choice([1, 2])))
            else:
                self.ask(one.sequence.fork(), one.tokens, None, 1)

    def bad(self, one: Held | None) -> None:
        generator = self.generators[0]
        calls: list[Callable[[], object]] = [
            lambda: generator.submit([5, -1], 5),
            lambda: generator.submit([], 5),
            lambda: generator.submit([5] * (self.ctx.n_ctx_seq + 1), 5),
            lambda: generator.submit([5], 5, stop=[""]),
            lambda: generator.submit([5], -1),
        ]
        call = calls[int(self.rng.integers(len(calls)))]
        try:
            call()
        except (InvalidBatch, ValueError, NoKvCacheSlot):
            return
        assert self.ctx.memory_kind == "recurrent", self.log
        self.generators[0].run(progress=False)

    def step(self, one: Held | None) -> None:
        self.until_done(self.generators[int(self.rng.integers(2))].step)

    def whole(self, one: Held | None) -> None:
        if self.rng.random() < 0.3:
            generator = self.generators[int(self.rng.integers(2))]
            self.until_done(lambda: generator.run(progress=False))

    def abort(self, one: Held | None) -> None:
        if self.asked:
            ask = self.asked[int(self.rng.integers(len(self.asked)))]
            ask.aborted = True
            ask.handle.abort()

    def threads(self, one: Held | None) -> None:
        """Let everybody work at once."""
        failures: list[BaseException] = []

        def guarded(call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:
                failures.append(error)

        calls: list[Callable[[], object]] = [
            lambda g=generator: g.run(progress=False)  # type: ignore[misc]
            for generator in self.generators
        ]
        calls += [h.sequence.evaluate for h in self.held if len(h.tokens) <= self.ctx.n_ctx_seq]
        threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), self.log
        assert not failures, (failures, self.log)

    def collect(self) -> None:
        """Check the requests that have ended."""
        for ask in [ask for ask in self.asked if ask.handle.finish_reason is not None]:
            self.asked.remove(ask)
            handle, tokens = ask.handle, ask.handle.tokens.tolist()
            wanted, reason = self.alone(ask.prompt, ask.settings, ask.i, ask.limit, ask.stop)
            if handle.finish_reason == "aborted":
                assert ask.aborted, self.log
                assert tokens == wanted[: len(tokens)], (tokens, wanted, self.log)
            else:
                facts = (tokens, wanted, ask, handle.error, self.log)
                assert (tokens, handle.finish_reason) == (wanted, reason), facts
                self.check_text(handle.text, tokens, ask.stop)
            if ask.held is not None:
                ask.held.tokens += tokens
                assert ask.held.sequence.tokens.tolist() == ask.held.tokens, self.log


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_mixed_programs_with_too_few_cells(case: Case, make_context: Make, tmp_path: Path) -> None:
    checked = other = 0
    for program in range(PROGRAMS):
        n_seq_max = 1 + (SEED + program + SERVED.index(case)) % 4
        options = case.options | {"n_seq_max": n_seq_max}
        if case.swa_full:
            options["n_ctx"] = 256 * (1 if case.unified else n_seq_max)
        ctx = make_context(case.name, **options)
        alone = {"n_seq_max": 1, "n_ctx": max(256, ctx.n_ctx_seq)}
        plain = make_context(case.name, **(case.options | alone))
        mixed = Mixed(case, ctx, plain, tmp_path, [SEED, program, len(case.name)])
        mixed.run(60)
        checked, other = checked + mixed.n_checked, other + mixed.n_other
        ctx.close()
        plain.close()
    assert other <= checked // 100, (other, checked)


@pytest.mark.not_on_a_device(reason="a decode is stopped between its parts alone")
@pytest.mark.hazard("N183", "N242")
@pytest.mark.parametrize("case", [c for c in CASES if c.name != "t5"], ids=str)
def test_decodes_that_are_aborted_at_any_step(
    case: Case, make_context: Make, tmp_path: Path
) -> None:
    """All goes on, and no logits are others."""
    n_aborted = 0
    for program in range(PROGRAMS):
        options = case.options | {"n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
        options |= {"n_ctx": 1024 if case.unified else 2048, "n_seq_max": 4 - (SEED + program) % 3}
        ctx = make_context(case.name, **options)
        plain = make_context(case.name, **(options | {"n_seq_max": 1, "n_ctx": 512}))
        seed = [SEED, program, len(case.name)]
        mixed = Mixed(case, ctx, plain, tmp_path, seed, aborts=True)
        mixed.run(60)
        n_aborted += mixed.n_aborted
        ctx.close()
        plain.close()
    assert n_aborted
