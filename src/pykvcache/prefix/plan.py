"""Offer, Plan and Hold: what a sequence can give, what the tree lacks, what is in use."""

from __future__ import annotations

from dataclasses import dataclass, field

from pykvcache._ranges import Range
from pykvcache.prefix.node import Component, EndState, Node

__all__ = ["Hold", "Offer", "Plan"]


@dataclass(slots=True)
class Hold:
    """What a sequence or a pin keeps in the tree, until it is released.

    Attributes
    ----------
    node
        The node that it ends in: its attention cells, and so all those before them, are kept.
    window_first
        First token whose window cells are kept; the end of the node where none are.
    """

    node: Node
    window_first: int
    state: Component | None


@dataclass
class Offer:
    """What a closing sequence can give for its first n tokens, whose attention cells can be read.

    Attributes
    ----------
    windows
        Tokens whose window cells can be read.
    states
        States by the number of tokens that they are after.
    ends
        Numbers of tokens that prompts are likely to go on from, before the last: the prompt's end,
        boundaries of messages. Their windows and states are kept before spare ones.
    priority
        Of the sequence: lower ones leave first.
    """

    n: int
    windows: list[Range] = field(default_factory=list)
    states: dict[int, EndState] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    priority: int = 0


@dataclass
class Plan(Offer):
    """What of an offer is to be inserted: the windows and states that are missing and can fit.

    ``slack`` tokens before its windows are kept with them. Other prompts go on differently after
    ``parting`` tokens; 0 where that is not known.
    """

    slack: int = 0
    parting: int = 0
