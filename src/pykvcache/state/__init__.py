"""A sequence at rest: raw states at memory speed, and the container that proves what it holds."""

from pykvcache.state.facts import Fingerprint
from pykvcache.state.methods import StateMethods
from pykvcache.state.partial import PartialState
from pykvcache.state.saved import StateInfo, describe_state
from pykvcache.state.sequence import SequenceState
from pykvcache.state.whole import ContextState

__all__ = [
    "ContextState",
    "Fingerprint",
    "PartialState",
    "SequenceState",
    "StateInfo",
    "StateMethods",
    "describe_state",
]
