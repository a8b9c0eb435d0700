"""The examples, run as scripts: on the embedded model, and on generated ones by their argument."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.forks import run_forked
from support.models import make_model

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# One CPU: threads that wait for each other on a busy machine take most of the time.
ON_ONE_CPU = """
import os, runpy, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(name: str, *args: str | Path, typed: str | None = None) -> subprocess.CompletedProcess[str]:
    script = EXAMPLES / f"{name}.py"
    imports = ("matplotlib.pyplot",) if name == "plot_cache" else ()
    return run_forked(
        ["-c", ON_ONE_CPU, script, *args], stdin=typed or "", package=False, imports=imports
    )


def output(name: str, *args: str | Path, typed: str | None = None) -> str:
    result = run(name, *args, typed=typed)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_fork_a_prompt() -> None:
    shown = output("fork_a_prompt")
    prompt = re.search(r"^prompt: (\d+) tokens evaluated$", shown, re.M)
    figures = re.search(r"(\d+) tokens evaluated; without forks: (\d+)$", shown)
    assert prompt
    assert figures
    with_forks, without = int(figures[1]), int(figures[2])
    assert without - with_forks == 3 * int(prompt[1]), "three of four times the prompt is saved"
    texts = re.findall(r"^fork \d: (.+)$", shown, re.M)
    assert len(texts) == len(set(texts)) == 4


def test_rewind() -> None:
    shown = output("rewind")
    costs = [int(n) for n in re.findall(r"\((\d+) tokens evaluated\)", shown)]
    story = re.search(r"^the story: (\d+) tokens, evaluated once$", shown, re.M)
    assert story
    assert len(costs) == 3
    assert all(cost < int(story[1]) for cost in costs)


def test_endless_generation() -> None:
    shown = output("endless_generation")
    figures = re.search(r"(\d+) tokens evaluated, (\d+) shifts, (\d+) cells$", shown)
    assert figures
    evaluated, shifts, cells = map(int, figures.groups())
    drops = [int(n) for n in re.findall(r"\[256 tokens: dropped (\d+)\]", shown)]
    assert shifts == len(drops) >= 3
    # Nothing was evaluated again: what was evaluated was dropped or is still there.
    assert cells - drops[-1] < evaluated - sum(drops) <= cells


# In parts of 8 tokens, with what was decoded written down.
RECORDED = """
import json, runpy, sys
import pykvcache

class Recording(pykvcache.LlamaContext):
    fed = []

    def __init__(self, model, **options):
        super().__init__(model, n_batch=8, **options)

    def decode(self, tokens):
        before = self.tokens_evaluated
        try:
            super().decode(tokens)
        finally:
            self.fed.extend(tokens[: self.tokens_evaluated - before])

class Choosing(pykvcache.Sampler):
    chosen = []

    def sample(self, ctx):
        self.chosen.append(super().sample(ctx))
        return self.chosen[-1]

pykvcache.LlamaContext, pykvcache.Sampler = Recording, Choosing
sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0], run_name="__main__")
with pykvcache.LlamaModel(names["path"]) as model:
    wanted = model.tokenize(names["PROMPT"]).tolist()
    for token in Choosing.chosen:
        wanted += names["scene"] if model.is_eog(token) else [token]
print(json.dumps([Recording.fed, wanted[: len(Recording.fed)], names["shifts"]]))
"""


def test_endless_generation_feeds_each_token_once() -> None:
    result = run_forked(["-c", RECORDED, EXAMPLES / "endless_generation.py"], package=False)
    assert result.returncode == 0, result.stderr
    fed, wanted, shifts = json.loads(result.stdout.splitlines()[-1])
    assert fed == wanted
    assert shifts >= 3


def test_save_and_resume() -> None:
    shown = output("save_and_resume")
    saved = re.search(r"^saved (\d+) tokens in \d+ bytes$", shown, re.M)
    evaluated = re.search(r"^evaluated here: (\d+) tokens$", shown, re.M)
    assert saved
    assert evaluated
    assert int(evaluated[1]) < int(saved[1]), "the story was not evaluated again"
    assert "answered: Tom's dog is called Biscuit." in shown
    assert "does not match its checksum" in shown


