"""A server on the embedded model, in a thread, on a free port of loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
uvicorn = pytest.importorskip("uvicorn")

from pykvcache import embedded_model_path  # noqa: E402
from pykvcache.serve import Defaults, Models, make_app  # noqa: E402

TEMPLATES = Path(__file__).parents[2] / "vendor/llama.cpp/models/templates"

CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Lucy has a red kite. Tom is a baker."}]
KEYS = {"key-of-ann": "ann", "key-of-bob": "bob"}


@contextlib.contextmanager
def serving(
    keys: dict[str, str] | None = None, http: Any = "auto", **options: Any
) -> Iterator[str]:
    """Run a server for the block; gives its address."""
    context = {"n_ctx": 2048, "ram_bytes": 32 << 20, **options.pop("llm", {})}
    files = {"stories": options.pop("path", embedded_model_path())}
    models = Models(files, context, **options.pop("models", {}))
    app = make_app(models, keys=keys, **options)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", http=http)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended before it began"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="module", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let clients read no certificates: each call of httpx reads all of them anew, in 0.05 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="session")
def openai() -> Any:
    """The package, which takes a second to import."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """The package, which takes some seconds to import."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="session")
def thinking() -> str:
    """The template of a model that thinks and calls tools."""
    path = TEMPLATES / "Qwen-Qwen3-0.6B.jinja"
    if not path.exists():
        pytest.skip("the templates are in llama.cpp's sources")
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def thinker(thinking: str) -> Iterator[str]:
    """A server whose model, it is told, thinks and calls tools."""
    with serving(models={"defaults": Defaults(thinking)}) as found:
        yield found


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """A server without keys."""
    with serving() as found:
        yield found


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Start servers with options; they end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(**options))
