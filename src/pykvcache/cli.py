"""The command line: ``pykvcache demo`` and ``pykvcache info``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]

USAGE, FAILURE, INTERRUPTED = 2, 1, 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments; default ``sys.argv[1:]``.

    Returns
    -------
    int
        0, or 1 after a failure, which is reported in one line on stderr.

    Raises
    ------
    SystemExit
        Code 2: wrong usage; 0: help or version was asked for.
    """
    options = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        # What a model writes may not exist in the terminal's encoding.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return _demo(options) if options.command == "demo" else _info(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
        # Every error of the package is one of these; the first line says what happened.
        text = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, OSError) and error.strerror and error.filename:
            text = f"{error.strerror}: {error.filename}"
        print(f"pykvcache: {text}", file=sys.stderr)
        return FAILURE


def _parser() -> argparse.ArgumentParser:
    from pykvcache import __version__

    parser = _Parser(prog="pykvcache", description="llama.cpp's memory as a Python object.")
    parser.add_argument("--version", action="version", version=f"pykvcache {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="fork, rewind and shift a story, and check it")
    info = commands.add_parser("info", help="what matters to a cache user about a model")
    for command in (demo, info):
        command.add_argument(
            "--model", metavar="FILE", help="a GGUF; default: the small model that ships with this"
        )
    demo.add_argument("--seed", type=_number(0, 2**32 - 2), default=1, help="of all sampling")
    demo.add_argument(
        "--n-ctx", type=_number(256, 2**20), default=1024, help="cells of the cache (1024)"
    )
    demo.add_argument(
        "--threads", type=_number(1, 512), help="default: all CPUs, 1 for a small model"
    )
    demo.add_argument("--quick", action="store_true", help="generate less")
    demo.add_argument("--plain", action="store_true", help="no colour, even with rich")
    return parser


class _number:
    """An argument type: an integer of a range, named in the message when it is not."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not self.least <= number <= self.most:
            raise argparse.ArgumentTypeError(f"{number} is not in [{self.least}, {self.most}]")
        return number


def _model_path(options: argparse.Namespace) -> str:
    from pykvcache import embedded_model_path

    return options.model if options.model is not None else embedded_model_path()


def _demo(options: argparse.Namespace) -> int:
    from pykvcache.demo import run

    right = run(
        _model_path(options),
        seed=options.seed,
        n_ctx=options.n_ctx,
        n_threads=options.threads,
        quick=options.quick,
        plain=options.plain,
    )
    return 0 if right else FAILURE


def _info(options: argparse.Namespace) -> int:
    from pykvcache import LlamaContext, LlamaModel

    with LlamaModel(_model_path(options)) as model:
        facts: dict[str, object] = {
            "file": model.path,
            "name": model.metadata.get("general.name", ""),
            "description": model.description,
            "architecture": model.metadata.get("general.architecture", ""),
            "parameters": f"{model.n_params:,}",
            "size": f"{model.size:,} bytes",
            "trained context": f"{model.n_ctx_train:,} tokens",
            "vocabulary": f"{model.n_vocab:,} tokens",
            "layers": model.n_layer,
            "heads": f"{model.n_head}, {model.n_head_kv} for K and V",
            "width": model.n_embd,
            "rotary embedding": model.rope_type.name.lower(),
            "sliding window": f"{model.n_swa} tokens" if model.n_swa else "none",
        }
        with LlamaContext(model, n_ctx=256, n_seq_max=1, embeddings=not model.has_decoder) as ctx:
            facts["memory"] = ctx.memory_kind
            facts["can shift"] = "yes" if ctx.kv_cache_can_shift() else "no"
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name.ljust(width)}  {value}")
    return 0
