"""``pykvcache rpc-server``."""

from __future__ import annotations

import signal
import socket

import click

from pykvcache._devices import devices
from pykvcache._native import lib
from pykvcache._params import usable_cpus
from pykvcache.cli.options import number, option
from pykvcache.cli.terminal import note

__all__ = ["rpc_server"]

_EPILOG = """
\b
Examples:
  pykvcache rpc-server                                    for this machine only
  pykvcache rpc-server --host 10.0.0.2 --port 50052       for a private network
  then: LlamaModel("model.gguf", rpc=["10.0.0.2:50052"])

It serves one process at a time, until it is stopped. It is not available on Windows.
"""

_WARNING = (
    "warning: ggml's RPC is neither encrypted nor authenticated: every program that reaches "
    "{where} can read and change the model and its results, and end this process or worse"
)


@click.command(
    "rpc-server", short_help="Compute layers of models that other machines load.", epilog=_EPILOG
)
@option("--host", "Address to listen on.", default="127.0.0.1")
@option("--port", "Port to listen on.", type=number(1, 65535), default=50052)
@option(
    "--device names",
    "Device that computes; may be given several times. Default: all GPUs, or the CPU.",
    multiple=True,
)
@option("--threads", "Number of threads. Default: all available CPUs.", type=number(1, 512))
def rpc_server(host: str, port: int, names: tuple[str, ...], threads: int | None) -> None:
    """Compute layers of models that other processes load, and hold the cells of these layers.

    Never open the port to a network that you do not trust: use a tunnel (ssh -L, WireGuard).
    """
    known = devices()
    for name in names:
        if name not in {one.name for one in known}:
            raise click.BadParameter(
                f"{name!r} is not one of {', '.join(one.name for one in known)}"
            )
    if not names:
        names = tuple(one.name for one in known if one.kind in ("gpu", "integrated-gpu")) or (
            "CPU",
        )
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise click.BadParameter(f"{host!r} is not a known host: {error}") from None
    note(_WARNING.format(where=f"{address}:{port}"))
    with socket.socket() as probe:  # ggml does not say why it cannot listen
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler waits for the call to end
    lib.rpc_serve(f"{address}:{port}", threads or usable_cpus(), list(names))
