"""Streams as services and pipes give them, and wrong usage: exit codes and messages."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("click", reason="pip install '.[cli]'")

from pykvcache import BatchGenerator, LlamaContext, LlamaModel, embedded_model_path
from pykvcache.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


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


@pytest.mark.parametrize(
    "wrong", [("--temperature", "nan"), ("--top-p", "7"), ("--seed", "-5"), ("--stop", "")]
)
def test_impossible_values_are_wrong_usage(wrong: tuple[str, str], capsys: Capture) -> None:
    for command in (["generate", "One day"], ["chat"]):
        assert main([*command, *wrong]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"see pykvcache {command[0]} --help" in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(monkeypatch: Patch, capsys: Capture) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["generate", "One day", "-n", "2"]) == 1
        patch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert capsys.readouterr().err == "pykvcache: No space left on device\n"
