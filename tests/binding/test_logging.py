"""llama.cpp's log: silent by default, in Python's logging when wanted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pykvcache import LlamaContext, LlamaModel
from pykvcache.errors import ModelLoadError
from support.children import assert_quiet, child


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    one = logging.getLogger("pykvcache.llama")
    handlers, filters = one.handlers[:], one.filters[:]
    yield one
    one.setLevel(logging.NOTSET)
    one.handlers[:], one.filters[:] = handlers, filters
    one.disabled = False


def use(path: Path) -> None:
    with LlamaModel(path) as model, LlamaContext(model, n_ctx=256, n_threads=1) as ctx:
        ctx.decode([5, 6])


def test_a_program_that_does_not_ask_hears_nothing(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:200_000])
    code = """
import sys
from pykvcache import LlamaContext, LlamaModel, KvCacheError, system_info
system_info()
with LlamaModel(sys.argv[1]) as model, LlamaContext(model, n_ctx=256, swa_full=True) as ctx:
    ctx.decode([5, 6])
    for wrong in (lambda: LlamaModel(sys.argv[2]), lambda: ctx.decode([5] * 999)):
        try: wrong()
        except KvCacheError: pass
        else: sys.exit("not refused")
"""
    done = child(code, path, tmp_path / "cut.gguf")
    assert_quiet(done)


def test_lines_arrive_with_their_levels(
    path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pykvcache.llama")
    use(path)
    records = [r for r in caplog.records if r.name == "pykvcache.llama"]
    text = "\n".join(r.getMessage() for r in records)
    assert "llama_model_loader" in text
    assert "n_ctx" in text
    assert {r.levelno for r in records} >= {logging.INFO}
    assert all(r.getMessage().strip() and "\n" not in r.getMessage()[-1:] for r in records)
    odd = tmp_path / "100%s %d %(x)s.gguf"
    odd.write_bytes(path.read_bytes())
    use(odd)
    assert any(odd.name in r.getMessage() for r in caplog.records)
    odd.write_bytes(path.read_bytes()[:200_000])
    caplog.set_level(logging.WARNING, "pykvcache.llama")
    caplog.clear()
    with pytest.raises(ModelLoadError) as error:
        LlamaModel(odd)
    assert caplog.records
    assert all(r.levelno >= logging.WARNING for r in caplog.records)
    assert any(r.getMessage()[:40] in str(error.value) for r in caplog.records)
    assert "\n" not in str(error.value)


class Raises(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise ZeroDivisionError("in a filter")


class BrokenHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ZeroDivisionError("in a handler")


@pytest.mark.hazard("N20")
@pytest.mark.parametrize("broken", [Raises(), BrokenHandler()])
def test_a_logger_that_raises_is_reported_and_breaks_nothing(
    logger: logging.Logger, path: Path, capsys: pytest.CaptureFixture[str], broken: Any
) -> None:
    logger.setLevel(logging.INFO)
    if isinstance(broken, logging.Filter):
        logger.addFilter(broken)
    else:
        logger.addHandler(broken)
    use(path)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_handler_may_use_the_package(logger: logging.Logger, path: Path) -> None:
    model = LlamaModel(path)
    ctx = LlamaContext(model, n_ctx=256, n_threads=1)
    seen: list[int] = []

    class Uses(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if len(seen) < 3:
                seen.append(0)
                LlamaModel(path).close()
                try:
                    seen[-1] = len(model.tokenize("Hello")) + ctx.kv_cache_seq_pos_max(0)
                except RuntimeError:
                    seen[-1] = -1  # inside of a call of this very context

    logger.setLevel(logging.DEBUG)
    logger.addHandler(Uses())
    done: list[bool] = []

    def work() -> None:
        use(path)
        ctx.decode([5] * 20)
        done.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert done
    assert seen
    ctx.close()
