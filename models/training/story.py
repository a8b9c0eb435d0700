"""Seeded stories: facts are stated once and needed again many sentences later."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import grammar as g

MAX_AGE = 480
"""Facts that were not mentioned for this many tokens count as forgotten and are not used."""
MIN_AGE = 15
"""Facts that were mentioned more recently than this are left alone."""


@dataclass
class Fact:
    """One fact of a story: its kind and the words in its slots."""

    kind: str
    words: dict[str, str]
    mentioned: int = 0
    due: int = 0


@dataclass
class Passage:
    """Tokens with, for each one, whether it answers from an earlier sentence."""

    pieces: list[str] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The plain text."""
        return "".join(self.pieces)


class Storyteller:
    """Tells one story, fact by fact and scene by scene.

    Parameters
    ----------
    rng
        The only source of chance.
    n_tokens
        About how long the story shall be.
    """

    def __init__(self, rng: random.Random, n_tokens: int) -> None:
        self.rng = rng
        self.n_tokens = n_tokens
        self.out = Passage()
        self.starts: list[int] = []
        self.facts: list[Fact] = []
        self.cast: dict[str, int] = {}
        self._recent: list[str] = []
        self._unused = {
            name: rng.sample(words, len(words))
            for name, words in g.LISTS.items()
            if name in ("name", "object", "place", "food", "pet", "job")
        }

    # -- writing ------------------------------------------------------------------------------

    def say(self, template: str, **words: str) -> None:
        """Append one sentence; slots without a given word get a random one."""
        for item in g.parse(template):
            if item.slot and item.slot not in words:
                words[item.slot] = self.rng.choice(g.LISTS[g.SLOT_LIST[item.slot]])
        pieces, answers = g.realize(template, words)
        if self.out.pieces and self.out.pieces[-1] != "\n":
            pieces[0] = " " + pieces[0]
        self.starts.append(len(self.out.pieces))
        self.out.pieces += pieces
        self.out.answers += answers
        for slot, word in words.items():
            if g.SLOT_LIST[slot] == "name" and word in self.cast:
                self.cast[word] = len(self.out.pieces)

    def pick(self, templates: tuple[str, ...], **words: str) -> None:
        """Append a sentence from one of these templates, not one that was used just now."""
        new = [template for template in templates if template not in self._recent]
        template = self.rng.choice(new or templates)
        self._recent = [*self._recent[-5:], template]
        self.say(template, **words)

    def new_paragraph(self) -> None:
        """End the line, unless it is empty."""
        if self.out.pieces and self.out.pieces[-1] != "\n":
            self.out.pieces.append("\n")
            self.out.answers.append(False)

    # -- facts --------------------------------------------------------------------------------

    def fresh(self, name: str) -> str | None:
        """Draw a word that this story has not used for a fact yet."""
        return self._unused[name].pop() if self._unused[name] else None

    def new_name(self) -> str:
        """Bring a new person into the story."""
        name = self.fresh("name")
        assert name is not None, "a story has fewer people than there are names"
        self.cast[name] = len(self.out.pieces)
        return name

    def invent(self, name: str, kind: str) -> Fact | None:
        """Invent a fact about a person; None if the words for it are used up."""
        lists = {"own": "object", "home": "place", "food": "food", "pet": "pet", "job": "job"}
        word = self.fresh(lists[kind])
        if word is None:
            return None
        words = {"N": name, g.parse(g.STATE[kind][0])[-2].slot: word}
        if kind == "own":
            words["C"] = self.rng.choice(g.LISTS["colour"])
        if kind == "pet":
            words["K"] = self.rng.choice(g.LISTS["animal"])
        return Fact(kind, words)

    def state(self, fact: Fact) -> None:
        """State a fact for the first time."""
        self.pick(g.STATE[fact.kind], **fact.words)
        self.remember(fact)
        self.facts.append(fact)

    def remember(self, fact: Fact) -> None:
        """Note that the fact stands in the text here, and when it may be needed again."""
        fact.mentioned = len(self.out.pieces)
        # Drawn evenly, so that long distances are as common as short ones.
        longest = max(MIN_AGE + 1, min(MAX_AGE - 30, self.n_tokens * 3 // 4))
        fact.due = fact.mentioned + self.rng.randint(MIN_AGE, longest)

    def introduce(self, name: str, n_facts: int) -> list[Fact]:
        """Invent facts about a person, in random order."""
        kinds = self.rng.sample(("own", "home", "food", "pet", "job"), n_facts)
        facts = [fact for kind in kinds if (fact := self.invent(name, kind))]
        for fact in list(facts):
            place = None
            if fact.kind == "own" and self.rng.random() < 0.4:
                place = self.fresh("place")
            if place:
                words = {"N": name, "O": fact.words["O"], "P": place}
                facts.insert(facts.index(fact) + 1, Fact("keep", words))
        return facts

    def usable(self) -> list[Fact]:
        """Return the facts that are due, and that the last `MAX_AGE` tokens tell."""
        now = len(self.out.pieces)
        return [f for f in self.facts if f.due <= now < f.mentioned + MAX_AGE]

    def people(self, *others: str) -> list[str]:
        """Return the people in the last `MAX_AGE` tokens, in random order, without these."""
        now = len(self.out.pieces)
        names = [n for n, at in self.cast.items() if now - at < MAX_AGE and n not in others]
        return self.rng.sample(names, len(names))

    # -- scenes -------------------------------------------------------------------------------

    def recall(self) -> None:
        """Use a fact that is due again, if there is one."""
        facts = self.usable()
        if facts:
            self.use(self.rng.choice(facts))

    def use(self, fact: Fact) -> None:
        """Use a known fact again: in a dialogue, or in passing."""
        others = self.people(fact.words["N"])
        chance = self.rng.random()
        if chance < 0.15:
            self.dialogue(fact, (g.READER_ASKS,), (g.STORY_SAYS,), {})
        elif chance < 0.6 and len(others) > 1:
            speakers = {"A": others[0], "B": others[1]}
            self.dialogue(fact, g.ASK_FRAMES, g.ANSWER_FRAMES, speakers)
        else:
            templates = [t for t in g.RECALL[fact.kind] if others or "[A]" not in t]
            self.say(
                self.rng.choice(templates), **fact.words, **dict(zip("A", others, strict=False))
            )
        self.remember(fact)

    def dialogue(
        self,
        fact: Fact,
        asks: tuple[str, ...],
        tells: tuple[str, ...],
        speakers: dict[str, str],
    ) -> None:
        """Ask for a fact and answer it."""
        question, reply = self.rng.choice(g.ASK[fact.kind])
        self.say(g.question(self.rng.choice(asks), question), **fact.words, **speakers)
        self.say(g.answer(self.rng.choice(tells), reply), **fact.words, **speakers)

    def opening(self) -> None:
        """Begin the story: with a frame, or right with the facts."""
        names = [self.new_name() for _ in range(self.rng.choice((2, 3, 3)))]
        if self.rng.random() < 0.5:
            self.pick(g.OPENING)
            self.pick(g.CAST[len(names)], **dict(zip("NAB", names, strict=False)))
            self.new_paragraph()
        facts = [self.introduce(name, self.rng.choice((1, 2, 2, 3, 3))) for name in names]
        if self.rng.random() < 0.5:
            for group in facts:
                for fact in group:
                    self.state(fact)
                if self.rng.random() < 0.5:
                    self.new_paragraph()
        else:
            # In random order, but from the front: "keeps the kite" stays behind "has a kite".
            while any(facts):
                self.state(self.rng.choice([group for group in facts if group]).pop(0))

    def arrival(self) -> None:
        """Let a new person come, with facts of their own."""
        name = self.new_name()
        self.pick(g.ARRIVAL, N=name)
        for fact in self.introduce(name, self.rng.choice((1, 2, 2, 3, 3))):
            self.state(fact)

    def scene(self) -> None:
        """Tell one paragraph: somebody goes somewhere, meets somebody, and known facts are used."""
        self.new_paragraph()
        people = self.people()
        if len(people) < 3 or (len(self.cast) < 40 and self.rng.random() < 0.15):
            return self.arrival()
        name, friend = people[:2]
        self.pick(g.SCENE, N=name)
        for _ in range(self.rng.randint(0, 2)):
            self.pick(self.rng.choice((g.ALONE, g.WEATHER)), N=name)
        if self.rng.random() < 0.4:
            self.recall()
        if self.rng.random() < 0.7:
            self.pick(g.MEET, N=name, A=friend)
            for _ in range(self.rng.randint(0, 2)):
                self.pick(g.TOGETHER, N=name, A=friend)
        for _ in range(self.rng.randint(2, 5)):
            self.recall()
        return None

    def tell(self) -> Passage:
        """Tell the whole story."""
        self.opening()
        while len(self.out.pieces) < self.n_tokens:
            self.scene()
        self.new_paragraph()
        self.pick(g.ENDING)
        return self.out

    def quiz(self) -> Passage:
        """State facts, then use them and nothing else: the densest lesson in memory."""
        names = [self.new_name() for _ in range(self.rng.randint(3, 3 + self.n_tokens // 64))]
        facts = [self.introduce(name, self.rng.choice((1, 2, 3))) for name in names]
        while any(facts) and len(self.out.pieces) < self.n_tokens // 2:
            self.state(self.rng.choice([group for group in facts if group]).pop(0))
        while len(self.out.pieces) < self.n_tokens:
            self.use(self.rng.choice(self.facts))
        return self.out


def tell(seed: str, n_tokens: int) -> Passage:
    """Tell the story that belongs to a seed.

    Parameters
    ----------
    seed
        Any text; equal seeds give equal stories.
    n_tokens
        About how long the story shall be.
    """
    return Storyteller(random.Random(seed), n_tokens).tell()
