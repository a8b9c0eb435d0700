"""The file that a chat is kept in."""

from __future__ import annotations

import os
from contextlib import suppress

from pykvcache._arguments import FileId, file_id
from pykvcache.cli.talk import Talk

__all__ = ["Session", "facts_of"]


class Session:
    """A file, and whether it holds a talk as it is now.

    Parameters
    ----------
    path
        The file; it need not be there yet.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._facts = facts_of(path)
        self._holds: object = None

    @property
    def exists(self) -> bool:
        """Whether the file is there."""
        return os.path.exists(self.path)

    def is_at(self, path: str) -> bool:
        """Tell whether that is its file, by whatever name."""
        facts = facts_of(path)
        return facts is not None and facts == facts_of(self.path)

    def holds(self, talk: Talk) -> bool:
        """Tell whether the file has this talk, with all that was said."""
        is_as_was = self._facts is not None and self._facts == facts_of(self.path)
        return is_as_was and self._holds is not None and self._holds == talk.snapshot()

    def was_read(self, talk: Talk, facts: FileId | None) -> None:
        """Note that a talk is what the file held when it had those facts."""
        self._facts, self._holds = facts, talk.snapshot()

    def save(self, talk: Talk) -> None:
        """Let the file hold a talk.

        Raises
        ------
        OSError
            It cannot be written; or another program has written it meanwhile, whose talk stays.
        """
        if self.holds(talk):
            return
        if facts_of(self.path) not in (None, self._facts):
            raise FileExistsError(
                f"another program has written {self.path} meanwhile, and that stays: "
                "/save OTHER keeps this talk"
            )
        self._holds = None
        try:
            talk.save(self.path)
        finally:  # Ctrl-C comes out of it when the file is written
            self._facts = facts_of(self.path)
        self._holds = talk.snapshot()


def facts_of(path: str) -> FileId | None:
    """Return what changes when a file is written or replaced; None where there is none."""
    with suppress(OSError):
        return file_id(path)
    return None
