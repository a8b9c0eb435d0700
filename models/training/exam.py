"""Examination questions: a story, and a question about a fact that it stated long before."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import grammar as g
from story import Fact, Storyteller

TOLERANCE = 4
"""By how many tokens a distance may miss the one that was asked for."""


@dataclass(frozen=True)
class Case:
    """One question. `story`, `question`, `answer` and `rest` follow one another without a gap."""

    story: str
    question: str
    answer: str
    rest: str
    fact: Fact
    fact_span: tuple[int, int]
    """Where in the story's tokens, counted from 0 without `<s>`, the fact is stated."""
    distance: int
    """Tokens from the end of the statement to the first token of the answer."""


def _question(teller: Storyteller, fact: Fact) -> tuple[list[str], list[str], list[str]]:
    """Ask for a fact; return what is given, the answer, and what follows it, as tokens."""
    rng = teller.rng
    speakers = [name for name in teller.cast if name != fact.words["N"]]
    asked, reply = rng.choice(g.ASK[fact.kind])
    if len(speakers) > 1:
        ask, tell = rng.choice(g.ASK_FRAMES), rng.choice(g.ANSWER_FRAMES)
    else:
        ask, tell = g.READER_ASKS, g.STORY_SAYS
    words = fact.words | dict(zip("AB", speakers, strict=False))
    given, _ = g.realize(g.question(ask, asked), words)
    told, marks = g.realize(g.answer(tell, reply), words)
    told[0] = " " + told[0].lstrip(" ")
    first = marks.index(True)
    last = len(marks) - marks[::-1].index(True)
    return given + told[:first], told[first:last], told[last:]


def _attempt(rng: random.Random, distance: int) -> Case | None:
    teller = Storyteller(rng, distance + 200)
    teller.opening()
    in_two_facts = {f.words["O"] for f in teller.facts if f.kind == "keep"}
    targets = [f for f in teller.facts if f.kind != "own" or f.words["O"] not in in_two_facts]
    if not targets:
        return None
    fact = rng.choice(targets)
    fact.due = sys.maxsize
    stated = fact.mentioned
    given, answer, rest = _question(teller, fact)
    while len(teller.out.pieces) < stated + distance:
        teller.scene()
    pieces = teller.out.pieces
    # The story is cut where the distance fits best, but not between a question and its answer.
    cuts = [at for at in teller.starts if at >= stated and not pieces[at - 1].endswith('?"')]
    cut = min(cuts, key=lambda at: abs(at + len(given) - stated - distance))
    reached = cut + len(given) - stated
    if abs(reached - distance) > TOLERANCE:
        return None
    if pieces[cut - 1] != "\n":
        given[0] = " " + given[0]
    start = max(at for at in teller.starts if at < stated)
    return Case(
        story="".join(pieces[:cut]),
        question="".join(given),
        answer="".join(answer),
        rest="".join(rest),
        fact=fact,
        fact_span=(start, stated),
        distance=reached,
    )


def recall_case(seed: str, distance: int) -> Case:
    """Return the question that belongs to a seed.

    Parameters
    ----------
    seed
        Any text; equal seeds give equal questions.
    distance
        How many tokens shall lie between the fact and the answer, give or take `TOLERANCE`.
    """
    rng = random.Random(f"{seed}/{distance}")
    while True:
        case = _attempt(rng, distance)
        if case is not None:
            return case
