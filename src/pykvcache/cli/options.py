"""Options that several commands share, and their conversion to texts and samplers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pykvcache import embedded_model_path
from pykvcache.cli.terminal import is_terminal
from pykvcache.errors import ArgumentError
from pykvcache.sampling import SETTINGS, Sampler

__all__ = [
    "CACHE_TYPES",
    "adapter_options",
    "cache_type_options",
    "context_options",
    "file_option",
    "json_option",
    "layers_option",
    "make_sampler",
    "mebibytes",
    "model_option",
    "model_path",
    "number",
    "option",
    "read_file",
    "read_text",
    "sampling_of",
    "sampling_options",
    "server_sampling_options",
    "stop_option",
    "swa_option",
    "template_option",
    "threads_option",
]

F = TypeVar("F", bound=Callable[..., Any])
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")


# Types --------------------------------------------------------------------------------------------


def number(least: int, most: int) -> Callable[[Any], int]:
    """Return a type of option: an integer of a range, which the error message names."""

    def integer(value: Any) -> int:
        try:
            given = int(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not an integer") from None
        if not least <= given <= most:
            raise click.BadParameter(f"{given} is not in [{least}, {most}]")
        return given

    return integer


def mebibytes(least: int, most: int) -> Callable[[Any], int]:
    """Return a type of option: a number of MiB in a range, as bytes."""
    mib = number(least, most)
    return lambda value: mib(value) << 20


def cells(value: Any) -> int:
    """Type of option: a number of cells, rounded up as llama.cpp does."""
    return min(-(-number(0, 2**31 - 1)(value) // 256) * 256, 2**31 - 1)


def model_path(value: Any) -> str:
    """Type of option: the path of a GGUF; by default the model in the package."""
    return os.fspath(value) if value else embedded_model_path()


def stop_text(value: str) -> str:
    """Type of option: a text that ends a generation."""
    if not value:
        raise click.BadParameter("it is empty, and would end every generation")
    return value


def scaled(value: str) -> tuple[str, float]:
    """Type of option: a file and a number, separated by a colon."""
    path, _, scale = value.rpartition(":")
    try:
        number = float(scale)
    except ValueError:
        path = ""
    if not path:
        raise click.BadParameter(f"{value!r} is not FILE:SCALE, such as polite.gguf:0.5")
    if not abs(number) <= 1e6:
        raise click.BadParameter(f"the scale {scale} is not in [-1e6, 1e6]")
    if not os.path.isfile(path):
        raise click.BadParameter(f"there is no file {path!r}")
    return path, number


# Single options -----------------------------------------------------------------------------------


def option(flags: str, text: str, **more: Any) -> Callable[[F], F]:
    """Return a `click.option` from its flags with spaces between, and its help; shows defaults."""
    shows = more.get("default") not in (None, "")
    return click.option(*flags.split(), help=text, show_default=shows, **more)


model_option = option(
    "-m --model",
    "A GGUF file. Default: the small model in the package.",
    type=model_path,
    default="",
    metavar="FILE",
    envvar="PYKVCACHE_MODEL",
    show_envvar=True,
)
layers_option = option(
    "-ngl --gpu-layers n_gpu_layers",
    "Number of layers on GPUs. Default: all, if this build supports a GPU and the machine has one.",
    type=number(0, 2**31 - 1),
)
threads_option = option(
    "--threads n_threads",
    "Number of threads. Default: all available CPUs for prompts, and one thread per 16 MiB of "
    "weights, at most one per CPU, for single tokens.",
    type=number(1, 512),
)
template_option = option(
    "--chat-template --chat-template-file --template template",
    "A Jinja chat template in place of the model's own.",
    type=click.Path(),
    metavar="FILE",
)
swa_option = click.option(
    "--swa-full/--no-swa-full",
    " /--swa-window",
    default=True,
    show_default=True,
    help="Sliding-window layers keep all tokens, or only the window, which saves memory; then long "
    "rewinds evaluate tokens again. --swa-window is the same as --no-swa-full.",
)


def file_option(what: str) -> Callable[[F], F]:
    """Return ``--file``."""
    return option("-f --file", f"Read the {what} from a file.", type=click.Path())


def json_option(text: str) -> Callable[[F], F]:
    """Return ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def stop_option(text: str) -> Callable[[F], F]:
    """Return ``--stop``."""
    return option("--stop", text, type=stop_text, multiple=True, metavar="TEXT")


