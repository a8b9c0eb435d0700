"""What is kept of a tree of blocks after a call that was cut short in the middle."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from pykvcache.prefix.alike import TokenKeys
from pykvcache.prefix.pieces import is_whole
from pykvcache.prefix.runs import Run

if TYPE_CHECKING:
    from pykvcache.prefix.tree import BlockTree

__all__ = ["rebuild"]


def rebuild(tree: BlockTree, needed: Container[Run]) -> list[Run]:
    """Take out what is not whole, and count the rest again; nothing is held then.

    Parameters
    ----------
    tree
        In which something was cut short.
    needed
        Roots to keep, whatever follows them.

    Returns
    -------
    list of Run
        All that is left, those before others first.
    """
    runs: list[Run] = []
    for namespace, root in list(tree._roots.items()):
        waiting = [root]
        while waiting:
            run = waiting.pop()
            run.held = 0
            if not run.is_root:
                runs.append(run)
            _keep_whole(run)
            waiting += run.children.values()
            if run.checkpoint is not None:
                waiting.append(run.checkpoint)
        if not root.children and root not in needed:
            tree._roots.forget(namespace)
    tree._roots.count_again()
    tree.n_runs = len(runs)
    tree.n_blocks = sum(run.n_blocks for run in runs if not run.is_checkpoint)
    tree.n_bytes = sum(run.n_bytes + tree.run_bytes for run in runs)
    return runs


def _keep_whole(run: Run) -> None:
    """Take out of what follows a run whatever is not whole."""
    children: TokenKeys[Run] = TokenKeys()
    for key, child in list(run.children.items()):
        if _follows(child, run) and key == child.tokens[: child.step]:
            children[key] = child
        else:
            _take_out(child)
    point = run.checkpoint
    if point is not None and not _follows(point, run):
        _take_out(point)
        run.checkpoint = None
    run.children = children


def _follows(run: Run, parent: Run) -> bool:
    """Whether a run is whole, and the next after another one."""
    n = run.n_blocks
    return (
        run.parent is parent
        and run.start == parent.end
        and (run.is_checkpoint or run._start_key == parent.end_key)
        and n == len(run.payloads) > 0
        and all(is_whole(payload) for payload in run.payloads)
        and (run.is_checkpoint or len(run.tokens) >= n * run.step)
        and (run._names is None or len(run._names) == n)
    )


def _take_out(top: Run) -> None:
    """Let all that follows a run be in no tree any more."""
    waiting, seen = [top], set[Run]()
    while waiting:
        run = waiting.pop()
        if run not in seen:
            seen.add(run)
            run.parent = None
            waiting += run.children.values()
            if run.checkpoint is not None:
                waiting.append(run.checkpoint)
