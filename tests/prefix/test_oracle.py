"""Tokens evaluated on random traces, counted and equal to an oracle's, on every memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memory.kit import EVERY_SERVED, Case, Fresh, Make, apart
from prefix.program import common
from pykvcache import PrefixCache

Tokens = list[int]
SIZE, ANSWER = 8, 3


class Oracle:
    """What a cache of enough memory evaluates, by docs/prefix-cache.md: sets of prefixes."""

    def __init__(self, *, has_cells_only: bool) -> None:
        self.has_cells_only = has_cells_only
        self.texts: list[Tokens] = []
        self.ends: set[tuple[int, ...]] = set()

    def expected(self, prompt: Tokens) -> int:
        """How many tokens of a prompt have to be evaluated."""
        if self.has_cells_only:
            return max(1, len(prompt) - max((common(prompt, x) for x in self.texts), default=0))
        return len(prompt) - self.begin(prompt)

    def begin(self, prompt: Tokens) -> int:
        """The deepest end that the prompt begins with and goes on from."""
        ends = (len(end) for end in self.ends if tuple(prompt[: len(end)]) == end)
        return max((n for n in ends if n < len(prompt)), default=0)

    def take(self, prompt: Tokens, text: Tokens) -> None:
        """A prompt was evaluated, and then an answer: all of it is the text."""
        begin, n = self.begin(prompt), len(prompt)
        if n - begin > 1:
            last = n // SIZE
            places = {SIZE * (last + 1 - 2**k) for k in range(8)}
            # Where it parts from what is known, and its own end.
            places |= {max((common(prompt, x) for x in self.texts), default=0), n}
            self.ends |= {tuple(prompt[:at]) for at in places if begin < at <= n}
        self.texts.append(text)
        self.ends.add(tuple(text))


def trace(rng: np.random.Generator) -> Iterator[Callable[[list[Tokens]], Tokens]]:
    """Prompts, of which each is made of the texts before: chats, a tree, agents, by turns."""

    def words(least: int, most: int) -> Tokens:
        found: Tokens = rng.integers(5, 56, int(rng.integers(least, most))).tolist()
        return found

    system, trunk = words(10, 30), words(20, 40)
    chats: list[int | None] = [None] * 3  # which text each goes on from
    steps: list[Tokens] = [trunk]
    for at in range(26):
        kind = ("chat", "tree", "agent", "chat")[int(rng.integers(4))]
        if kind == "chat":
            who = int(rng.integers(3))
            last, chats[who] = chats[who], at
            yield lambda texts, last=last: (system if last is None else texts[last]) + words(3, 14)
        elif kind == "tree":
            yield lambda texts: trunk + words(1, 20)
        else:
            base = steps[int(rng.integers(len(steps)))]
            steps.append((base + words(2, 12))[:90])
            yield lambda texts: steps[-1]


@pytest.mark.hazard("N90")
@pytest.mark.parametrize("case", EVERY_SERVED, ids=str)
def test_evaluates_what_the_oracle_says(
    case: Case, make_context: Make, fresh_logits: Fresh
) -> None:
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 2}))
    oracle = Oracle(has_cells_only=not ctx.native.has_state_part)
    texts: list[Tokens] = []
    with PrefixCache(ctx, block_size=SIZE) as cache:
        for step, make in enumerate(trace(np.random.default_rng(2))):
            prompt = make(texts)[:110]
            expected = oracle.expected(prompt)
            before = ctx.tokens_evaluated
            with cache.sequence(prompt) as sequence:
                logits = sequence.logits()
                assert ctx.tokens_evaluated - before == expected, (step, sequence.reuse)
                assert sequence.reuse.evaluated == expected
                list(sequence.generate(ANSWER))
                # The last token of an answer is not evaluated.
                texts.append(sequence.tokens.tolist()[: sequence.n_evaluated])
            if step % 5 == 0:
                assert apart(logits, fresh_logits(case.name, prompt)) < case.tolerance
            oracle.take(prompt, texts[-1])


@pytest.mark.parametrize("case", EVERY_SERVED, ids=str)
@pytest.mark.parametrize("n", [40, 43])
def test_a_repeated_prompt_evaluates_at_most_one_block(
    n: int, case: Case, make_context: Make
) -> None:
    """Also where the state after the last token is all that is known of the prompt's end."""
    ctx = make_context(case.name, **(case.options | {"n_seq_max": 3}))
    prompt = np.random.default_rng(n).integers(5, 56, n).tolist()
    with PrefixCache(ctx, block_size=SIZE) as cache:
        with cache.sequence(prompt) as sequence:
            sequence.logits()
        for _ in range(2):  # of what was closed, and of a sequence in use
            again, before = cache.sequence(prompt), ctx.tokens_evaluated
            again.logits()
            assert ctx.tokens_evaluated - before == again.reuse.evaluated <= SIZE
