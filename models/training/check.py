"""The grammar checker: accepts a sentence if and only if the grammar can produce it."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from functools import lru_cache

from grammar import AGREEMENT, LISTS, SLOT_LIST, Item, all_templates, parse

_PIECE = re.compile(r" ?(?:[A-Za-z]+|'s|[^\sA-Za-z]+)")
# A sentence ends with a stop, and with the quote that the stop closes, before white space.
_SENTENCE_END = re.compile(r'(?<=[.?!])(?=\s)|(?<=[.?!]")(?=\s)')

Pattern = tuple[tuple[Item, frozenset[str]], ...]


def _variants(template: str) -> list[Pattern]:
    """Make one pattern per way of agreement: ``[a.C] [C]`` gives "a red", "an orange"."""
    items = parse(template)
    rules = defaultdict(set)
    for item in items:
        if item.slot:
            rules[item.slot].add(item.rule)
    choices = []
    for slot, used in rules.items():
        groups: dict[tuple[tuple[str, str], ...], set[str]] = defaultdict(set)
        for word in LISTS[SLOT_LIST[slot]]:
            forms = tuple((rule, AGREEMENT[rule](word)) for rule in sorted(used) if rule)
            groups[forms].add(word)
        choices.append([(slot, dict(forms), frozenset(ws)) for forms, ws in groups.items()])
    patterns = []
    for chosen in itertools.product(*choices):
        by_slot = {slot: (forms, words) for slot, forms, words in chosen}
        pattern = []
        for item in items:
            if not item.slot:
                allowed = frozenset([item.word])
            elif item.rule:
                allowed = frozenset([by_slot[item.slot][0][item.rule]])
            else:
                allowed = by_slot[item.slot][1]
            pattern.append((item, allowed))
        patterns.append(tuple(pattern))
    return patterns


@lru_cache(maxsize=1)
def _index() -> dict[tuple[int, str], list[tuple[str, Pattern]]]:
    index: dict[tuple[int, str], list[tuple[str, Pattern]]] = defaultdict(list)
    for template in dict.fromkeys(all_templates()):
        for pattern in _variants(template):
            for first in pattern[0][1]:
                index[len(pattern), first].append((template, pattern))
    return index


def _bind(pattern: Pattern, pieces: list[str]) -> dict[str, str] | None:
    bindings: dict[str, str] = {}
    for position, ((item, allowed), piece) in enumerate(zip(pattern, pieces, strict=True)):
        word = piece.lstrip(" ")
        if word not in allowed or (position and len(piece) - len(word) != len(item.space)):
            return None
        if item.slot and not item.rule and bindings.setdefault(item.slot, word) != word:
            return None
    named = [word for slot, word in bindings.items() if SLOT_LIST[slot] == "name"]
    return bindings if len(set(named)) == len(named) else None


def match(sentence: str) -> tuple[str, dict[str, str]] | None:
    """Parse one sentence.

    Parameters
    ----------
    sentence
        The text of one sentence, without white space around it.

    Returns
    -------
    tuple[str, dict[str, str]] | None
        The template that produces it and the words in its slots; None if there is no such
        template.
    """
    pieces = _PIECE.findall(sentence)
    if not pieces or "".join(pieces) != sentence:
        return None
    for template, pattern in _index().get((len(pieces), pieces[0]), ()):
        bindings = _bind(pattern, pieces)
        if bindings is not None:
            return template, bindings
    return None


def is_grammatical(sentence: str) -> bool:
    """Whether the grammar can produce this sentence."""
    return match(sentence) is not None


def split_sentences(text: str) -> list[str]:
    """Cut a text into sentences; an unfinished last one is kept."""
    parts = (part.strip() for line in text.split("\n") for part in _SENTENCE_END.split(line))
    return [part for part in parts if part]
