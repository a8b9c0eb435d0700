"""Ends of objects, interpreters and processes in every order: no crash, no leak."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from binding.kit import differ, resident_bytes, words
from pykvcache import LlamaContext, LlamaModel, Sampler
from pykvcache.errors import ClosedError, ContextCreateError
from support.children import assert_quiet, child
from support.examples import some
from support.models import EXACT, RIGHT

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 4, "n_threads": 1, **EXACT}

#: Arguments for the methods that do not take integers.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("decode", "encode", "detokenize"), ([5],)),
    **dict.fromkeys(("load_adapter", "load_control_vector"), (__file__,)),
    "generate": ([5], 1),
    "kv_cache_seq_div": (0, None, None, 1),
    "set_n_threads": (1,),
    "set_state": (b"", 0),
    "tokenize": ("a",),
}
#: What may be called on a closed object, and methods with tests of their own.
OTHERS = {"close", "abort", "apply_chat_template", "chat_format", "parse_chat"}
FACTS: dict[type, dict[str, Any]] = {
    LlamaContext: {"n_ctx": 256, "n_seq_max": 4, "kv_unified": True, "is_closed": True},
    LlamaModel: {"n_vocab": 320, "vocab_only": False, "is_closed": True},
}
USES: dict[type, list[Callable[[Any], object]]] = {
    LlamaContext: [Sampler().sample],
    LlamaModel: [
        LlamaContext,
        lambda model: model.apply_chat_template([], template="{{ bos_token }}"),
    ],
}


def methods(kind: type) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or name in OTHERS:
            continue
        required = [
            p
            for p in list(inspect.signature(function).parameters.values())[1:]
            if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        ]
        found[name] = ARGUMENTS.get(name, (0,) * len(required))
    return found


@pytest.mark.hazard("D38", "L2")
@pytest.mark.parametrize("kind", FACTS)
def test_a_closed_object_refuses_work_and_keeps_its_facts(path: Path, kind: Any) -> None:
    model = LlamaModel(path)
    ctx = LlamaContext(model, **OPTIONS)
    ctx.decode([5])
    one = ctx if kind is LlamaContext else model
    assert len(methods(LlamaContext)) > 20
    assert repr(model) == f"<LlamaModel {model.path!r}: {model.description}>"
    for _ in range(3):
        one.close()
    for name, args in methods(kind).items():
        with pytest.raises(ClosedError):
            list(getattr(one, name)(*args))  # a generator does nothing before it is asked
    for name, _ in inspect.getmembers(kind, lambda v: isinstance(v, property)):
        try:
            value = getattr(one, name)
        except ClosedError:
            assert name not in FACTS[kind]
        else:
            assert value == FACTS[kind].get(name, value)
            assert not name.startswith(("token_", "add_"))
    assert repr(one).endswith("(closed)>")
    assert ctx.abort() is False
    for use in USES[kind]:
        with pytest.raises(ClosedError):
            use(one)


@pytest.mark.hazard("L1")
def test_a_context_outlives_its_model(path: Path, fresh_logits: Any) -> None:
    model = LlamaModel(path)
    ctx = LlamaContext(model, **OPTIONS)
    tokens = words(20)
    ctx.decode(tokens[:10])
    model.close()
    with pytest.raises(ClosedError):
        LlamaContext(model, **OPTIONS)
    del model
    gc.collect()
    ctx.decode(tokens[10:])
    assert differ(ctx.logits(), fresh_logits("llama", tokens)) < RIGHT
    assert Sampler(temperature=0).sample(ctx) == int(ctx.logits().argmax())
    assert len(list(ctx.generate([5, 6], 5, seq_id=1))) == 5
    ctx.copy_kv_cache_seq(0, 2)
    ctx.kv_cache_seq_add(1, 0, None, 3)
    ctx.decode([5], seq_id=1)
    ctx.close()


def test_a_generator_keeps_its_context_alive(path: Path) -> None:
    tokens = LlamaContext(LlamaModel(path), **OPTIONS).generate([5, 6], 10)
    first = next(tokens)
    gc.collect()
    assert [first, *tokens]
    ctx = LlamaContext(LlamaModel(path), **OPTIONS)
    tokens = ctx.generate([5, 6], 10)
    next(tokens)
    ctx.close()
    with pytest.raises(ClosedError):
        next(tokens)


def test_cycles_are_collected(path: Path) -> None:
    class Holder:
        pass

    gone = []
    for order in (0, 1):
        model = LlamaModel(path)
        ctx = LlamaContext(model, **OPTIONS)
        ctx.decode([5])
        holder = Holder()
        holder.things = (ctx, model) if order else (model, ctx)  # type: ignore[attr-defined]
        holder.self = holder  # type: ignore[attr-defined]
        ctx.holder = holder  # type: ignore[attr-defined]
        model.holder = holder  # type: ignore[attr-defined]
        gone += [weakref.ref(ctx), weakref.ref(model)]
        del model, ctx, holder
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_models_and_contexts_cannot_be_pickled_or_copied_deeply(model: Any) -> None:
    with LlamaContext(model("llama"), **OPTIONS) as ctx:
        for one in (ctx, model("llama"), ctx.native, model("llama").native):
            for clone in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match=r"pickle|cop"):
                    clone(one)


def test_init_can_be_called_again_and_begins_anew(model: Any) -> None:
    ctx = LlamaContext(model("llama"), **OPTIONS)
    ctx.decode([5, 6])
    ctx.__init__(model("mamba"), **OPTIONS)  # type: ignore[misc]
    assert ctx.memory_kind == "recurrent"
    assert ctx.kv_cache_seq_pos_max(0) == -1
    ctx.close()


def grows(work: Callable[[], object], times: int) -> int:
    # The allocator keeps some of what the first ones gave back.
    for _ in range(max(4, times // 4)):
        work()
    before = resident_bytes()
    for _ in range(times):
        work()
    return resident_bytes() - before


def refused_context(model: LlamaModel) -> None:
    # Passes every check and fails inside llama.cpp, when the compute buffer is reserved.
    with pytest.raises((ContextCreateError, MemoryError)):
        LlamaContext(model, n_ctx=600_000, n_batch=2**31 - 1, n_ubatch=2**31 - 1, n_threads=1)


def decode_once(model: LlamaModel) -> None:
    with LlamaContext(model, **OPTIONS) as ctx:
        ctx.decode(words(30))
        Sampler(grammar="root ::= [a-z]+", model=model).sample(ctx)


def drop_unclosed(model: LlamaModel) -> None:
    LlamaContext(model, **OPTIONS).decode([5])


@pytest.mark.parametrize(
    ("work", "times"), [(decode_once, 100), (drop_unclosed, 100), (refused_context, 4)]
)
def test_contexts_leave_no_memory_behind(model: Any, work: Any, times: int) -> None:
    # One context takes more than a megabyte, the refused one some 150.
    assert grows(lambda: work(model("llama")), times) < 30 * 2**20


def test_models_leave_no_memory_behind(path: Path) -> None:
    assert grows(lambda: LlamaModel(path, load_mode="none"), 100) < 20 * 2**20


FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

# How each Python makes an interpreter that may load single-phase extensions.
BEGIN = """
import sys
try:
    import _interpreters as interpreters  # from 3.13
    one = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    one = interpreters.create(**({"isolated": False} if sys.version_info >= (3, 12) else {}))

