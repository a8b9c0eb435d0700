"""One server of a cluster: what was moved is asked for where it is now."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pykvcache.prefix.stores._replies import place
from pykvcache.prefix.stores.redis import MANY, RedisStore, groups

__all__ = ["ClusterNode"]

# The answer to a command that nobody answered: nothing there, stored or removed.
_NOTHING = 0


class _Ahead(threading.local):
    """What this thread has sent to a node, and has not received the answers of."""

    commands: list[tuple[Any, ...]] | None = None
    connection: Any = None


class ClusterNode(RedisStore):
    """A `RedisStore` that has some slots of a cluster, and goes on to the nodes that have others.

    Parameters
    ----------
    url, options
        As in `RedisStore`.
    host
        Its name among the nodes, with its port.
    redirected
        Is called with a server's answer that a block is elsewhere and the node that said so, and
        returns the node that has it; None where there is no such.
    """

    def __init__(
        self,
        url: str,
        host: str,
        redirected: Callable[[Any, ClusterNode], ClusterNode | None],
        **options: Any,
    ) -> None:
        self.host = host
        self._ahead = _Ahead()
        self._of_cluster = weakref.WeakMethod(redirected)
        super().__init__(url, **options)

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer, and is left alone just now."""
        return self._reads.is_open

    def slots(self) -> Any:
        """Return what it says to ``CLUSTER SLOTS``; None where it does not answer."""
        answers = self._ask([("CLUSTER", "SLOTS")])
        return answers[0] if answers else None

    def _redirected(self, answer: Any) -> ClusterNode | None:
        call = self._of_cluster()
        return None if call is None else call(answer, self)

    def _of_keys(self, command: str, keys: Sequence[bytes]) -> list[tuple[Any, ...]]:
        # No command may have keys of several slots.
        return self._each(command, keys)

    # Requests to several nodes: all are sent before the first is received ---------------

    def ahead(self, command: str, keys: Sequence[bytes], views: Sequence[memoryview] = ()) -> None:
        """Send the first request of what this thread is about to ask for.

        A node that did not answer before is asked in its turn, as its breaker says.
        """
        if self._closed or self._reads.has_failed:
            return
        first = list(keys[:MANY])
        if views:
            first = [key for key, _ in next(groups(list(zip(keys, views, strict=True))))]
        commands = self._each(command, first)

        def send() -> None:
            # What fails at once is tried again in its turn.
            with contextlib.suppress(self._redis.ConnectionError, ConnectionError):
                connection = super(ClusterNode, self)._asked(commands)
                self._ahead.commands, self._ahead.connection = commands, connection

        self._guarded(send, time.monotonic() + self._timeout)

    def drop(self) -> None:
        """Give up what was sent and not received."""
        if self._ahead.connection is not None:
            self._done(self._take(), is_usable=False)

    def _take(self) -> Any:
        connection = self._ahead.connection
        self._ahead.commands = self._ahead.connection = None
        return connection

    def _asked(self, commands: list[tuple[Any, ...]]) -> Any:
        return self._take() if commands == self._ahead.commands else super()._asked(commands)

    def _answers(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Send commands, or take what was sent; return the answers, errors among them."""
        if commands != self._ahead.commands:
            return super()._execute(commands, errors=True)
        connection, is_usable = self._take(), False
        answers: list[Any] = []
        try:
            for _ in commands:
                try:
                    answers.append(connection.read_response())
                except self._redis.ResponseError as error:
                    answers.append(error)
            is_usable = True
        except (self._redis.ConnectionError, ConnectionError):
            return super()._execute(commands, errors=True)
        finally:
            self._done(connection, is_usable=is_usable)
        return answers

    # What is elsewhere ------------------------------------------------------------------

    def _execute(self, commands: list[tuple[Any, ...]], *, errors: bool) -> list[Any]:
        answers = self._answers(commands)
        elsewhere: dict[tuple[ClusterNode | None, bool], list[int]] = {}
        for i, answer in enumerate(answers):
            if isinstance(answer, self._redis.exceptions.AskError):
                moved = isinstance(answer, self._redis.exceptions.MovedError)
                elsewhere.setdefault((self._redirected(answer), moved), []).append(i)
        until = self._deadline.until
        for (node, moved), which in elsewhere.items():
            if node is None or node is self:
                self.counters.add(failed=1, error=answers[which[0]])
                found = [_NOTHING] * len(which)
            else:
                found = node._follow([commands[i] for i in which], until, moved=moved)
            for i, answer in zip(which, found, strict=True):
                answers[i] = answer
        for answer in answers:
            if isinstance(answer, Exception) and not errors:
                raise answer
        return answers

    def _not_understood(
        self, commands: list[tuple[Any, ...]], views: list[memoryview]
    ) -> tuple[list[int], bool]:
        return place(self._execute(commands, errors=False), views)

    def _follow(self, commands: list[tuple[Any, ...]], until: float, *, moved: bool) -> list[Any]:
        """Answer commands that another node has sent here, each; no further than this."""
        execute, asked = super()._execute, commands
        if not moved:
            # The slot is on its way here: each command has to say that it knows.
            asked = [one for command in commands for one in (("ASKING",), command)]
        found: list[Any] = []
        if self._may_ask():
            until = min(until, time.monotonic() + self._timeout)
            found = self._guarded(lambda: execute(asked, errors=True), until) or []
        found = found if moved else found[1::2]
        if error := next((one for one in found if isinstance(one, Exception)), None):
            self._guarded(lambda: _fail(error), until)
        found = [_NOTHING if isinstance(one, Exception) else one for one in found]
        return found or [_NOTHING] * len(commands)


def _fail(error: Exception) -> None:
    raise error