# Groups -------------------------------------------------------------------------------------------


def _group(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds options in their order."""

    def add(call: F) -> F:
        for option in reversed(options):
            call = option(call)
        return call

    return add


cache_type_options = _group(
    *(
        click.option(
            f"--type-{letter}",
            type=click.Choice(CACHE_TYPES),
            default="f16",
            show_default=True,
            help=f"Type in which {part} are stored.",
        )
        for letter, part in (("k", "keys"), ("v", "values"))
    )
)
adapter_options = _group(
    option(
        "--lora lora",
        "A LoRA adapter to compute with; may be repeated.",
        type=click.Path(exists=True, dir_okay=False),
        multiple=True,
        metavar="FILE",
    ),
    option(
        "--lora-scaled lora_scaled",
        "A LoRA adapter with its scale, such as polite.gguf:0.5; may be repeated.",
        type=scaled,
        multiple=True,
        metavar="FILE:SCALE",
    ),
)
#: Options of a command that opens one context: see `open_from_options`.
context_options = _group(
    option(
        "--n-ctx",
        "Size of the context in tokens, rounded up to a multiple of 256; 0: the model's trained "
        "length.",
        type=cells,
        default=4096,
    ),
    cache_type_options,
    swa_option,
    layers_option,
    threads_option,
    adapter_options,
)
# Arguments of `Sampler` that have an option of the same name, with its help.
_SAMPLING = {
    "temperature": "Sampling temperature; 0: always the most likely token.",
    "top_k": "Choose from the K most likely tokens; 0: from all.",
    "top_p": "Choose from the most likely tokens with this total probability; 1: from all.",
    "min_p": "Drop tokens below this fraction of the highest probability; 0: none.",
    "repeat_penalty": "Above 1: repeated tokens become less likely.",
}


def _sampling_group(*short: str) -> Callable[[F], F]:
    """Return the options of a `Sampler`, with short forms of ``--temperature``."""
    return _group(
        *(
            click.option(
                *(short if name == "temperature" else ()),
                f"--{name.replace('_', '-')}",
                type=SETTINGS[name].kind,
                default=SETTINGS[name].default,
                show_default=True,
                help=text,
            )
            for name, text in _SAMPLING.items()
        ),
        click.option(
            "--seed", type=int, help="Same seed, same text, up to rounding. Default: random."
        ),
    )


#: The options of a `Sampler`: see `make_sampler`.
sampling_options = _sampling_group("-t")
#: The same without ``-t``, which is the number of threads in llama-server.
server_sampling_options = _sampling_group()


def sampling_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of `options` that `sampling_options` adds and that are given."""
    return {name: options[name] for name in (*_SAMPLING, "seed") if options[name] is not None}


def make_sampler(options: dict[str, Any], **more: Any) -> Sampler:
    """Return the sampler of `sampling_options`; a value that it refuses is wrong usage."""
    try:
        return Sampler(**sampling_of(options), **more)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None


# Texts --------------------------------------------------------------------------------------------


def read_text(given: str | None, file: str | None) -> str:
    """Return a text from an argument, from a file, or from standard input (``-``, or a pipe)."""
    if given is not None and file is not None:
        raise click.UsageError("give a text or --file, not both")
    if file is not None:
        return read_file(file)
    if sys.stdin is not None and (given == "-" or (given is None and not is_terminal(sys.stdin))):
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    if given is None or given == "-":
        raise click.UsageError("there is no text: give it as an argument, by --file, or by a pipe")
    # Bytes that are not valid text in this locale arrive as surrogates: decode them as from a pipe.
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
