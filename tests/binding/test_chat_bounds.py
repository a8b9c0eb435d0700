"""A template that never ends, or takes all memory, ends with a ChatTemplateError."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support import hostile_templates as hostile
from support.forks import run_forked
from support.hostile_templates import loop
from support.sanitizer import SANITIZED

pytest.importorskip("jinja2")

from pykvcache._jinja import render as limits
from pykvcache._jinja.render import render_template
from pykvcache.errors import ChatTemplateError

TESTS = Path(__file__).parents[1]

# Renders every template of a list in this process, in which no more than so much memory is to be
# had, and in which nothing but our own bounds keeps recursion from the end of the stack.
CHILD = """
import resource, sys
from support import hostile_templates
from pykvcache.errors import ChatTemplateError
from pykvcache._jinja import render as limits
name, deep, steps, size, room = sys.argv[1], *map(int, sys.argv[2:])
limits.MAX_STEPS, limits.MAX_SIZE = steps, size
if deep:
    sys.setrecursionlimit(10**6)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
if room:
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
for template in getattr(hostile_templates, name):
    try:
        text = limits.render_template(template, {"messages": []}, 0, 0)
    except ChatTemplateError as error:
        assert "MemoryError" not in str(error), (template[:200], error)
        print(error.reason, str(error)[:100].replace(chr(10), " "))
    else:
        print("rendered", text[:40])
"""


def outcomes(name: str, *, deep: bool, steps: int, size: int, room: int) -> list[str]:
    """Return how the templates of a list end, in a process that must not die of them."""
    if SANITIZED:
        room = 0
    arguments = ["-c", CHILD, name, int(deep), steps, size, room]
    done = run_forked(arguments, timeout=600, imports=("jinja2",))
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("name", ["ENDLESS", "HUGE", "DEEP", "LONG", "CHAINS"])
def test_no_template_ends_the_process_or_goes_on(name: str) -> None:
    """With small bounds: 30,000 steps and 4 MiB."""
    deep = name in ("DEEP", "LONG", "CHAINS")
    found = outcomes(name, deep=deep, steps=30_000, size=1 << 22, room=1 << 27)
    ends = {"CHAINS": {"rendered", "limit"}, "LONG": {"limit", "error", "rendered"}}
    assert len(found) == len(getattr(hostile, name))
    for template, outcome in zip(getattr(hostile, name), found, strict=True):
        assert outcome.split()[0] in ends.get(name, {"limit", "error"}), (template[:200], outcome)
    if name in ("ENDLESS", "DEEP"):
        assert all(outcome.startswith("limit") for outcome in found)
    if deep:
        assert not [outcome for outcome in found if "RecursionError" in outcome]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("name", ["ENDLESS", "HUGE", "DEEP", "LONG", "CHAINS"])
def test_the_bounds_themselves_hold(name: str) -> None:
    """With the bounds that users have, in 1 GiB."""
    size = limits.MAX_SIZE
    found = outcomes(name, deep=True, steps=limits.MAX_STEPS, size=size, room=1 << 30)
    assert len(found) == len(getattr(hostile, name))


def test_other_threads_have_bounds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No signal and no timer: rendering works the same beside the main thread."""
    monkeypatch.setattr(limits, "MAX_STEPS", 300_000)
    found: list[str] = []

    def work(n: int) -> None:
        try:
            render_template(loop("x", n=10_000), {"n": n}, 0, 0)
            render_template(hostile.THREE, {}, 0, 0)
        except ChatTemplateError as error:
            found.append(error.reason)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == ["limit", "limit"]


def test_bounds_grow_with_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STEPS", 100_000)
    template = "{% for m in messages %}" * 2 + "{{ m.content[:1] }}" + "{% endfor %}" * 2
    messages = [{"content": "abc"}] * 200
    with pytest.raises(ChatTemplateError, match="steps"):
        render_template(template, {"messages": messages}, 1, 3)
    assert len(render_template(template, {"messages": messages}, 3 * 200, 3 * 200)) == 200**2


def test_what_was_freed_is_not_counted() -> None:
    """A text that grows with each message is written anew each time: 1 GB in all."""
    template = loop("{% set ns.x = ns.x ~ piece %}", "x=''", 2000) + "{{ ns.x | length }}"
    assert render_template(template, {"piece": "x" * 500}, 1, 500) == "1000000"
    kept = loop("{% set ns.x = ns.x + [piece ~ i] %}", "x=[]", 2000) + "{{ ns.x | length }}"
    assert render_template(kept, {"piece": "x" * 500}, 1, 500) == "2000"
    with pytest.raises(ChatTemplateError, match="bytes"):
        render_template(kept, {"piece": "x" * 500_000}, 1, 500)


def test_the_error_survives_a_pickle() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render_template("{{ 'x' * 10**9 }}", {}, 0, 0)
    again: Any = pickle.loads(pickle.dumps(caught.value))
    assert (again.reason, again.limit, str(again)) == (
        "limit",
        caught.value.limit,
        str(caught.value),
    )
