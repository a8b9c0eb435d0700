"""Options that several commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pykvcache._models import embedded_model_path
from pykvcache.cli.terminal import is_terminal
from pykvcache.errors import ArgumentError
from pykvcache.sampling import Sampler

__all__ = [
    "cache_type_options",
    "make_sampler",
    "model_option",
    "n_ctx_option",
    "number",
    "read_file",
    "read_text",
    "sampling_options",
    "stop_text",
    "swa_option",
    "template_option",
    "threads_option",
]

F = TypeVar("F", bound=Callable[..., Any])
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


def number(least: int, most: int) -> Callable[[Any], int]:
    """Return a type of option: an integer of a range, which the message names when it is not."""

    def integer(value: Any) -> int:
        try:
            given = int(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not an integer") from None
        if not least <= given <= most:
            raise click.BadParameter(f"{given} is not in [{least}, {most}]")
        return given

    return integer


def cells(value: Any) -> int:
    """Type of option: a number of cells, rounded up as llama.cpp does."""
    return min(-(-number(0, 2**31 - 1)(value) // 256) * 256, 2**31 - 1)


def model_path(value: Any) -> str:
    """Type of option: the path of a GGUF; by default the model in the package."""
    return os.fspath(value) if value else embedded_model_path()


model_option = click.option(
    "-m",
    "--model",
    type=model_path,
    metavar="FILE",
    envvar="PYKVCACHE_MODEL",
    default="",
    show_envvar=True,
    help="A GGUF file. Default: the small model in the package.",
)
threads_option = click.option(
    "--threads", type=number(1, 512), help="Default: chosen by the model's size and the CPUs."
)
n_ctx_option = click.option(
    "--n-ctx",
    type=cells,
    default=4096,
    show_default=True,
    help="Cells of the cache, in tokens, rounded up to a multiple of 256; 0: as many as the model "
    "was trained with.",
)


template_option = click.option(
    "--template",
    type=click.Path(),
    metavar="FILE",
    help="A Jinja chat template to use in place of the model's own.",
)
swa_option = click.option(
    "--swa-full/--swa-window",
    default=True,
    show_default=True,
    help="Of models with a sliding window: keep all cells (for rewinds and shifts), or fewer.",
)


def cache_type_options(call: F) -> F:
    """Add ``--type-k`` and ``--type-v``."""
    for part, name in (("values", "--type-v"), ("keys", "--type-k")):
        call = click.option(
            name,
            type=click.Choice(CACHE_TYPES),
            default="f16",
            show_default=True,
            help=f"How {part} are stored.",
        )(call)
    return call


def sampling_options(call: F) -> F:
    """Add what a `Sampler` takes."""
    options = (
        click.option(
            "-t",
            "--temperature",
            type=float,
            default=0.8,
            show_default=True,
            help="0: always the likeliest token.",
        ),
        click.option("--top-k", type=int, default=40, show_default=True, help="0: all."),
        click.option(
            "--top-p",
            type=float,
            default=0.95,
            show_default=True,
            help="The likeliest tokens that make up so much; 1: all.",
        ),
        click.option("--min-p", type=float, default=0.05, show_default=True, help="0: all."),
        click.option(
            "--repeat-penalty", type=float, default=1.0, show_default=True, help="1: none."
        ),
        click.option("--seed", type=int, help="Same seed, same text. Default: random."),
    )
    for option in reversed(options):
        call = option(call)
    return call


def stop_text(value: str) -> str:
    """Type of option: a text that ends a generation."""
    if not value:
        raise click.BadParameter("it is empty, and would end every generation")
    return value


def make_sampler(**options: Any) -> Sampler:
    """Return a sampler; a value that it refuses is wrong usage."""
    try:
        return Sampler(**options)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None


def read_text(given: str | None, file: str | None) -> str:
    """Return a text from an argument, from a file, or from standard input (``-``, or a pipe)."""
    if given is not None and file is not None:
        raise click.UsageError("a text and --file were given: one of them")
    if file is not None:
        return read_file(file)
    if sys.stdin is not None and (given == "-" or (given is None and not is_terminal(sys.stdin))):
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    if given is None or given == "-":
        raise click.UsageError("there is no text: give it as an argument, by --file, or by a pipe")
    # What is not text in this locale are bytes in disguise: read as a pipe's are.
    is_text = not any("\udc80" <= c <= "\udcff" for c in given)
    return given if is_text else given.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_file(path: str) -> str:
    """Return the text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"{path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
