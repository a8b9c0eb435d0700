"""Loading a model: refusals, and that failed loads leave nothing behind."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from binding.conftest import Child
from pykvcache import KvCacheError, LlamaModel
from pykvcache.errors import ModelLoadError
from support.models import make_model


@pytest.fixture
def llama(model_folder: Path) -> Path:
    return make_model("llama", model_folder)


# Paths --------------------------------------------------------------------------------


def test_a_path_object_a_string_and_any_pathlike_load_the_same(llama: Path) -> None:
    class Somewhere:
        def __fspath__(self) -> str:
            return str(llama)

    for path in (llama, str(llama), Somewhere()):
        with LlamaModel(path) as model:
            assert model.n_vocab == 320
            assert model.path == str(llama)


def test_a_relative_path_and_one_with_odd_characters_load(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "mödel 漢字 'q' %s.gguf"
    odd.write_bytes(llama.read_bytes())
    monkeypatch.chdir(tmp_path)
    with LlamaModel(odd.name) as model:
        assert model.n_layer == 2
        assert model.path == odd.name


def test_a_missing_file_names_itself_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "missing.gguf"
    with pytest.raises(ModelLoadError, match=r"missing\.gguf") as error:
        LlamaModel(path)
    assert isinstance(error.value, OSError)
    assert isinstance(error.value, KvCacheError)
    assert error.value.errno == 2
    assert error.value.filename == str(path)


@pytest.mark.hazard("C17")
def test_a_directory_an_empty_path_and_a_nul_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, "", "a\0b.gguf", str(tmp_path / "x.gguf") + "\0"):
        with pytest.raises(ModelLoadError):
            LlamaModel(path)


@pytest.mark.hazard("C16")
@pytest.mark.parametrize("path", [None, 5, 1.5, True, [], object()])
def test_paths_of_other_types_are_type_errors(path: Any) -> None:
    with pytest.raises(TypeError):
        LlamaModel(path)


def test_an_unreadable_file_is_refused(llama: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    copy = tmp_path / "secret.gguf"
    copy.write_bytes(llama.read_bytes())
    copy.chmod(0)
    with pytest.raises(ModelLoadError) as error:
        LlamaModel(copy)
    assert error.value.errno == 13


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/proc/self/mem"])
def test_a_device_is_refused(device: str) -> None:
    if not os.path.exists(device):
        pytest.skip(f"there is no {device}")
    with pytest.raises(ModelLoadError):
        LlamaModel(device)


@pytest.mark.hazard("N16")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, child: Child) -> None:
    fifo = tmp_path / "pipe.gguf"
    os.mkfifo(fifo)
    code = (
        "import sys, pykvcache\n"
        "try: pykvcache.LlamaModel(sys.argv[1])\n"
        "except pykvcache.errors.ModelLoadError: print('refused')"
    )
    done = child(code, fifo, timeout=20)
    assert done.stdout == "refused\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_part_that_is_not_a_file_is_refused(
    child: Child, model_folder: Path, tmp_path: Path
) -> None:
    first, second = (tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2))
    shutil.copy(make_model("llama", model_folder), first)
    os.mkfifo(second)
    code = (
        "import sys, pykvcache\n"
        "try: pykvcache.LlamaModel(sys.argv[1])\n"
        "except pykvcache.errors.ModelLoadError as error: print(error)"
    )
    done = child(code, first, timeout=20)
    assert "00002-of-00002.gguf is not a regular file" in done.stdout, done.stderr


# Damaged files ------------------------------------------------------------------------


@pytest.mark.hazard("C17")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"G",
        b"GGUF",
        b"GGUF" + b"\0" * 20,
        b"GGUF" + b"\xff" * 400,
        b"PK\3\4" * 99,
        b"\0" * 999,
    ],
)
def test_files_that_are_not_gguf_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
        LlamaModel(path)


def test_a_failed_load_says_in_one_line_what_llama_cpp_said(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama.read_bytes()[:200_000])
    with pytest.raises(ModelLoadError) as error:
        LlamaModel(path)
    assert "\n" not in str(error.value)
    assert "out of bounds" in str(error.value) or "bounds" in str(error.value)


# Progress -----------------------------------------------------------------------------


def test_progress_rises_from_zero_to_one(llama: Path) -> None:
    seen: list[float] = []
    LlamaModel(llama, progress=seen.append).close()
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert all(type(f) is float for f in seen)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_false_from_progress_cancels_the_load(llama: Path, at: int) -> None:
    seen: list[float] = []

    def go_on(fraction: float) -> bool:
        seen.append(fraction)
        return len(seen) <= at

    with pytest.raises(ModelLoadError, match="cancel"):
        LlamaModel(llama, progress=go_on)
    assert len(seen) == at + 1


def test_only_false_cancels(llama: Path) -> None:
    def nothing(fraction: float) -> None:
        return None

    LlamaModel(llama, progress=nothing).close()
    LlamaModel(llama, progress=lambda fraction: True).close()


@pytest.mark.hazard("N20")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, StopIteration])
def test_exceptions_of_progress_are_raised(llama: Path, error: type[BaseException]) -> None:
    mine = error("from the callback")

    def fail(fraction: float) -> None:
        raise mine

    with pytest.raises(error) as caught:
        LlamaModel(llama, progress=fail)
    assert caught.value is mine
    LlamaModel(llama).close()


def test_progress_runs_on_the_loading_thread_and_may_load_another_model(llama: Path) -> None:
    threads: set[int] = set()
    inner: list[int] = []

    def nested(fraction: float) -> None:
        threads.add(threading.get_ident())
        if fraction == 1.0:
            with LlamaModel(llama) as other:
                inner.append(other.n_vocab)

    LlamaModel(llama, progress=nested).close()
    assert threads == {threading.get_ident()}
    assert inner == [320]


@pytest.mark.parametrize("progress", [1, "x", True, 0.5, []])
def test_progress_must_be_callable(llama: Path, progress: Any) -> None:
    with pytest.raises(TypeError, match="progress"):
        LlamaModel(llama, progress=progress)
