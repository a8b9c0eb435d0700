"""Whether a text agrees with itself: each claim in it is backed by a fact stated before."""

from __future__ import annotations

from dataclasses import dataclass

import grammar as g
from check import match, split_sentences


@dataclass
class Verdict:
    """Counts over a text: its sentences, those in the grammar, its claims, those backed."""

    sentences: int = 0
    grammatical: int = 0
    claims: int = 0
    backed: int = 0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.sentences + other.sentences,
            self.grammatical + other.grammatical,
            self.claims + other.claims,
            self.backed + other.backed,
        )


_STATED = {template: kind for kind, templates in g.STATE.items() for template in templates}
_USED = {template: kind for kind, templates in g.RECALL.items() for template in templates}
_ASKED = {
    g.question(frame, question): kind
    for kind, pairs in g.ASK.items()
    for question, _ in pairs
    for frame in (*g.ASK_FRAMES, g.READER_ASKS)
}
_TOLD = {
    g.answer(frame, reply)
    for pairs in g.ASK.values()
    for _, reply in pairs
    for frame in (*g.ANSWER_FRAMES, g.STORY_SAYS)
}


def judge(text: str, told_before: str = "") -> Verdict:
    """Judge each sentence of a text.

    Parameters
    ----------
    text
        What to judge.
    told_before
        Text in front of it, whose facts are known but which is not judged.
    """
    known: list[tuple[str, dict[str, str]]] = []
    asked: tuple[str, dict[str, str]] | None = None
    verdict = Verdict()
    n_before = len(split_sentences(told_before))
    for number, sentence in enumerate(split_sentences(told_before) + split_sentences(text)):
        counts = number >= n_before
        verdict.sentences += counts
        parsed = match(sentence)
        if parsed is None:
            asked = None
            continue
        verdict.grammatical += counts
        template, bindings = parsed
        words = {slot: word for slot, word in bindings.items() if slot not in "AB"}
        if template in _ASKED:
            asked = _ASKED[template], words
            continue
        if template in _STATED:
            kind = _STATED[template]
            key = "O" if kind == "keep" else "N"
            clash = [w for k, w in known if k == kind and w[key] == words[key] and w != words]
            verdict.claims += counts and bool(clash)
            known.append((kind, words))
        elif template in _USED or (template in _TOLD and asked):
            if template in _TOLD:
                assert asked is not None
                kind, words = asked[0], asked[1] | words
            else:
                kind = _USED[template]
            backed = any(k == kind and words.items() <= w.items() for k, w in known)
            verdict.claims += counts
            verdict.backed += counts and backed
        asked = None
    return verdict
