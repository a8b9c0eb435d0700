"""``pykvcache serve``: the prefix cache behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import click

from pykvcache import embedded_model_path
from pykvcache.cli.options import (
    adapter_options,
    cache_type_options,
    layers_option,
    make_sampler,
    mebibytes,
    number,
    option,
    read_file,
    sampling_of,
    server_sampling_options,
    swa_option,
    template_option,
    threads_option,
)
from pykvcache.cli.terminal import context_arguments
from pykvcache.errors import how_to_install
from pykvcache.llm import as_tiers, is_folder
from pykvcache.prefix.policies import DEFAULT, POLICIES

__all__ = ["serve"]

#: Options that are arguments of `LLM`, in addition to those of contexts, and of `Models`.
_OF_LLM = (
    *("cache", "folder_bytes", "n_gpu_layers", "n_parallel", "policy", "ram_bytes", "secret"),
    "tier_seconds",
)
_OF_MODELS = ("idle", "max_models", "max_waiting", "timeout")

_EPILOG = """
\b
Examples:
  pykvcache serve -m model.gguf --cache ~/.cache/pykvcache
  pykvcache serve -m models/ --max-models 2 --idle 600 --cache ~/.cache/pykvcache
  pykvcache serve -m model.gguf --host 0.0.0.0 --api-keys keys.txt

\b
Then, with any client of OpenAI's API:
  client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none")
  client.chat.completions.create(model="model", messages=[{"role": "user", "content": "Hi"}])

