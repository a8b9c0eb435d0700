"""Saved sequences: raw states at memory speed, and a verified container format."""

from pykvcache.state.facts import Fingerprint
from pykvcache.state.llama_files import LlamaStateFile
from pykvcache.state.methods import PartialState, StateMethods
from pykvcache.state.saved import StateInfo, describe_state
from pykvcache.state.sequence import SequenceState
from pykvcache.state.whole import ContextState

__all__ = [
    "ContextState",
    "Fingerprint",
    "LlamaStateFile",
    "PartialState",
    "SequenceState",
    "StateInfo",
    "StateMethods",
    "describe_state",
]
