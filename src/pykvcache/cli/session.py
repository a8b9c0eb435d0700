"""The file that a chat is kept in."""

from __future__ import annotations

import os

from pykvcache.cli.talk import Talk
from pykvcache.errors import KvCacheError

__all__ = ["FileFacts", "Session", "file_facts"]

#: What changes when a file is written or replaced.
FileFacts = tuple[int, int, int]


class Session:
    """A file, and whether it holds a talk as it is now.

    Parameters
    ----------
    path
        The file; it need not be there yet.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._facts = file_facts(path)
        self._holds: object = None
        self._is_writing = False

    @property
    def exists(self) -> bool:
        """Whether the file is there."""
        return os.path.exists(self.path)

    def is_at(self, path: str) -> bool:
        """Tell whether that is its file, by whatever name."""
        facts = file_facts(path)
        return facts is not None and facts == file_facts(self.path)

    def holds(self, talk: Talk) -> bool:
        """Tell whether the file has this talk, with all that was said."""
        is_as_was = self._facts is not None and self._facts == file_facts(self.path)
        return is_as_was and self._holds is not None and self._holds == talk.snapshot()

    def was_read(self, talk: Talk, facts: FileFacts | None) -> None:
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
        if not self._is_writing and file_facts(self.path) not in (None, self._facts):
            raise FileExistsError(
                f"another program has written {self.path} meanwhile, and that stays: "
                "/save OTHER keeps this talk"
            )
        self._holds, self._is_writing = None, True
        try:
            talk.save(self.path)
        except (OSError, KvCacheError):
            self._is_writing = False  # nothing was written
            raise
        # After a Ctrl-C before this the file may be ours already, and is written again.
        self._facts, self._is_writing = file_facts(self.path), False
        self._holds = talk.snapshot()


def file_facts(path: str) -> FileFacts | None:
    """Return the facts of a file; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
