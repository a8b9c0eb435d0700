"""What llama.cpp has failed in is closed all the same, and used again once it was cleared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from memory.kit import apart, words
from pykvcache import BatchGenerator, LlamaContext, LlamaModel, LlamaSequence
from pykvcache.errors import InternalError
from support.odd_models import make_breaking

pytestmark = pytest.mark.not_on_a_device(reason="there the server fails, and is lost")

BAD = 60
Make = Callable[[], LlamaContext]


@pytest.fixture(scope="module")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    """A model that one token breaks."""
    with LlamaModel(make_breaking(tmp_path_factory.mktemp("breaking"), [BAD])) as model:
        yield model


@pytest.fixture
def make(breaking: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make contexts of it."""
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    made: list[LlamaContext] = []

    def one() -> LlamaContext:
        made.append(LlamaContext(breaking, n_ctx=512, n_seq_max=4, n_threads=1))
        return made[-1]

    yield one
    for ctx in made:
        ctx.close()


def break_(ctx: LlamaContext) -> None:
    with pytest.raises(InternalError, match="i01 >= 0"):
        ctx.decode([BAD], seq_id=0)


def assert_as_new(ctx: LlamaContext, make: Make) -> None:
    """Cleared, a context gives what a new one gives, and every id is free."""
    ctx.clear_kv_cache()
    rows = [LlamaSequence(one, words(9, 20)).logits() for one in (ctx, make())]
    assert apart(*rows) < 1e-3
    assert not ctx.sequences()
    every = [LlamaSequence(ctx, words(i, 9)) for i in range(4)]
    for sequence in every:
        sequence.evaluate()
    assert not any(sequence.is_parked for sequence in every)


def test_sequences_of_a_context_that_failed_are_closed(make: Make) -> None:
    ctx = make()
    first, other = LlamaSequence(ctx, words(1, 20)), LlamaSequence(ctx, words(2, 9))
    first.evaluate()
    fork = first.fork()
    other.evaluate()
    other.park()
    dropped = LlamaSequence(ctx, words(3, 9))
    dropped.evaluate()
    break_(ctx)
    first.close()
    first.close()
    with fork:
        pass
    other.close()
    del dropped
    assert first.is_closed
    assert fork.is_closed
    assert first.tokens.tolist() == words(1, 20)
    with pytest.raises(InternalError):
        LlamaSequence(ctx, [5]).evaluate()
    assert_as_new(ctx, make)


@pytest.mark.parametrize("how", ["close", "with", "thread"])
def test_a_generator_of_a_context_that_failed_ends_its_requests_and_closes(
    make: Make, how: str
) -> None:
    ctx = make()
    generator = BatchGenerator(ctx)
    own = LlamaSequence(ctx, words(7, 9))
    handles = [generator.submit(words(i, 20), 200) for i in range(4)]
    handles += [generator.submit(own, 200), *generator.submit(words(8, 30), 200, n=3)]
    for _ in range(4):
        generator.step()
    for handle in handles:
        assert handle.finish_reason is None
    ctx_fails = pytest.raises(InternalError, match="earlier in this context")
    break_(ctx)
    with ctx_fails:
        generator.step()
    if how == "thread":
        generator.start()
        with ctx_fails:
            handles[0].wait()
        with ctx_fails:
            handles[-1].wait()
    if how == "with":
        with generator:
            pass
    else:
        generator.close()
        generator.close()
    wanted = "error" if how == "thread" else "aborted"
    assert {handle.finish_reason for handle in handles} == {wanted}
    assert [handle.sequence.is_closed for handle in handles] == [*[True] * 4, False, *[True] * 3]
    own.close()
    assert_as_new(ctx, make)


def test_a_generator_continues_after_its_failed_context_is_cleared(make: Make) -> None:
    ctx = make()
    generator = BatchGenerator(ctx)
    handles = [generator.submit(words(i, 20), 12) for i in range(3)]
    generator.step()
    break_(ctx)
    with pytest.raises(InternalError):
        generator.run(progress=False)
    ctx.clear_kv_cache()
    generator.run(progress=False)
    for i, handle in enumerate(handles):
        assert handle.tokens.tolist() == list(LlamaSequence(make(), words(i, 20)).generate(12))
