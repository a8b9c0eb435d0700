"""A sequence at rest: raw states at memory speed, and the container that proves what it holds."""

from pykvcache.state.methods import StateMethods

__all__ = ["StateMethods"]
