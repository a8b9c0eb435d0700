"""Python programs in processes that are forked from one that has imported the package.

To import it takes a fourth of a second, and tests run hundreds of programs. The process that is
forked has made nothing of llama.cpp's, and has one thread. Programs that are about the import, the
end of the interpreter or `fork` itself run in processes of their own, by `subprocess`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

__all__ = ["run_forked"]

TESTS = Path(__file__).resolve().parents[1]
NUMPY = ("numpy",)
PACKAGE = ("pykvcache.generate", "pykvcache.prefix.cache", "pykvcache.state", "support.models")
_STATUS = struct.Struct("i")
_servers: dict[tuple[str, ...], tuple[socket.socket, subprocess.Popen[bytes]]] = {}


def run_forked(
    arguments: Sequence[object],
    *,
    stdin: str = "",
    env: dict[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float = 120,
    package: bool = True,
    imports: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program and return what it wrote, as `subprocess.run` does.

    Parameters
    ----------
    arguments
        What stands after ``python``: ``-c CODE``, ``-m MODULE`` or a file, and its arguments.
    stdin
        What the program reads.
    env
        The whole environment. What is read when Python starts or the package is loaded is that of
        the first program.
    cwd
        Where it runs.
    timeout
        In seconds.
    package
        Whether the package is imported, or NumPy alone: a program that is a user's has to import
        all of the package that it uses.
    imports
        Modules of others that programs like this one import, too.
    """
    given = [str(one) for one in arguments]
    env = dict(os.environ) if env is None else env
    if not hasattr(os, "fork"):
        return subprocess.run(
            [sys.executable, *given],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env=env | {"PYTHONPATH": str(TESTS)},
            cwd=cwd,
            timeout=timeout,
            check=False,
        )
    request = {"arguments": given, "env": env, "cwd": str(cwd or os.getcwd()), "imports": imports}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)]
        for file, text in zip(files, (json.dumps(request), stdin), strict=False):
            file.write(text.encode())
            file.seek(0)
        server = _server(PACKAGE if package else NUMPY)
        server.settimeout(None)
        socket.send_fds(server, [b"r"], [file.fileno() for file in files])
        pid = _receive(server)
        server.settimeout(timeout)
        try:
            status = _receive(server)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            server.settimeout(None)
            _receive(server)
            raise subprocess.TimeoutExpired(given, timeout, *map(_text, files[2:])) from None
        code = os.waitstatus_to_exitcode(status)
        return subprocess.CompletedProcess(given, code, *map(_text, files[2:]))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _receive(server: socket.socket) -> int:
    data = server.recv(_STATUS.size, socket.MSG_WAITALL)
    assert len(data) == _STATUS.size, "the process that is forked has ended"
    (number,) = _STATUS.unpack(data)
    return int(number)


def _server(imported: tuple[str, ...]) -> socket.socket:
    """Return the connection to the process that is forked, which is started once."""
    if imported not in _servers:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", "from support.forks import serve; serve()()"]
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), *imported],
                env=os.environ | {"PYTHONPATH": str(TESTS), "PYTHONIOENCODING": "utf-8"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        _servers[imported] = ours, process
    return _servers[imported][0]


def serve() -> Callable[[], Any]:
    """Fork for each request; return the request in each child."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    while True:
        data, fds, *_ = socket.recv_fds(connection, 1, 4)
        if not data:
            return lambda: None
        with open(fds[0], encoding="utf-8", closefd=False) as file:
            request = json.load(file)
        for name in request["imports"]:
            importlib.import_module(name)
        gc.freeze()
        pid = os.fork()
        if not pid:
            connection.close()
            for i, fd in enumerate(fds[1:]):
                os.dup2(fd, i)
        for fd in fds:
            os.close(fd)
        if not pid:
            return partial(_program, **request)
        connection.sendall(_STATUS.pack(pid))
        connection.sendall(_STATUS.pack(os.waitpid(pid, 0)[1]))


def _program(arguments: list[str], env: dict[str, str], cwd: str, imports: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    first, *others = arguments
    if first == "-c":
        code, *others = others
        sys.argv = ["-c", *others]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif first == "-m":
        name, *others = others
        sys.argv = [name, *others]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
