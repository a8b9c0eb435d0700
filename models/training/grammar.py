"""The grammar of the stories: word lists, agreement rules and sentence templates.

A template is plain text with slots in brackets. A slot name's letter says which word list it
draws from (``[N]`` a name, ``[C]`` a colour, ...), ``[a.C]`` is the form that agrees with the
word in slot ``C``, and a trailing ``!`` marks an answer: a word that a reader can only know from
an earlier sentence. Every item of a template is exactly one token of the model's vocabulary.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GIRLS = _words(
    "Mara Anna Lily Rosa Clara Emma Nora Ella Ruby Alice Greta Ivy "
    "Lucy Mia Sara Zoe Hanna Olga Paula Vera Wanda Freya Jane Kate"
)
BOYS = _words(
    "Tom Ben Max Sam Leo Jack Oscar Felix Hugo Adam Peter Paul "
    "Finn Noah Erik Otto Karl Ivan Luke Mark Simon Theo Victor Will"
)
PREPOSITIONS = {
    "in": _words("mill barn castle cave forest valley garden tower village library kitchen cellar"),
    "by": _words("river lake sea well bridge pond gate fountain"),
    "on": _words("hill island farm ship beach cliff roof"),
    "at": _words("harbour market inn station school bakery chapel"),
}
PLACE_PREPOSITION = {noun: prep for prep, nouns in PREPOSITIONS.items() for noun in nouns}

LISTS: dict[str, tuple[str, ...]] = {
    "name": GIRLS + BOYS,
    "colour": _words(
        "red blue green yellow black white brown grey pink purple golden silver "
        "orange amber ivory indigo"
    ),
    "object": _words(
        "kite lamp drum boat book ball bell box coat hat cup key ring rope flute sword "
        "mirror clock map wagon basket blanket bottle brush candle chair doll feather fiddle "
        "hammer jar kettle ladder lantern necklace pencil pillow saddle scarf shell sled spoon "
        "stone table teapot trumpet umbrella whistle"
    ),
    "place": tuple(PLACE_PREPOSITION),
    "food": _words(
        "plums apples pears cherries berries nuts carrots beans peas onions pancakes "
        "noodles dumplings biscuits cakes pies grapes melons figs peaches eggs mushrooms "
        "potatoes tomatoes"
    ),
    "animal": _words("dog cat pony goat duck rabbit parrot hen owl otter"),
    "pet": _words(
        "Pepper Biscuit Button Clover Dusty Feather Ginger Honey Jumper Kipper Lucky Misty "
        "Nutmeg Patch Pickle Poppy Rusty Shadow Snowy Spot Sunny Tiger Toffee Whisper"
    ),
    "job": _words(
        "baker miller farmer sailor teacher painter tailor potter fisher gardener carpenter "
        "weaver doctor shepherd cook singer actor engineer inventor artist"
    ),
    "mood": _words("happy tired glad hungry cheerful sleepy curious calm brave quiet"),
    "sky": _words("blue grey clear dark bright pale"),
    "time": _words("morning evening day afternoon night"),
    "size": _words("little old quiet sleepy green sunny windy"),
    "town": _words("village town country kingdom island valley"),
}
SLOT_LIST = {
    "N": "name", "A": "name", "B": "name", "C": "colour", "O": "object", "P": "place",
    "F": "food", "K": "animal", "T": "pet", "J": "job", "M": "mood", "S": "sky",
    "D": "time", "Z": "size", "Y": "town",
}  # fmt: skip

AGREEMENT: dict[str, Callable[[str], str]] = {
    "a": lambda word: "an" if word[0] in "aeiou" else "a",
    "at": PLACE_PREPOSITION.__getitem__,
    "she": lambda name: "she" if name in GIRLS else "he",
    "She": lambda name: "She" if name in GIRLS else "He",
}

# How a fact is stated, once per kind of fact.
STATE: dict[str, tuple[str, ...]] = {
    "own": (
        "[N] has [a.C] [C] [O].",
        "[N] owns [a.C] [C] [O].",
        "The best thing that [N] has is [a.C] [C] [O].",
    ),
    "home": (
        "[N] lives [at.P] the [P].",
        "[N] has a home [at.P] the [P].",
        "The home of [N] is [at.P] the [P].",
    ),
    "food": ("[N] likes [F].", "[N] loves [F].", "[N] likes [F] best of all."),
    "pet": (
        "[N] has [a.K] [K] called [T].",
        "[N] looks after [a.K] [K] called [T].",
        "[N]'s [K] is called [T].",
    ),
    "job": ("[N] is [a.J] [J].", "[N] works as [a.J] [J]."),
    "keep": ("[N] keeps the [O] [at.P] the [P].", "[N] hides the [O] [at.P] the [P]."),
}
# Questions about a fact, each with its answer, which names what it speaks of first.
ASK: dict[str, tuple[tuple[str, str], ...]] = {
    "own": (
        ("Who has the [C] [O]?", "The [C] [O] belongs to [N!]."),
        ("What does [N] have?", "[N] has [a.C!] [C!] [O!]."),
        ("What colour is [N]'s [O]?", "[N]'s [O] is [C!]."),
    ),
    "home": (
        ("Where does [N] live?", "[N] lives [at.P!] the [P!]."),
        ("Who lives [at.P] the [P]?", "The [P] is the home of [N!]."),
    ),
    "food": (
        ("What does [N] like?", "[N] likes [F!]."),
        ("Who likes [F]?", "The one who likes [F] is [N!]."),
    ),
    "pet": (
        ("What is [N]'s [K] called?", "[N]'s [K] is called [T!]."),
        ("Who looks after [T]?", "[T] belongs to [N!]."),
    ),
    "job": (
        ("What is [N]'s work?", "[N] is [a.J!] [J!]."),
        ("Who is the [J]?", "The [J] is [N!]."),
    ),
    "keep": (("Where is the [O]?", "The [O] is [at.P!] the [P!]."),),
}
ASK_FRAMES = ('[A] asks [B], "Q"', '[A] asks, "Q"', '[A] wants to know, "Q"')
ANSWER_FRAMES = ('[B] says, "R."', '[B] answers, "R."', '"R," says [B].')
READER_ASKS = 'The reader asks, "Q"'
STORY_SAYS = 'The story says, "R."'
# A fact that is used again in the middle of the story.
RECALL: dict[str, tuple[str, ...]] = {
    "own": (
        "[N] plays with the [C!] [O!].",
        "[N] shows [A] the [C!] [O!].",
        "[N] is proud of the [C!] [O!].",
    ),
    "home": (
        "At last [N] is home [at.P!] the [P!].",
        "[A] visits [N] [at.P!] the [P!].",
        "[N] sleeps well [at.P!] the [P!].",
    ),
    "food": ("[A] brings [N] some [F!].", "[N] eats some [F!]."),
    "pet": ("[N] plays with [T!] the [K!].", "[N] calls, and [T!] the [K!] comes running."),
    "job": ("[N] the [J!] works all day.", "[A] thanks [N] the [J!]."),
    "keep": ("[N] finds the [O!] [at.P!] the [P!].",),
}
OPENING = (
    "Once upon a time there was [a.Z] [Z] [Y].",
    "Once upon a time there was [a.Z] [Z] [Y] by the sea.",
    "Once upon a time there was [a.Z] [Z] [Y] in the hills.",
)
CAST = {
    2: ("This is the story of [N] and [A].", "[N] and [A] were good friends."),
    3: ("This is the story of [N], [A] and [B].", "[N], [A] and [B] were good friends."),
}
ARRIVAL = ("One [D] a stranger called [N] comes to stay.", "Soon [N] comes to stay.")
SCENE = (
    "One [D] [N] walks to the [P].",
    "The next [D] [N] runs to the [P].",
    "Later that day [N] goes to the [P].",
    "Early in the morning [N] goes to the [P].",
    "After supper [N] walks to the [P].",
)
MEET = (
    "[N] meets [A] on the way.",
    "[A] is there too.",
    "[N] waves to [A].",
    "There [N] meets [A].",
    "[A] comes along.",
)
ALONE = (
    "[She.N] is [M] today.",
    "[N] is [M].",
    "On the way [she.N] sings a song.",
    "[She.N] picks some flowers.",
    "[She.N] stops and looks at the sky.",
    "[N] whistles a tune.",
    "[She.N] counts the clouds.",
    "[She.N] watches the birds.",
    "[N] laughs out loud.",
    "[She.N] thinks of a good joke.",
    "[N] dreams of the sea.",
    "[She.N] finds an old coin in the grass.",
    "[She.N] hears a strange sound.",
    "[N] is not in a hurry.",
    "[She.N] writes a long letter.",
    "[She.N] sees a fox between the trees.",
    "[N] takes off both shoes.",
    "[N] feels [M].",
)
TOGETHER = (
    "They sit down and rest.",
    "They share some bread.",
    "They tell each other a story.",
    "They laugh for a long time.",
    "They dance and sing.",
    "[N] and [A] talk for a long time.",
    "[N] gives [A] a smile.",
    "They throw stones into the water.",
    "They look at the stars.",
    "They build a fire and warm their hands.",
    "They play until it is dark.",
    "[N] tells [A] a secret.",
    "They drink some hot tea.",
    "[N] and [A] are [M] together.",
    "They watch the ships go by.",
    "[A] makes [N] laugh.",
    "They walk back without a word.",
)
WEATHER = (
    "The sun is warm.",
    "The sky is [S].",
    "A cold wind blows.",
    "The rain falls softly.",
    "The birds sing.",
    "Snow covers the ground.",
    "The grass is wet.",
    "It is very quiet.",
    "The leaves dance in the wind.",
    "The bells ring far away.",
    "The moon is bright.",
    "The air smells of bread.",
    "Fog comes up from the river.",
    "The water is cold and clear.",
    "Somewhere a dog barks.",
    "The clouds are [S].",
)
ENDING = ("And that is the end of the story.", "The end.", "And so they all live in peace.")


@dataclass(frozen=True)
class Item:
    """One token of a template: a fixed word (``slot`` is empty) or a slot."""

    space: str
    word: str
    slot: str = ""
    rule: str = ""
    is_answer: bool = False


_ITEM = re.compile(r"( ?)(?:\[(?:(\w+)\.)?(\w+)(!?)\]|([A-Za-z]+)|('s)|([^\sA-Za-z\[]+))")


@cache
def parse(template: str) -> tuple[Item, ...]:
    """Split a template into its items."""
    items = []
    for space, rule, slot, mark, *words in _ITEM.findall(template):
        word = "".join(words)
        items.append(Item(space, word, slot, rule, bool(mark)))
    return tuple(items)


def realize(template: str, bindings: dict[str, str]) -> tuple[list[str], list[bool]]:
    """Fill a template; return its tokens, with their spaces, and which of them are answers."""
    pieces, answers = [], []
    for item in parse(template):
        word = item.word
        if item.slot:
            word = bindings[item.slot]
            if item.rule:
                word = AGREEMENT[item.rule](word)
        pieces.append(item.space + word)
        answers.append(item.is_answer)
    return pieces, answers


def question(frame: str, text: str) -> str:
    """Put a question, quoted, into a frame."""
    return frame.replace("Q", text)


def answer(frame: str, text: str) -> str:
    """Put an answer, quoted, into a frame."""
    return frame.replace("R", text.rstrip("."))


def all_templates() -> list[str]:
    """Return every sentence template of the grammar, dialogue included."""
    plain = itertools.chain(
        *STATE.values(), *RECALL.values(), *CAST.values(),
        OPENING, ARRIVAL, SCENE, MEET, ALONE, TOGETHER, WEATHER, ENDING,
    )  # fmt: skip
    pairs = list(itertools.chain(*ASK.values()))
    asked = (question(f, q) for f in (*ASK_FRAMES, READER_ASKS) for q, _ in pairs)
    told = (answer(f, r) for f in (*ANSWER_FRAMES, STORY_SAYS) for _, r in pairs)
    return [*plain, *asked, *told]
