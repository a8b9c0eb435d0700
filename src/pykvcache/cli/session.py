"""The file that a chat is kept in."""

from __future__ import annotations

import os

from pykvcache.cli.talk import Talk

__all__ = ["Session"]

_Facts = tuple[int, int, int]


class Session:
    """A file, and whether it holds a talk as it is now.

    Parameters
    ----------
    path
        The file; it need not be there yet.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._facts = _facts(path)
        self._holds: object = None

    @property
    def exists(self) -> bool:
        """Whether the file is there."""
        return os.path.exists(self.path)

    def is_at(self, path: str) -> bool:
        """Tell whether that is its file, by whatever name."""
        facts = _facts(path)
        return facts is not None and facts == _facts(self.path)

    def holds(self, talk: Talk) -> bool:
        """Tell whether the file has this talk, with all that was said."""
        return self._holds == talk.snapshot() and self._facts == _facts(self.path)

    def was_read(self, talk: Talk) -> None:
        """Note that a talk is what the file holds."""
        self._facts, self._holds = _facts(self.path), talk.snapshot()

    def save(self, talk: Talk) -> None:
        """Let the file hold a talk.

        Raises
        ------
        OSError
            It cannot be written; or another program has written it meanwhile, whose talk stays.
        """
        if self.holds(talk):
            return
        if _facts(self.path) not in (None, self._facts):
            raise FileExistsError(
                f"another program has written {self.path} meanwhile, and that stays: "
                "/save OTHER keeps this talk"
            )
        try:
            talk.save(self.path)
        finally:  # Ctrl-C may come when it is written already
            self._facts = _facts(self.path)
        self._holds = talk.snapshot()


def _facts(path: str) -> _Facts | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
