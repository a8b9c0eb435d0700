"""Synthetic traces, one for each way in which prompts share prefixes, and mixtures of them.

Policies are chosen and tested with them, so that none is tuned to the few public traces. Prompt
sizes, popularity and order are random with a seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final

from pykvcache._arguments import as_index, as_int
from pykvcache.errors import ArgumentError, shown
from pykvcache.simulate.traces import Trace

__all__ = ["WORKLOADS", "workload"]

#: Block ids of one prompt, each identifying the block and all before it.
_Ids = list[int]


class _Draw:
    """Source of random numbers and new blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = count()

    def new(self, least: int, most: int) -> _Ids:
        """Return new blocks."""
        return [next(self._ids) for _ in range(self.random.randint(least, most))]

    def zipf(self, n: int, power: float) -> Callable[[], int]:
        """Return a function that draws one of n numbers, small ones most often."""
        weights = [1 / (i + 1) ** power for i in range(n)]
        return lambda: self.random.choices(range(n), weights)[0]


def _sessions(
    draw: _Draw, rate: float, turns: float, pause: float, system: int, tenants: int = 1
) -> Iterator[_Ids]:
    """Yield turns of conversations that begin at random times, with pauses between turns."""
    systems = [draw.new(system, system) for _ in range(tenants)]
    waiting: list[tuple[float, int, _Ids]] = [(0.0, -1, [])]
    number = count()
    while True:
        now, who, text = heapq.heappop(waiting)
        if who < 0:
            heapq.heappush(waiting, (now + draw.random.expovariate(rate), -1, []))
            text = systems[draw.random.randrange(tenants)]
            who = next(number)
        text = text + draw.new(1, 8)
        yield text
        if draw.random.random() < 1 - 1 / turns:
            text = text + draw.new(0, 4)  # the answer
            wait = draw.random.lognormvariate(0, 1) * pause
            heapq.heappush(waiting, (now + wait, who, text))


def chat(draw: _Draw) -> Iterator[_Ids]:
    """Yield conversations of 4 turns on average after one system prompt."""
    return _sessions(draw, rate=1.0, turns=4, pause=60, system=4)


def short_chat(draw: _Draw) -> Iterator[_Ids]:
    """Yield conversations that mostly end after the first turn; 20 system prompts."""
    return _sessions(draw, rate=1.0, turns=1.4, pause=200, system=6, tenants=20)


def turns_in_order(draw: _Draw) -> Iterator[_Ids]:
    """Yield groups of 48 sessions of 12 turns, round-robin."""
    while True:
        texts = [draw.new(2, 12) for _ in range(48)]
        for _ in range(12):
            for i, text in enumerate(texts):
                yield text
                texts[i] = text + draw.new(1, 5)


def agents(draw: _Draw) -> Iterator[_Ids]:
    """Yield several kinds of agents: many short steps, branching helpers, retries."""
    tools = [draw.new(10, 30) for _ in range(5)]
    running: list[tuple[_Ids, int]] = []
    while True:
        while len(running) < 12:
            running.append((draw.random.choice(tools) + draw.new(2, 8), draw.random.randint(5, 50)))
        i = draw.random.randrange(len(running))
        text, left = running[i]
        text = text + draw.new(1, 6)
        yield text
        chance = draw.random.random()
        if chance < 0.1:  # retry of a step
            yield text[: -draw.random.randint(1, 3)] + draw.new(1, 3)
        elif chance < 0.2:  # helper with the same prefix
            helper = text
            for _ in range(draw.random.randint(2, 6)):
                helper = helper + draw.new(1, 3)
                yield helper
        running[i] = (text, left - 1)
        if left < 1:
            running.pop(i)


def tree(draw: _Draw) -> Iterator[_Ids]:
    """Yield a growing tree: each prompt continues any earlier one."""
    known = [draw.new(3, 3)]
    while True:
        text = draw.random.choice(known)
        text = text[: draw.random.randint(1, len(text))] + draw.new(1, 6)
        known.append(text)
        yield text


