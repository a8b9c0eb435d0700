"""``pykvcache state``: files with a saved sequence or context."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import click

from pykvcache.cli.options import CACHE_TYPES, json_option, model_option, number, option
from pykvcache.cli.terminal import load_model, table
from pykvcache.context import LlamaContext
from pykvcache.errors import StateFormatError
from pykvcache.state import ContextState, LlamaStateFile, SequenceState, StateInfo, describe_state
from pykvcache.state.container import naming

__all__ = ["state"]

#: Most characters of a value in the table.
LONG = 200

FILE = click.argument("file", type=click.Path())
OUT = click.argument("out", type=click.Path())

_CONVERT_EPILOG = """
\b
Example:
  pykvcache state convert -m model.gguf chat.kv small.kv --type-k q8_0 --type-v q8_0
"""


@click.group(short_help="Inspect, check, cut and convert saved states.")
def state() -> None:
    """Inspect, check, cut and convert saved states.

    These are files of LlamaSequence.save, LlamaContext.save_sequence and save_context, llama.cpp's
    own files, and slots that llama-server saved.
    """


@state.command()
@FILE
@json_option("Write a JSON object.")
def info(file: str, as_json: bool) -> None:
    """Show the header of a file, without checking the rest.

    It reads llama.cpp's own files, too.
    """
    with naming(file):
        facts = _facts(file, _header(file))
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        table((name, _text(value)) for name, value in facts.items())


@state.command()
@FILE
@model_option
@click.option("--restore", is_flag=True, help="Also restore it into a context of the model.")
def verify(file: str, model: str, restore: bool) -> None:
    """Check every byte of a file.

    The exit code is 1 if the file is damaged, or if --restore is given and the model does not fit
    it. llama.cpp's own files have no checksum: only their structure is checked.
    """
    with naming(file):
        header = _header(file)
        if isinstance(header, LlamaStateFile):
            what = "well formed (llama.cpp's files have no checksum)"
        else:
            (ContextState if header.kind == "context" else SequenceState).load(file)
            what = "intact"
        if restore:
            _restored(file, header, model)[0].close()
            what += ", and fits the model"
    click.echo(f"{file}: {what}")


@state.command()
@FILE
@OUT
@option(
    "-n --tokens",
    "Number of tokens to keep, from the first.",
    type=number(0, 2**31 - 1),
    required=True,
)
def cut(file: str, out: str, tokens: int) -> None:
    """Write the first tokens of a state to OUT.

    For example: pykvcache state cut story.kv start.kv -n 100

    A recurrent state cannot be cut: it is one state for all of its tokens.
    """
    with naming(file):
        sequence = SequenceState.load(file, mapped=False)
    if tokens > len(sequence):
        raise click.UsageError(f"{tokens} tokens requested, but the file holds {len(sequence)}")
    with naming(file):
        part = sequence[:tokens]
    size = part.save(out)
    click.echo(f"{out}: {tokens} of {len(sequence)} tokens, {size:,} bytes")


@state.command(epilog=_CONVERT_EPILOG)
@FILE
@OUT
@model_option
@option(
    "--to",
    "Format of OUT. llama-server can restore a file in llama.cpp's format as a slot.",
    type=click.Choice(["pykvcache", "llama.cpp"]),
    default="pykvcache",
)
@option(
    "--type-k",
    "Type in which OUT stores keys. Default: that of FILE.",
    type=click.Choice(CACHE_TYPES),
)
@option(
    "--type-v",
    "Type in which OUT stores values. Default: that of FILE.",
    type=click.Choice(CACHE_TYPES),
)
def convert(
    file: str, out: str, model: str, to: str, type_k: str | None, type_v: str | None
) -> None:
    """Write a state with other types, or in another format.

    --to, --type-k and --type-v say what to change. Without them a llama.cpp file is converted to
    pykvcache's format. The model (-m) must be the one that the state was saved with.
    """
    if os.path.exists(out) and os.path.samefile(file, out):
        raise click.UsageError("OUT is the same file as FILE: choose another name")
    with naming(file):
        header = _header(file)
        if to == "pykvcache" and _has_types(header, type_k, type_v):
            raise click.UsageError(
                f"nothing to convert in {file}: say what to change with --to, --type-k or --type-v"
            )
        ctx, saved = _restored(file, header, model, type_k, type_v)
    with ctx:
        if to == "llama.cpp":
            size = ctx.save_llama_file(out, 0, saved.tokens)
        elif isinstance(saved, LlamaStateFile):
            size = ctx.save_sequence(out, 0, saved.tokens if len(saved.tokens) else None)
        else:
            size = ctx.save_sequence(out, 0, saved.tokens, saved.metadata)
    click.echo(f"{out}: {to}, {size:,} bytes")


def _header(file: str) -> StateInfo | LlamaStateFile:
    """Read the header of a file, or the whole of one of llama.cpp's, which has no checksum."""
    try:
        return LlamaStateFile.load(file)
    except StateFormatError:
        return describe_state(file)


def _facts(file: str, header: StateInfo | LlamaStateFile) -> dict[str, Any]:
    if isinstance(header, LlamaStateFile):
        return {
            "file": file,
            "kind": f"{header.kind} of llama.cpp, version {header.version}",
            "tokens": len(header.tokens),
            "token_ids": len(header.tokens) > 0,
            "state_bytes": len(header.state),
        }
    facts = {
        "file": file,
        "kind": header.kind,
        "tokens": header.n_tokens,
        "token_ids": header.has_tokens,
        "types": ", ".join(f"{k} {v}" for k, v in header.types.items()),
        "checksum": header.checksum,
        "bytes": header.n_bytes,
        "metadata": dict(header.metadata),
    }
    for name, value in dataclasses.asdict(header.fingerprint).items():
        facts[f"fingerprint_{name}"] = value
    return facts


def _has_types(header: StateInfo | LlamaStateFile, type_k: str | None, type_v: str | None) -> bool:
    """Whether a file is one of pykvcache, with these types of keys and values."""
    if isinstance(header, LlamaStateFile):
        return False
    wanted = {"k": type_k, "v": type_v}
    return all(one in (None, header.types.get(part)) for part, one in wanted.items())


def _restored(
    file: str,
    header: StateInfo | LlamaStateFile,
    model: str,
    type_k: str | None = None,
    type_v: str | None = None,
) -> tuple[LlamaContext, SequenceState | LlamaStateFile]:
    """Return a context with the file's state in sequence 0, and the state."""
    if header.kind == "context":
        raise click.UsageError(f"{file} holds a whole context: load it with ctx.load_context")
    options: dict[str, Any] = {"type_k": type_k, "type_v": type_v}
    if isinstance(header, LlamaStateFile):
        n_tokens = len(header.tokens)
    else:
        n_tokens = header.n_tokens
        options = {name: kind or header.types.get(name[-1]) for name, kind in options.items()}
    options = {name: kind for name, kind in options.items() if kind is not None}
    with load_model(model) as loaded:
        ctx = LlamaContext(loaded, n_ctx=max(256, n_tokens), n_seq_max=1, **options)
        try:
            if isinstance(header, LlamaStateFile):
                return ctx, ctx.load_llama_file(file, 0)
            return ctx, ctx.load_sequence(file, 0, convert=True)
        except BaseException:
            ctx.close()
            raise


def _text(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONG else f"{text[:LONG]}... (--json shows all)"