http://127.0.0.1:8080/ shows the cache in a browser.
"""


@click.command(short_help="Serve models over OpenAI's and Anthropic's APIs.", epilog=_EPILOG)
@option(
    "-m --model paths",
    "A GGUF file, or a folder of them; may be repeated. Default: the small model in the package.",
    multiple=True,
    envvar="PYKVCACHE_MODEL",
    show_envvar=True,
    metavar="PATH",
)
@option("--alias", "Name of the model in requests. Default: its file name without .gguf.")
@option(
    "--host",
    "Address to listen on. Any address but loopback needs --api-keys or --api-key.",
    default="127.0.0.1",
)
@option("--port", "Port to listen on; 0: any free one.", type=number(0, 65535), default=8080)
@option(
    "--cache",
    "Keep evaluated prefixes beyond this process: in a folder, or at an address such as "
    "redis://host. May be repeated, fastest first.",
    multiple=True,
    metavar="TIER",
)
@option(
    "--cache-limit folder_bytes",
    "Maximum size of each --cache folder. Default: 10 GiB.",
    type=mebibytes(8, 2**40),
    metavar="MIB",
)
@option(
    "--ram ram_bytes",
    "Size of the prefix cache in RAM. Default: an eighth of the free memory, at most 4 GiB.",
    type=mebibytes(0, 2**32),
    metavar="MIB",
)
@option(
    "--policy",
    "Eviction policy of the prefix cache in RAM.",
    type=click.Choice(list(POLICIES)),
    default=DEFAULT,
)
@option(
    "--tier-seconds",
    "Longest time that a request waits for a read from --cache. Default: a tenth of the estimated "
    "time to evaluate the same tokens.",
    type=float,
    metavar="SECONDS",
)
@option(
    "--n-ctx",
    "Cells of the context, one per token, shared by all requests. Default: --parallel times the "
    "model's trained length, at most 32,768, and no more than fit into a quarter of the free "
    "memory.",
    type=number(0, 2**31 - 1),
)
@option(
    "--parallel n_parallel",
    "Maximum number of requests that run at the same time.",
    type=number(1, 256),
    default=8,
)
@option(
    "--max-waiting",
    "Maximum number of requests that wait; further ones get status 429.",
    type=number(0, 2**20),
    default=64,
)
@option(
    "--max-models",
    "Maximum number of models that are loaded at the same time.",
    type=number(1, 64),
    default=1,
)
@option(
    "--idle", "Unload a model after this time without a request.", type=float, metavar="SECONDS"
)
@option(
    "--timeout",
    "End a request after this time; its answer is the text so far.",
    type=float,
    metavar="SECONDS",
)
@option(
    "--max-body", "Largest body of a request.", type=mebibytes(1, 2**20), default=32, metavar="MIB"
)
@option(
    "--api-keys",
    "A file with one key per line, followed by a space and its tenant's name. Tenants share "
    "nothing.",
    type=click.Path(dir_okay=False),
    metavar="FILE",
)
@option(
    "--api-key api_key",
    "A key with its own tenant; may be repeated.",
    multiple=True,
    envvar="PYKVCACHE_API_KEY",
    show_envvar=True,
)
@option(
    "--secret",
    "Encrypts what --cache stores (needs the extra crypto). Other users can see options in ps: "
    "prefer the variable.",
    envvar="PYKVCACHE_SECRET",
    show_envvar=True,
)
@layers_option
@threads_option
@cache_type_options
@swa_option
@adapter_options
@template_option
@option(
    "--chat-template-kwargs variables",
    "Variables of the chat template, such as '{\"enable_thinking\": false}'.",
    metavar="JSON",
)
@server_sampling_options
@option(
    "--cors-origin origins",
    "Origin of web pages that may call the server, such as https://chat.local; '*' for all. "
    "Default: pages on this machine.",
    multiple=True,
    metavar="ORIGIN",
)
@click.option("-q", "--quiet", is_flag=True, help="Do not log requests.")
def serve(
    paths: tuple[str, ...],
    alias: str | None,
    host: str,
    port: int,
    max_body: int,
    api_keys: str | None,
    api_key: tuple[str, ...],
    template: str | None,
    variables: str | None,
    origins: tuple[str, ...],
    quiet: bool,
    **options: Any,
) -> None:
    """Serve models over OpenAI's and Anthropic's APIs; reuse cached prefixes."""
    try:
        from pykvcache.serve import (
            Defaults,
            Models,
            Responses,
            find_models,
            is_loopback,
            make_app,
            run,
        )
    except ImportError as error:
        raise click.ClickException(
            f"the server needs {error.name}: {how_to_install('serve')}"
        ) from None
    tiers, folder_bytes = options["cache"], options["folder_bytes"]
    if folder_bytes is not None and not any(map(is_folder, tiers)):
        raise click.UsageError("--cache-limit needs a --cache that is a folder")
    keys = read_keys(api_keys, api_key)
    if keys is None and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} can be reached from other machines: give --api-keys or --api-key"
        )
    try:
        files = find_models(paths or (embedded_model_path(),), alias)
        stored = Responses(as_tiers(tiers, folder_bytes), options["secret"])
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    make_sampler(options)  # refuses wrong values
    models = Models(
        files,
        context_arguments(options) | {name: options[name] for name in _OF_LLM},
        **{name: options[name] for name in _OF_MODELS},
        defaults=Defaults(
            None if template is None else read_file(template),
            json_object(variables or "{}"),
            sampling_of(options),
        ),
    )
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        level=logging.WARNING if quiet else logging.INFO,
        stream=sys.stderr,
    )
    # llama.cpp logs some 150 lines per model that it loads.
    logging.getLogger("pykvcache.llama").setLevel(logging.WARNING)
    listener = bound(host, port)  # before the model is loaded, which may take long
    if len(files) == 1:
        models.preload()
    app = make_app(models, keys=keys, max_body=max_body, stored=stored, origins=origins)
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    click.echo(f"pykvcache serves http://{shown}:{port} (models: {', '.join(files)})", err=True)
    run(app, listener)


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Requests wait until the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # asyncio sets this only on its own sockets. Without it a token may wait 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise click.ClickException(f"port {port} on {host}: {error.strerror or error}") from None
    return listener


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{text} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{text} is not a JSON object")
    return found


def read_keys(path: str | None, given: tuple[str, ...]) -> dict[str, str] | None:
    """Return the names of tenants by key; None if no key is given."""
    if path is None and not given:
        return None
    keys: dict[str, str] = {}
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise click.ClickException(f"--api-keys {path}: {why}") from None
        for i, line in enumerate(lines, 1):
            parts = line.split()
            if not parts or parts[0].startswith("#"):
                continue
            if len(parts) > 2:
                raise click.ClickException(
                    f"{path}, line {i}: it must be a key, a space and a tenant's name, but has "
                    f"{len(parts)} words"
                )
            keys[parts[0]] = parts[1] if len(parts) == 2 else _name(parts[0])
    for key in given:
        if "," in key:
            raise click.UsageError("--api-key takes one key: repeat it for several")
        keys[key] = _name(key)
    if not keys:
        raise click.ClickException(f"{path} holds no key")
    return keys


def _name(key: str) -> str:
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:16]