def run(code):
    # NumPy warns in subinterpreters, and pykvcache that it can do less.
    quiet = "import warnings; warnings.simplefilter('ignore')\\n"
    failed = interpreters.run_string(one, quiet + code)
    assert failed is None, failed
"""

ARRAYS = """
from pykvcache.arrays import KVCache
import numpy as np
keys, _ = KVCache().update(np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 4)))
assert keys.shape == (1, 1, 2, 4)
"""

REFUSED = """
native = "__import__('pykvcache._native.lib')"
for load in ("pykvcache.LlamaModel", "pykvcache.system_info", native):
    try:
        import pykvcache
        eval(load)
    except ImportError as error:
        assert "subinterpreter" in str(error), error
    else:
        raise AssertionError(load)
"""


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    FREE_THREADED, reason="NumPy for free-threaded interpreters cannot be used in a subinterpreter"
)
def test_the_import_says_so_once_and_the_array_caches_work() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import pykvcache
    assert [w.category for w in seen] == [RuntimeWarning]
    assert "subinterpreter" in str(seen[0].message)
import pykvcache.simulate
"""
    assert said(child(BEGIN + f"run({code + ARRAYS!r}); print('end')")) == "end\n"


@pytest.mark.hazard("N37")
def test_the_import_is_refused_and_the_main_interpreter_unharmed() -> None:
    use = "assert model.detokenize(model.tokenize('Lucy has a red kite.')).strip()"
    code = f"""
import pykvcache
with pykvcache.LlamaModel(pykvcache.embedded_model_path()) as model:
    {use}
    run({REFUSED!r})
    {use}
    with pykvcache.LlamaContext(model, n_ctx=64, n_threads=1) as ctx:
        ctx.decode([1, 2, 3])
        interpreters.destroy(one)
        ctx.decode([4])
print("end")
"""
    assert said(child(BEGIN + code)) == "end\n"


