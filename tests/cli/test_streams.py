"""Streams as services and pipes give them, failures and wrong usage: exit codes and messages."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("click", reason="pip install '.[cli]'")

from devices.rpc_kit import has_rpc
from pykvcache import (
    BatchGenerator,
    LlamaContext,
    LlamaModel,
    __version__,
    embedded_model_path,
)
from pykvcache.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykvcache", *args]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        encoding="utf-8",
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **env},
    )


def one_line(text: str) -> str:
    """Check that an error is one line, from us."""
    assert text.startswith("pykvcache"), text
    assert text.count("\n") == 1, text
    return text


def test_a_closed_stdin_is_an_empty_input(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat"]) == 0
    for command in ("generate", "tokenize"):
        for text in ([], ["-"]):
            assert main([command, *text]) == 2
            assert "there is no text" in capsys.readouterr().err


def test_closed_outputs_do_not_end_a_command(monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert main(["generate", "One day", "-n", "2"]) == 0
        assert main(["generate", "One day", "-n", "2", "--samples", "2"]) == 0
        with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=64) as ctx:
            generator = BatchGenerator(ctx)
            handle = generator.submit("One day", 2)
            generator.run()
            assert handle.finish_reason == "length"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stdin", io.StringIO("One day\n"))
        assert main(["chat", "-n", "2"]) == 0


def test_piped_input_may_be_any_bytes(monkeypatch: Patch, capsys: Capture) -> None:
    piped = io.TextIOWrapper(io.BytesIO(b"Lucy \xff has a kite.\n/history\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    assert main(["chat", "-n", "2"]) == 0
    assert "user: Lucy \ufffd has a kite." in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--file", "--grammar"])
def test_a_file_that_is_not_text_is_named(option: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "binary").write_bytes(b"abc\xff")
    text = ["One day"] if option == "--grammar" else []
    assert main(["generate", *text, option, str(tmp_path / "binary")]) == 1
    assert capsys.readouterr().err == (
        f"pykvcache: {tmp_path / 'binary'} is not text in UTF-8: byte 3 is 0xff\n"
    )


def test_every_error_of_the_package_is_one_line(capsys: Capture) -> None:
    assert main(["tokenize", "--decode", "5 99999"]) == 1
    assert capsys.readouterr().err == "pykvcache: token 99999 (at 1) is outside [0, 818)\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(monkeypatch: Patch, capsys: Capture) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["generate", "One day", "-n", "2"]) == 1
        patch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert capsys.readouterr().err == "pykvcache: No space left on device\n"


def test_version() -> None:
    result = run("--version")
    assert result.stdout == f"pykvcache {__version__}\n"


def test_without_click_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ImportError('no click here')\n")
    result = run("info", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "pip install '.[cli]'" in one_line(result.stderr)


@pytest.mark.parametrize("module", ["click", "pykvcache.cli.app"])
def test_ctrl_c_during_the_import_leaves_no_traceback(module: str) -> None:
    """Ctrl-C is what a module raises while it is imported."""
    code = f"""
import sys
class Typing:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Typing())
from pykvcache.cli import main
sys.exit(main(["--version"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nonsense",), "nonsense"),
        (("demo", "--n-ctx", "255"), "[256,"),
        (("demo", "--n-ctx", "many"), "'many' is not an integer"),
        (("demo", "--seed", "-1"), "[0,"),
        (("demo", "--threads", "0"), "[1,"),
        (("info", "--quick"), "--quick"),
        (("generate", "a", "--type-k", "f64"), "'f64'"),
        (("state", "cut", "a", "b"), "--tokens"),
        (("rpc-server", "--port", "0"), "0 is not in"),
        (("rpc-server", "--host", "no-such-host.invalid"), "is not a known host"),
        (("rpc-server", "--device", "CUDA99"), "is not one of CPU"),
        *(
            ((*command, *wrong), f"(see pykvcache {command[0]} --help)")
            for command in (("generate", "One day"), ("chat",))
            for wrong in (
                ("--temperature", "nan"),
                ("--top-p", "7"),
                ("--seed", "-5"),
                ("--stop", ""),
            )
        ),
    ],
)
def test_wrong_usage_is_one_line(args: tuple[str, ...], said: str, capsys: Capture) -> None:
    assert main(args) == 2
    assert said in one_line(capsys.readouterr().err)


def test_no_arguments_show_the_commands(capsys: Capture) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    for name in ("bench", "cache", "chat", "demo", "generate", "info", "state", "tokenize"):
        assert re.search(rf"^  {name} +\S", said, re.M)
    assert "Start here" in said


def test_a_failure_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.gguf").write_text("not a model\n")
    for name in ("text.gguf", "nothing.gguf", "."):
        for command in ("demo", "info"):
            assert main([command, "--model", str(tmp_path / name)]) == 1
            assert str(tmp_path / name) in one_line(capsys.readouterr().err)


def test_the_rpc_server_warns_and_reports_why_it_cannot_listen(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["rpc-server", "--port", str(taken.getsockname()[1])]) == 1
    warning, reason = capsys.readouterr().err.splitlines()
    assert "neither encrypted nor authenticated" in warning
    assert "in use" in reason or (not has_rpc() and "GGML_RPC=ON" in reason)
