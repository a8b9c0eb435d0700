"""``pykvcache cache``: the blocks in the tiers of prefix caches."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from pykvcache.cli.options import json_option, option
from pykvcache.cli.options import number as number_of
from pykvcache.cli.terminal import is_terminal, table

if TYPE_CHECKING:
    from pykvcache.prefix.stores import BlockStore, Rejection

__all__ = ["cache"]

WHERE = click.argument("where", metavar="PATH_OR_URL")
JSON = json_option("Write JSON.")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Return the number of bytes of a size such as 500M or 10G."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?B)?", value, re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a size such as 500M or 10G")
    return int(found[1]) * _UNITS[found[2].upper()]


@click.group(short_help="Inspect, check and trim the tiers of prefix caches.")
def cache() -> None:
    """Inspect, check and trim the tiers of prefix caches: folders, Redis and Valkey, buckets.

    PATH_OR_URL is a tier of `PrefixCache(ctx, tiers=[...])`: a folder, redis://host,
    s3://bucket/prefix. Other processes may use it at the same time.
    """


@cache.command("ls")
@WHERE
@option(
    "-n --number", "Number of blocks to list; 0 for all.", type=number_of(0, 2**31 - 1), default=20
)
@JSON
def list_blocks(where: str, number: int, as_json: bool) -> None:
    """List blocks, the most recently used first."""
    with _open(where, changes=False) as store:
        found = sorted(store.entries(), key=lambda entry: -entry.used)
    shown = found[:number] if number > 0 else found
    if as_json:
        facts = [{"key": e.key.hex(), "bytes": e.size, "used": e.used} for e in shown]
        click.echo(json.dumps(facts, indent=1))
        return
    for entry in shown:
        click.echo(f"{entry.key.hex()[:16]}  {entry.size:>12,}  {_ago(entry.used)}")
    if len(shown) < len(found):
        click.echo(f"and {len(found) - len(shown):,} more")


@cache.command("du")
@WHERE
@JSON
def disk_usage(where: str, as_json: bool) -> None:
    """Show the number of blocks and their bytes."""
    with _open(where, changes=False) as store:
        found = list(store.entries())
    times, n_bytes = [entry.used for entry in found], sum(entry.size for entry in found)
    if as_json:
        facts: dict[str, float | None] = {"n_blocks": len(found), "n_bytes": n_bytes}
        facts |= {"oldest": min(times, default=None), "newest": max(times, default=None)}
        click.echo(json.dumps(facts, indent=1))
        return
    rows: list[tuple[str, object]] = [("blocks", len(found)), ("bytes", n_bytes)]
    if times:
        rows.append(("least recently used", _ago(min(times))))
        rows.append(("most recently used", _ago(max(times))))
    table(rows)


@cache.command("trim")
@WHERE
@click.argument("max_bytes", metavar="SIZE", callback=_size)
def trim_to(where: str, max_bytes: int) -> None:
    """Remove blocks until at most SIZE (such as 500M or 10G) is left.

    The least recently used are removed first. For example: pykvcache cache trim ~/.cache/blocks 10G
    """
    with _open(where) as store:
        removed = store.trim(max_bytes)
    click.echo(f"{len(removed):,} blocks removed")


@cache.command("verify")
@WHERE
@click.option("--remove", is_flag=True, help="Remove damaged blocks.")
def verify_all(where: str, remove: bool) -> None:
    """Read and check every block.

    The exit code is 1 if a block is damaged. The secret of encrypted blocks is read from
    PYKVCACHE_SECRET, as other users of the machine can see the command line.
    """
    from pykvcache.prefix.stores import Rejection

    with _open(where, changes=remove) as store:
        count = _verified(store, remove)
    click.echo(f"{count[None]:,} blocks are intact")
    if count[Rejection.LOCKED]:
        click.echo(f"{count[Rejection.LOCKED]:,} cannot be checked without PYKVCACHE_SECRET")
    if set(count) - {None, Rejection.LOCKED}:
        raise click.exceptions.Exit(1)


def _verified(store: BlockStore, remove: bool) -> Counter[Rejection | None]:
    """Show the rejected blocks; return the numbers of blocks by reason, None for intact ones."""
    from pykvcache.prefix.stores import Rejection, tools

    count: Counter[Rejection | None] = Counter()
    for entry, why in tools.verify(store, os.environ.get("PYKVCACHE_SECRET")):
        count[why] += 1
        if why is None:
            continue
        gone = ""
        if remove and why not in (Rejection.LOCKED, Rejection.UNVERIFIABLE):
            gone = ", removed" if store.discard([entry.key]) else ""
        if why is not Rejection.LOCKED:
            click.echo(f"{entry.key.hex()}: {why.value}{gone}")
    return count


@cache.command("clear")
@WHERE
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def clear_all(where: str, yes: bool) -> None:
    """Remove every block."""
    with _open(where) as store:
        if not yes:
            if not is_terminal(sys.stdin):
                raise click.UsageError(
                    "cannot ask without a terminal: pass --yes to remove all blocks"
                )
            click.confirm(f"Remove all blocks of {where}?", abort=True)
        removed = store.trim(0)
    click.echo(f"{len(removed):,} blocks removed")


@contextmanager
def _open(where: str, *, changes: bool = True) -> Iterator[BlockStore]:
    """Open a store; at the end, raise unless it answered every request."""
    from pykvcache.prefix.stores import tools

    with tools.open_existing(where) as store:
        count = store.counters
        # A read-only folder counts as denied when it is opened, and can be listed.
        n_denied = 0 if changes else count.denied
        yield store
        # A cache treats a dead server as an empty one; this command must not.
        n_skipped = 0 if n_denied else count.skipped
        if count.failed or count.timed_out or n_skipped or count.denied > n_denied:
            # Addresses may hold a password.
            place = re.sub(r"(://[^/@]*):[^/@]*@", r"\1:***@", where)
            why = f" ({count.last_error})" if count.last_error else ""
            raise click.ClickException(f"{place} did not answer every request{why}")


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"
