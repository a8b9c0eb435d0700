"""The roots of a tree, one for each namespace."""

from __future__ import annotations

from pykvcache.prefix.runs import Run

__all__ = ["Roots", "name_bytes"]


def name_bytes(name: str) -> int:
    """Return what a name takes at most: Python may keep it in UTF-8, too, from any time on."""
    return 60 + (len(name) if name.isascii() else 8 * len(name))


class Roots(dict[str, Run]):
    """Roots by namespace, and how many bytes the names take: they may be long.

    Only `keep`, `leave` and `forget` change it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name_bytes = 0

    def keep(self, run: Run) -> None:
        """Add what is a root, where its namespace has none."""
        if run.namespace is not None and run.namespace not in self:
            self[run.namespace] = run
            self.name_bytes += name_bytes(run.namespace)

    def leave(self, root: Run) -> None:
        """Forget a root that nothing follows or holds."""
        if root.namespace is None or root.children or root.held:
            return
        if self.get(root.namespace) is root:
            self.forget(root.namespace)

    def forget(self, namespace: str) -> None:
        """Let a namespace have no root."""
        if self.pop(namespace, None) is not None:
            self.name_bytes -= name_bytes(namespace)

    def count_again(self) -> None:
        """Count the names after a change that was cut short."""
        self.name_bytes = sum(map(name_bytes, self))