WITHOUT_GIL = """
import pykvcache
for load in ("LlamaModel", "system_info", "LlamaModel"):
    try:
        getattr(pykvcache, load)
    except ImportError as error:
        assert "needs the GIL, and PYTHON_GIL=0" in str(error), error
    else:
        raise AssertionError(load)
"""


@pytest.mark.hazard("N170")
def test_without_the_gil_the_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend = "import sys, warnings; warnings.simplefilter('ignore')\n"
    if FREE_THREADED:
        monkeypatch.setenv("PYTHON_GIL", "0")
    else:  # another interpreter says the same of itself
        pretend += "sys._is_gil_enabled = lambda: False\n"
    assert_quiet(child(pretend + WITHOUT_GIL + ARRAYS))


@pytest.mark.skipif(not FREE_THREADED, reason="for a free-threaded Python")
def test_a_free_threaded_python_turns_the_gil_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHON_GIL", raising=False)
    code = "import sys, warnings; warnings.simplefilter('ignore')\n"
    code += "import pykvcache; pykvcache.system_info(); print(sys._is_gil_enabled())"
    assert said(child(code)) == "True\n"


START = """
import sys, gc, time, atexit, threading
import numpy as np
from pykvcache import LlamaContext, LlamaModel, Sampler, KvCacheError
model = LlamaModel(sys.argv[1])
ctx = LlamaContext(model, n_ctx=2048, n_threads=2)
ctx.decode([5, 6, 7])
"""

ENDS = {
    "nothing closed": "",
    "model dropped": "del model",
    "a cycle": "ctx.model_again = model; model.ctx = ctx; me = [ctx]; me.append(me)",
    "hidden in a builtin module": "sys.keep = (ctx, model, ctx.generate([5], 9))",
    "a suspended generator": "tokens = ctx.generate([5], 10); next(tokens)",
    "a grammar": "s = Sampler(grammar='root ::= [a-z]+', model=model); s.sample(ctx)",
    "a finalizer that decodes": """
class Late:
    def __del__(self):
        try: ctx.decode([5])
        except (KvCacheError, NameError, TypeError, RuntimeError): pass
late = Late()
""",
    "a thread that ends later": """
def work():
    time.sleep(0.2)
    try: ctx.decode(np.full(500, 5))
    except KvCacheError: pass
threading.Thread(target=work).start()
""",
}

DAEMONS = {
    "decoding": """
def work():
    own = LlamaContext(model, n_ctx=2048, n_threads=THREADS)
    while True:
        own.clear_kv_cache()
        own.decode(np.full(1500, 5))
""",
    "sharing a context": """
def work():
    while True:
        ctx.clear_kv_cache_seq(1)
        ctx.decode(np.full(300, 5), seq_id=1)
        ctx.kv_cache_seq_pos_max(0)
""",
    "loading models": """
def work():
    while True:
        LlamaModel(sys.argv[1], progress=lambda f: None).tokenize("hello " * 1000)
""",
}


@pytest.mark.hazard("L3")
@pytest.mark.parametrize("end", some(ENDS, "nothing closed", "a cycle", "a suspended generator"))
def test_the_interpreter_ends_quietly(model: Any, end: str) -> None:
    done = child(START + ENDS[end], model("llama").path)
    assert_quiet(done)


@pytest.mark.hazard("N18")
@pytest.mark.skipif(
    FREE_THREADED,
    reason="a free-threaded interpreter may wait for a lock of a thread that it ended",
)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("work", DAEMONS)
def test_the_interpreter_ends_under_working_daemons(model: Any, work: str, threads: int) -> None:
    code = START + DAEMONS[work].replace("THREADS", str(threads))
    code += (
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\ntime.sleep(0.15)"
    )
    done = child(code, model("llama").path)
    assert (done.returncode, done.stdout) == (0, "")
    # A daemon may still say that its context was closed under it.
    assert "Fatal" not in done.stderr
    assert "terminate" not in done.stderr