def tree_search(draw: _Draw) -> Iterator[_Ids]:
    """Yield searches: the best 4 of 16 branches continue, for 8 steps."""
    few_shots = draw.new(20, 20)
    while True:
        beam = [few_shots + draw.new(2, 6)]
        for _ in range(8):
            branches = [text + draw.new(1, 3) for text in beam for _ in range(16 // len(beam))]
            yield from branches
            beam = draw.random.sample(branches, 4)


def loop(draw: _Draw) -> Iterator[_Ids]:
    """Yield 150 documents in a loop, each time with a new question."""
    texts = [draw.new(4, 30) for _ in range(150)]
    while True:
        for text in texts:
            yield text + draw.new(1, 1)


def scan(draw: _Draw) -> Iterator[_Ids]:
    """Yield popular documents, and sometimes a scan of 200 documents that never recur."""
    texts = [draw.new(4, 16) for _ in range(300)]
    pick = draw.zipf(300, 0.9)
    while True:
        for _ in range(600):
            yield texts[pick()] + draw.new(0, 1)
        for _ in range(200):
            yield draw.new(4, 30)


def popular(draw: _Draw) -> Iterator[_Ids]:
    """Yield questions about documents of different popularity."""
    texts = [draw.new(2, 40) for _ in range(400)]
    pick = draw.zipf(400, 1.0)
    while True:
        yield texts[pick()] + draw.new(1, 3)


def even(draw: _Draw) -> Iterator[_Ids]:
    """Yield questions about documents of equal popularity."""
    texts = [draw.new(2, 40) for _ in range(200)]
    while True:
        yield draw.random.choice(texts) + draw.new(1, 3)


def news(draw: _Draw) -> Iterator[_Ids]:
    """Yield questions about documents whose popularity fades, and new documents."""
    texts = [draw.new(4, 20) for _ in range(40)]
    pick = draw.zipf(40, 1.0)
    while True:
        if draw.random.random() < 0.05:
            texts.insert(draw.random.randrange(10), draw.new(4, 20))
            texts.pop()
        yield texts[pick()] + draw.new(1, 2)


def once(draw: _Draw) -> Iterator[_Ids]:
    """Yield mostly one-time prompts (four of five), and popular ones."""
    texts = [draw.new(3, 20) for _ in range(200)]
    pick = draw.zipf(200, 0.8)
    while True:
        yield texts[pick()] if draw.random.random() < 0.2 else draw.new(3, 20)


def twice(draw: _Draw) -> Iterator[_Ids]:
    """Yield prompts that recur once, 20 to 400 prompts later."""
    late: list[tuple[int, _Ids]] = []
    for now in count():
        while late and late[0][0] <= now:
            yield heapq.heappop(late)[1]
        text = draw.new(3, 20)
        heapq.heappush(late, (now + draw.random.randint(20, 400), text))
        yield text


def samples(draw: _Draw) -> Iterator[_Ids]:
    """Yield every prompt 5 times in a row, for several answers; 30 templates."""
    templates = [draw.new(5, 25) for _ in range(30)]
    while True:
        text = draw.random.choice(templates) + draw.new(2, 10)
        yield from [text] * 5


def daily(draw: _Draw) -> Iterator[_Ids]:
    """Yield the same prompts every morning, then chats that end by the evening."""
    morning = [draw.new(5, 30) for _ in range(60)]
    while True:
        for text in morning:
            yield text + draw.new(1, 1)
        talks = [draw.new(2, 6) for _ in range(40)]
        for _ in range(400):
            i = draw.random.randrange(40)
            talks[i] = talks[i] + draw.new(1, 3)
            yield talks[i]


def phases(draw: _Draw) -> Iterator[_Ids]:
    """Yield 500 prompts each of several workloads in turn."""
    kinds = [kind(draw) for kind in (chat, loop, popular, once, agents, news)]
    while True:
        for kind in kinds:
            for _ in range(500):
                yield next(kind)


def mixed(draw: _Draw) -> Iterator[_Ids]:
    """Yield a mixture of chats, agents, popular documents and one-time prompts."""
    kinds = [kind(draw) for kind in (chat, agents, popular, once)]
    while True:
        yield next(draw.random.choice(kinds))


_KINDS: Final = (
    *(chat, short_chat, turns_in_order, agents, tree, tree_search, loop, scan, popular),
    *(even, news, once, twice, samples, daily, phases, mixed),
)

#: All workloads by name.
WORKLOADS: Final = {kind.__name__: kind for kind in _KINDS}


def workload(name: str, n_prompts: int = 4000, seed: int = 1) -> Trace:
    """Return a synthetic trace.

    Parameters
    ----------
    name
        One of `WORKLOADS`.
    n_prompts
        Number of prompts.
    seed
        Equal seeds give equal traces.

    Raises
    ------
    ValueError
        If the workload does not exist.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    n_prompts, seed = as_int(n_prompts, "n_prompts", 0, 2**31 - 1), as_index(seed, "seed")
    if name not in WORKLOADS:
        raise ArgumentError(
            f"there is no workload {shown(name)}: choose one of {', '.join(WORKLOADS)}",
            "name",
            name,
            tuple(WORKLOADS),
        )
    prompts = WORKLOADS[name](_Draw(seed))
    return Trace.from_ids(name, [next(prompts) for _ in range(n_prompts)])
