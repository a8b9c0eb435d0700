"""``pykvcache demo``."""

from __future__ import annotations

from typing import Any

import click

from pykvcache.cli.options import model_option, number, option, threads_option

__all__ = ["demo"]


@click.command(short_help="Fork, rewind and shift a story; each result is checked.")
@model_option
@option("--seed", "Seed of all sampling.", type=number(0, 2**32 - 2), default=1)
@option(
    "--n-ctx",
    "Cells of the context, rounded up to a multiple of 256.",
    type=number(256, 2**20),
    default=1024,
)
@threads_option
@click.option("--quick", is_flag=True, help="Generate less.")
@click.option("--plain", is_flag=True, help="No colour.")
def demo(model: str, **options: Any) -> int:
    """Fork, rewind and shift a story, and compare each result with a fresh run.

    It takes a few seconds on the small model of the package, and a minute or two on one of a few
    hundred million parameters. Exit code 1: a result differs by more than rounding.
    """
    from pykvcache.demo import run

    return 0 if run(model, **options) else 1