def test_snapshots() -> None:
    shown = output("snapshots")
    ends = re.findall(r"^end \d:(.+)$", shown, re.M)
    assert len(set(ends)) == 3
    start = re.search(r"^snapshot: (\d+) tokens", shown, re.M)
    total = re.search(r"^(\d+) tokens evaluated$", shown, re.M)
    assert start
    assert total
    assert int(total[1]) == int(start[1]) + 3 * 16


def test_prefix_store() -> None:
    shown = output("prefix_store")
    lines = re.findall(
        r"^(\d+) tokens: (\d+) blocks from the store, (\d+) new; (\d+) tokens read; (.+)$",
        shown,
        re.M,
    )
    assert len(lines) == 3
    for k, (tokens, stored, new, read, _) in enumerate(lines):
        assert int(read) == int(tokens) - 8 * int(stored)
        assert (int(stored) > 3) == (k > 0)
        assert int(new) <= (1 if k else int(tokens) // 8)
    assert len({text for *_, text in lines}) == 3


def test_evict_tokens() -> None:
    shown = output("evict_tokens")
    whole = re.search(r"^whole cache: (\d\.\d+) nats per token, over 8 stories$", shown, re.M)
    assert whole
    assert 0.2 < float(whole[1]) < 1.5
    rows = re.findall(r"^(\w[\w ]+), (\d+)% kept +([+-]\d\.\d+) ", shown, re.M)
    more = {(rule, int(share)): float(nats) for rule, share, nats in rows}
    assert len(more) == 10
    assert all(nats > 0 for (_, share), nats in more.items() if share == 25)
    # On this model the tokens with large keys matter; a wrong selection would look like any other.
    assert more["large keys", 50] < more["at random", 50] / 2 < more["small keys", 50]


def test_plot_cache(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "cache.png"
    shown = output("plot_cache", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    figures = re.search(r"^(\d+) cells for (\d+) tokens, drawn in", shown)
    assert figures
    cells, tokens = map(int, figures.groups())
    story = cells - (40 + 20 + 30)  # shared by all three
    assert tokens == cells + 2 * story


def evaluated(shown: str) -> int:
    found = re.search(r"^(\d+) tokens evaluated$", shown, re.M)
    assert found
    return int(found[1])


def test_best_of_n() -> None:
    shown = output("best_of_n")
    rows = re.findall(r"^ *(-\d+\.\d+) '(.+)'$|^ *(-\d+\.\d+) \"(.+)\"$", shown, re.M)
    scores = [float(row[0] or row[2]) for row in rows]
    assert len(scores) == len({row[1] or row[3] for row in rows}) == 8
    assert scores == sorted(scores, reverse=True)
    assert evaluated(shown) < 8 * 39 + 25, "the prompt was evaluated once"


def test_beam_search() -> None:
    shown = output("beam_search")
    rows = re.findall(r"^ *(-\d+\.\d+) '(Once upon a time.+)'$", shown, re.M)
    assert len({text for _, text in rows}) == 4
    assert [float(score) for score, _ in rows] == sorted((float(s) for s, _ in rows), reverse=True)
    assert evaluated(shown) < 4 * 20 + 25, "a beam costs one token per step"


def test_many_prompts() -> None:
    shown = output("many_prompts")
    rows = re.findall(r"^ *(\d+) ms, (stop|length) +['\"].+['\"]$", shown, re.M)
    assert len(rows) == 16
    waits = [int(wait) for wait, _ in rows]
    assert max(waits[:8]) < max(waits[8:]), "eight run, eight wait"


def test_prefix_cache() -> None:
    shown = output("prefix_cache")
    turns = [tuple(map(int, row)) for row in re.findall(r"^chat: +(\d+) of +(\d+)", shown, re.M)]
    tree = [tuple(map(int, row)) for row in re.findall(r"^tree: +(\d+) of +(\d+)", shown, re.M)]
    assert len(turns) == len(tree) == 3
    assert turns[0][0] == turns[0][1], "the first knows nothing"
    assert all(new < n / 3 for new, n in [*turns[1:], *tree])


def test_chat() -> None:
    typed = "Once upon a time there was a girl.\n/undo\nOnce upon a time\nand then\n"
    shown = output("chat", typed=typed)
    counts = [int(n) for n in re.findall(r"\[(\d+) tokens evaluated so far\]", shown)]
    assert len(counts) == 3
    assert "(back to 0 tokens)" in shown
    assert output("chat", typed=typed) == shown
    # No token of an earlier turn is evaluated again: the new ones, and up to 60 of an answer.
    assert counts[2] - counts[1] < 70


def test_chat_on_a_terminal_says_how_it_ends() -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    os.write(ours, b"Once upon a time\n/undo\n\x04")
    script = str(EXAMPLES / "chat.py")
    with open(theirs, "rb") as typed:
        done = subprocess.run(
            [sys.executable, "-c", ON_ONE_CPU, script],
            stdin=typed,
            capture_output=True,
            text=True,
            timeout=120,
        )
    os.close(ours)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(/undo takes a turn back, Ctrl-D ends)\n> ")
    assert done.stdout.endswith("(back to 0 tokens)\n> ")


@pytest.mark.parametrize(
    ("name", "module"), [("numpy_llama", "gguf"), ("plot_cache", "matplotlib")]
)
def test_an_extra_that_is_missing_is_named_in_one_line(name: str, module: str) -> None:
    script = f"import runpy, sys; sys.modules[{module!r}] = None; runpy.run_path(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert f"needs {module}: pip install '.[" in done.stderr
    assert done.stderr.count("\n") == 1


def test_chat_goes_back_to_what_a_full_cache_dropped() -> None:
    """The context has 2,048 cells: half of the talk is dropped before it is taken back."""
    line = "Once upon a time there was a girl. "
    shown = output("chat", typed=f"{150 * line}\n{75 * line}\n/undo\n/undo\n")
    back = [int(n) for n in re.findall(r"\(back to (\d+) tokens\)", shown)]
    assert len(back) == 2
    assert back[0] > 1024
    assert back[1] == 0
    assert len(re.findall(r"tokens evaluated so far", shown)) == 2


def test_examples_on_keys_refuse_models_that_have_more(model_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("evict_tokens", "plot_cache"):
        more = [tmp_path / "cache.png"] if name == "plot_cache" else []
        result = run(name, make_model("jamba", model_folder), *more)
        assert result.returncode == 1
        assert "hybrid memory" in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("model", ["llama", "jamba"])
@pytest.mark.parametrize(
    "name",
    [
        "fork_a_prompt",
        "rewind",
        "save_and_resume",
        "snapshots",
        "best_of_n",
        "beam_search",
        "many_prompts",
    ],
)
def test_takes_a_model(name: str, model: str, model_folder: Path) -> None:
    assert "tokens" in output(name, make_model(model, model_folder))


def test_endless_generation_says_what_cannot_be_done(model_folder: Path) -> None:
    assert re.search(
        r"[1-9] shifts", output("endless_generation", make_model("llama", model_folder))
    )
    for model, said in {"qwen2vl": "cannot be shifted", "jamba": "cannot drop a part"}.items():
        result = run("endless_generation", make_model(model, model_folder))
        assert result.returncode == 1
        assert said in result.stderr
        assert result.stderr.count("\n") == 1


def test_the_notebook_runs_and_shows_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install '.[plot]'")
    nbclient, nbformat, _ = (
        pytest.importorskip(name, reason="pip install nbclient ipykernel")
        for name in ("nbclient", "nbformat", "ipykernel")
    )
    notebook = nbformat.read(EXAMPLES / "forked_story.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = {cell.source.splitlines()[-1]: cell for cell in notebook.cells if "outputs" in cell}
    assert "<svg" in cells["ctx"].outputs[0].data["text/html"]
    for source, kind in (
        ("story", "text/html"),
        ("ctx.kv(story.seq_id).plot()", "image/svg+xml"),
    ):
        assert any(kind in output.get("data", {}) for output in cells[source].outputs), source
    assert "to evaluate" in cells["sequence.reuse"].outputs[-1].data["text/html"]
