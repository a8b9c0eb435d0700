"""Prompts with shared prefixes: chats of many sessions, a tree of agents. Standard library only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.peers.primitives import Answer

__all__ = ["WORK", "play"]

#: Answers a prompt: returns the generated tokens and the number of evaluated prompt tokens.
Tokens = list[int]
Ask = Callable[[Tokens, int], tuple[Tokens, int]]

N_VOCAB = 500  # ids that are words in every vocabulary here; the first ones are special


def words(draw: random.Random, n: int) -> Tokens:
    """Return tokens of a prompt."""
    return [draw.randrange(260, 260 + N_VOCAB) for _ in range(n)]


class Known:
    """Tokens evaluated so far, which an ideal cache would not evaluate again."""

    def __init__(self) -> None:
        self.texts: list[Tokens] = []
        self.ideal = self.total = self.evaluated = 0
        self.distinct: set[int] = set()

    def take(self, prompt: Tokens, answer: Tokens, evaluated: int) -> None:
        """Count one prompt."""
        best = max((common(prompt, text) for text in self.texts), default=0)
        self.ideal += max(1, len(prompt) - best)
        self.total += len(prompt)
        self.evaluated += evaluated
        text = prompt + answer
        self.texts.append(text)
        # The last token of an answer is evaluated only as part of a later prompt.
        self.distinct.update(hash(tuple(text[: i + 1])) for i in range(len(text) - 1))


def common(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def chat(ask: Ask, known: Known, sessions: int, turns: int) -> None:
    """Send sessions round-robin: 198 common tokens, questions of 45 or 46, answers of 39."""
    draw = random.Random(1)
    system = words(draw, 198)
    texts = [list(system) for _ in range(sessions)]
    for turn in range(turns):
        for i in range(sessions):
            texts[i] += words(draw, 46 if (turn + i) % 8 in (2, 5, 7) else 45)
            answer, evaluated = ask(texts[i], 39)
            known.take(texts[i], answer, evaluated)
            texts[i] = texts[i] + answer


def tree(ask: Ask, known: Known, branches: int, depth: int) -> None:
    """Send an agent's steps, level by level: 800 common tokens, each step 40 more."""
    draw = random.Random(2)
    level = [words(draw, 800)]
    for _ in range(depth):
        level = [text + words(draw, 40) for text in level for _ in range(branches)]
        draw.shuffle(level)
        for text in level:
            known.take(text, *ask(text, 1))


def strangers(n: int, n_tokens: int) -> list[Tokens]:
    """Return prompts that share nothing."""
    draw = random.Random(3)
    return [[260 + i, *words(draw, n_tokens - 1)] for i in range(n)]


WORK = {
    "short chat": lambda ask, known, quick: chat(ask, known, *((4, 2) if quick else (16, 3))),
    "chat": lambda ask, known, quick: chat(ask, known, *((6, 3) if quick else (16, 6))),
    "tree": lambda ask, known, quick: tree(ask, known, *((3, 2) if quick else (4, 3))),
}


def play(work: str, ask: Ask, quick: bool) -> Answer:
    """Send the prompts of a workload one after the other and count; only answers are timed."""
    known = Known()
    seconds = 0.0

    def timed(prompt: Tokens, n: int) -> tuple[Tokens, int]:
        nonlocal seconds
        begin = time.perf_counter()
        answer = ask(prompt, n)
        seconds += time.perf_counter() - begin
        return answer

    WORK[work](timed, known, quick)
    return {
        "seconds": seconds,
        "evaluated": known.evaluated,
        "ideal": known.ideal,
        "total": known.total,
        "distinct": len(known.distinct),
    }
