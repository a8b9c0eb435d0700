"""llama.cpp's own files, compared with llama.cpp: its functions in a small program, and its server.

The program is linked to the libraries of this build; where there is no build tree or no compiler
it is skipped. The server is that of xllamacpp, where one is installed that writes this version.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Case, Fresh, Make, apart
from pykvcache import LlamaContext, LlamaModel, embedded_model_path
from pykvcache.state import LlamaStateFile
from state.kit import CASES, WORDS, next_logits
from support.builds import SOURCES
from support.models import make_model
from support.sanitizer import SANITIZED

ROOT = Path(__file__).parents[2]
TOKENS = WORDS[:90]  # more than the window of the tests' models
Peer = Callable[..., Any]


def options(case: Case) -> dict[str, Any]:
    return {"n_ctx": 1024, "n_ubatch": 512} | case.options


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, or a skip where it cannot be built."""
    if SANITIZED:
        pytest.skip("the program and the sanitizers' build round differently")
    # The package's own build: that of make test-device needs other libraries.
    built = sorted(ROOT.glob("build/cp*/llama.cpp/src/libllama.a"), key=lambda p: p.stat().st_mtime)
    source = SOURCES.resolve()
    own = f"llama.cpp_SOURCE_DIR:STATIC={source}\n"
    built = [p for p in built if own in (p.parents[2] / "CMakeCache.txt").read_text()]
    if not built or not source.is_dir():
        pytest.skip("no libraries of a build in this tree to link the program to")
    out = tmp_path_factory.mktemp("peer") / "peer"
    ggml = built[-1].parents[1] / "ggml" / "src"
    if {p.name for p in ggml.glob("*/libggml-*.a")} - {"libggml-rpc.a"}:
        pytest.skip("another backend needs other libraries")
    command = ["c++", "-std=c++17", "-O1", f"-I{source / 'include'}"]
    command += [f"-I{source / 'ggml' / 'include'}"]
    command += [str(Path(__file__).with_name("llama_peer.cpp")), "-o", str(out), str(built[-1])]
    command += [str(ggml / f"lib{name}.a") for name in ("ggml", "ggml-cpu", "ggml-base")]
    try:
        done = subprocess.run(
            [*command, "-fopenmp", "-lpthread", "-ldl", "-lm"], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("no C++ compiler")
    assert done.returncode == 0, done.stderr[-1000:]
    return out


@pytest.fixture
def peer(program: Path, model_folder: Path, tmp_path: Path) -> Peer:
    """``peer("save" or "load", case, file, seq)``: the logits after one more token."""

    def run(verb: str, case: Case, file: Path, seq_id: int) -> Any:
        out = tmp_path / "logits"
        model = make_model(case.name, model_folder)
        sizes = options(case)
        numbers = [seq_id, int(not case.unified), int(case.swa_full)]
        numbers += [sizes["n_ctx"], sizes["n_ubatch"]]
        command = [program, verb, model, file, *numbers, out, *TOKENS]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr[-500:]
        return np.fromfile(out, np.float32)

    return run


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_files_are_written_and_read_as_by_llama_cpp(
    case: Case, whole: bool, peer: Peer, make_context: Make, fresh_logits: Fresh, tmp_path: Path
) -> None:
    ctx, other = (make_context(case.name, **options(case)) for _ in range(2))
    want = fresh_logits(case.name, [*TOKENS, 9])
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    peer("save", case, theirs, -1 if whole else 1)
    other.decode(TOKENS[:5], seq_id=0)
    file = other.load_llama_file(theirs, None if whole else 2)
    assert file.kind == ("context" if whole else "sequence")
    assert file.tokens.tolist() == TOKENS.tolist()
    assert list(other.sequences()) == ([1] if whole else [0, 2])
    assert apart(next_logits(other, 1 if whole else 2), want) < case.tolerance
    ctx.decode(TOKENS, seq_id=1)
    assert ctx.save_llama_file(ours, None if whole else 1, TOKENS) == ours.stat().st_size
    assert ours.read_bytes() == theirs.read_bytes()
    assert apart(peer("load", case, ours, -1 if whole else 3), want) < case.tolerance


SERVER = """
import json, sys, urllib.request
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.slot_save_path = sys.argv[1], sys.argv[2] + "/"
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 256, 1, 1
params.port, params.warmup, params.fit_params, params.verbosity = 0, False, False, 0
server = xllamacpp.Server(params)
for line in sys.stdin:
    path, body = json.loads(line)
    request = urllib.request.Request(
        server.listening_address + path, json.dumps(body).encode(),
        {"Content-Type": "application/json"})
    print(urllib.request.urlopen(request, timeout=60).read().decode(), flush=True)
"""


def test_llama_server_slots_can_be_loaded_and_written(tmp_path: Path) -> None:
    """llama-server's slots load with their tokens, and our files load as its slots."""
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")
    prompt = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0, "id_slot": 0}
    prompt |= {"return_tokens": True, "cache_prompt": True}
    slot = "/slots/0?action="

    def served(*calls: Any) -> Any:
        text = "".join(json.dumps(call) + "\n" for call in calls)
        command = [sys.executable, "-c", SERVER, embedded_model_path(), str(tmp_path)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    first, saved = served(("/completion", prompt), (slot + "save", {"filename": "theirs"}))
    version = int.from_bytes((tmp_path / "theirs").read_bytes()[4:8], "little")
    if version not in (2, 3):
        pytest.skip(f"this llama-server writes version {version}")
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=256) as ctx:
        file = ctx.load_llama_file(tmp_path / "theirs", 0)
        assert len(file.tokens) == saved["n_saved"] == ctx.kv_cache_seq_pos_max(0) + 1
        assert file.tokens[-7:].tolist() == first["tokens"][:-1]
        ctx.decode(np.array(first["tokens"][-1:], np.int32))
        restored = ctx.logits()
        ctx.clear_kv_cache()
        ctx.decode(np.array([*file.tokens, first["tokens"][-1]], np.int32))
        assert apart(ctx.logits(), restored) < 0.05  # f16, and other kernels
        ctx.save_llama_file(tmp_path / "ours", 0, [*file.tokens, first["tokens"][-1]])
    if version == 3:
        (back,) = served((slot + "restore", {"filename": "ours"}))
        assert back["n_restored"] == len(file.tokens) + 1
        assert LlamaStateFile.load(tmp_path / "ours").version == version
