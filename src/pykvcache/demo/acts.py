"""The first parts of the demo: a story, forks, a rewind, and a cache that is full."""

from __future__ import annotations

from dataclasses import dataclass, field

from pykvcache.context import LlamaContext
from pykvcache.demo.measure import Fresh, Logits, Meter, Row, apart
from pykvcache.demo.screen import Screen
from pykvcache.demo.script import Script
from pykvcache.errors import NoKvCacheSlot, UnsupportedOperation
from pykvcache.model import LlamaModel
from pykvcache.sampling import Sampler

__all__ = [
    "Stage",
    "answer_of",
    "fill_and_shift",
    "fork",
    "move",
    "one_line",
    "rewind",
    "tell",
    "time_of",
]

WAYS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.5": {"temperature": 1.5},
    "no repetition": {"temperature": 0.8, "repeat_penalty": 1.3},
}
"""Samplers of the continuations."""

ENDINGS = 3
"""How often a model may end its story before the demo takes what there is."""

SPARE = 7
"""A sequence that keeps a copy for memories that cannot be rewound."""


@dataclass
class Stage:
    """What all parts share."""

    model: LlamaModel
    ctx: LlamaContext
    fresh: Fresh
    script: Script
    screen: Screen
    seed: int
    n_story: int
    n_fork: int
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tokens_so_far: list[int] = field(default_factory=list)
    """The story so far; sequence 0 holds it without its last token."""

    def tokens(self, text: str, *, first: bool = False) -> list[int]:
        """Tokenize; cut so that a small cache is not filled by the prompt alone."""
        words: list[int] = self.model.tokenize(text, add_special=first).tolist()
        return words[: self.ctx.n_ctx // 4]

    def text(self, tokens: list[int]) -> str:
        """Detokenize, without the rest of a character that was cut in two."""
        return self.model.detokenize(tokens).rstrip("\ufffd")


def _held(ctx: LlamaContext, seq: int, tokens: list[int]) -> list[int]:
    """Return what of tokens a sequence holds: the last one may not be decoded yet."""
    return tokens[: ctx.kv_cache_seq_pos_max(seq) + 1]


def one_line(text: str) -> str:
    """Return text without line breaks."""
    return " ".join(text.split())


def _sampler(stage: Stage, how: dict[str, float]) -> Sampler:
    return Sampler(
        temperature=how["temperature"],
        repeat_penalty=how.get("repeat_penalty", 1.0),
        seed=stage.seed,
    )


def tell(stage: Stage) -> None:
    """Generate a story."""
    stage.screen.heading("1  A story")
    prompt = stage.tokens(stage.script.prompt, first=True)
    with Meter(stage.ctx) as meter:
        story = _story(stage, prompt)
    stage.tokens_so_far = prompt + story
    stage.screen.given("", stage.text(prompt), stage.text(story))
    stage.screen.figures(
        f"{meter.tokens} tokens evaluated in {time_of(meter.seconds)}: "
        f"{len(prompt)} of the prompt, {meter.tokens - len(prompt)} of the story"
    )
    held = _held(stage.ctx, 0, stage.tokens_so_far)
    stage.fresh.calibrate(held)
    difference = stage.fresh.difference(stage.ctx.logits(), held)
    stage.rows.append(Row("prompt and story", meter.tokens, len(held), meter.seconds, [difference]))
    if stage.tokens_so_far == held:
        # All of it is held only when the model ended it once more.
        stage.tokens_so_far = held + stage.tokens(stage.script.scene)[:1]


def _story(stage: Stage, prompt: list[int]) -> list[int]:
    """Generate `Stage.n_story` tokens; where the model ends the story, a new scene begins."""
    sampler = Sampler(temperature=0.8, seed=stage.seed)
    scene = stage.tokens(stage.script.scene)
    story: list[int] = []
    given = prompt
    for _ in range(ENDINGS):
        left = max(stage.n_story - len(story), 1)
        story += (new := list(stage.ctx.generate(given, left, sampler)))
        if len(new) == left:
            return story
        given = scene
        story += scene
    return story[: -len(scene)]


def fork(stage: Stage) -> None:
    """Continue the story in several ways, then do the same without forks."""
    stage.screen.heading("2  Fork: one story, four continuations")
    ctx, tokens_so_far = stage.ctx, stage.tokens_so_far
    row = Row(f"{len(WAYS)} forks, {stage.n_fork} tokens each")
    meter = Meter(ctx)
    texts = []
    lead = "... " + " ".join(stage.text(tokens_so_far).split()[-3:])
    for seq, (name, how) in enumerate(WAYS.items(), start=1):
        with meter:
            ctx.copy_kv_cache_seq(0, seq)
            sampler = _sampler(stage, how)
            new = list(ctx.generate(tokens_so_far[-1:], stage.n_fork, sampler, seq))
        row.differences.append(
            stage.fresh.difference(ctx.logits(), _held(ctx, seq, tokens_so_far + new))
        )
        texts.append(stage.text(new))
        stage.screen.given(name, lead, texts[-1].replace("\n", " "))

    with stage.fresh.context(ctx.n_ctx) as naive:
        anew = Meter(naive)
        same = 0
        for text, how in zip(texts, WAYS.values(), strict=True):
            with anew:
                naive.clear_kv_cache()
                sampler = _sampler(stage, how)
                new = list(naive.generate(tokens_so_far, stage.n_fork, sampler))
            same += stage.text(new) == text
    row.tokens, row.seconds, row.tokens_anew = meter.tokens, meter.seconds, anew.tokens
    stage.rows.append(row)
    stage.screen.figures(
        f"the {len(tokens_so_far) - 1} tokens before the fork were evaluated once: "
        f"{meter.tokens} tokens in "
        f"{time_of(meter.seconds)}; evaluating them for each takes {anew.tokens} tokens and "
        f"{time_of(anew.seconds)}, and {same} of {len(WAYS)} texts are the same"
    )
    for seq in range(1, len(WAYS) + 1):
        ctx.clear_kv_cache_seq(seq)


def rewind(stage: Stage) -> None:
    """Ask something, take question and answer back, ask something else."""
    stage.screen.heading("3  Rewind: take a question back, ask another")
    ctx, start = stage.ctx, len(stage.tokens_so_far) - 1
    ctx.copy_kv_cache_seq(0, SPARE)
    first, second = (stage.tokens(question) for question in stage.script.questions)
    answer = list(ctx.generate(stage.tokens_so_far[-1:] + first, 12, None, 0))
    stage.screen.given("", one_line(stage.text(first)), answer_of(stage.text(answer)))
    taken_back = ctx.kv_cache_seq_pos_max(0) + 1 - start
    with Meter(ctx) as meter:
        rewound = ctx.clear_kv_cache_seq(0, start)
        if not rewound:
            ctx.copy_kv_cache_seq(SPARE, 0)
        answer = list(ctx.generate(stage.tokens_so_far[-1:] + second, 12, None, 0))
    held = _held(ctx, 0, stage.tokens_so_far + second + answer)
    difference = stage.fresh.difference(ctx.logits(), held)
    stage.screen.given("", one_line(stage.text(second)), answer_of(stage.text(answer)))
    if rewound:
        how, name = f"{taken_back} tokens were taken back", f"rewind {taken_back}, ask again"
    else:
        how = (
            f"{ctx.memory_kind} memory cannot step back (False): a copy made before took its place"
        )
        name = "return to a copy, ask again"
    stage.screen.figures(f"{how}; {meter.tokens} evaluated in {time_of(meter.seconds)}")
    stage.rows.append(Row(name, meter.tokens, len(held), meter.seconds, [difference]))
    stage.tokens_so_far = held
    ctx.kv_cache_seq_keep(0)


def move(stage: Stage) -> None:
    """Shift a whole sequence: attention looks at distances, so nothing may change."""
    ctx, by = stage.ctx, 64
    row = Row(f"move all by {by}, add a token")
    stage.rows.append(row)
    token = stage.tokens(stage.script.scene)[-1]
    try:
        with Meter(ctx) as meter:
            ctx.kv_cache_seq_add(0, None, None, by)
            ctx.decode([token])
    except UnsupportedOperation as error:
        row.note = "refused"
        stage.notes.append(f"refused: {error.reason}")
        return
    row.tokens, row.seconds, row.tokens_anew = (
        meter.tokens,
        meter.seconds,
        len(stage.tokens_so_far) + 1,
    )
    row.differences.append(stage.fresh.difference(ctx.logits(), [*stage.tokens_so_far, token]))


def fill_and_shift(stage: Stage) -> None:
    """Fill a small cache, drop what comes after the prompt, close the gap, go on."""
    stage.screen.heading("4  Shift: a full cache goes on")
    # What is dropped makes room for some scenes and a question.
    least = 2 * len(stage.tokens(stage.script.prompt, first=True)) + 256
    with stage.fresh.context(max(256, stage.ctx.n_ctx // 4, least)) as ctx:
        _Full(stage, ctx).play()


class _Full:
    """A cache of its own that gets full."""

    def __init__(self, stage: Stage, ctx: LlamaContext) -> None:
        self.stage, self.ctx = stage, ctx
        self.prompt = stage.tokens(stage.script.prompt, first=True)
        self.keep = len(self.prompt)
        self.drop = (ctx.n_ctx - self.keep) // 2
        self.scene = stage.tokens(stage.script.scene)
        self.sampler = Sampler(temperature=0.8, seed=stage.seed)
        self.held: list[int] = []

    def play(self) -> None:
        stage, ctx = self.stage, self.ctx
        if ctx.memory_kind == "recurrent":
            stage.screen.line("A recurrent memory never fills: it keeps one state per sequence.")
            return
        self.feed(self.prompt)
        token = self.until_full()
        if not self.close_gap(token):
            return
        more = [token]
        for _ in range(stage.n_fork):
            more += self.write()
        stage.screen.given("on it goes", "", "... " + one_line(stage.text(more)))
        self.ask()

    def feed(self, tokens: list[int]) -> None:
        self.ctx.decode(tokens)
        self.held += tokens

    def next(self) -> list[int]:
        """Sample a token, or begin a new scene where the model ends its story."""
        token = self.sampler.sample(self.ctx)
        return self.scene if self.stage.model.is_eog(token) else [token]

    def write(self) -> list[int]:
        tokens = self.next()
        self.feed(tokens)
        return tokens

    def until_full(self) -> int:
        while True:
            for token in self.next():
                try:
                    self.feed([token])
                except NoKvCacheSlot:
                    return token

    def close_gap(self, token: int) -> bool:
        """Drop the middle, move the rest down, decode the token that found no place."""
        stage, ctx, keep, end = self.stage, self.ctx, self.keep, self.keep + self.drop
        row = Row(f"full: drop {self.drop}, shift, go on")
        stage.rows.append(row)
        before, full = list(self.held), ctx.kv_cache_seq_pos_max(0)
        with Meter(ctx) as meter:
            dropped = ctx.kv_cache_can_shift() and ctx.clear_kv_cache_seq(0, keep, end)
            if dropped:
                ctx.kv_cache_seq_add(0, end, None, -self.drop)
                ctx.decode([token])
        if not dropped:
            row.note = "refused"
            why = "cannot drop a part of a sequence and close the gap"
            stage.screen.line(
                f"The cache is full at {full + 1} tokens. {ctx.memory_kind.capitalize()} memory of "
                f"this model {why}: nothing was changed."
            )
            return False
        logits = ctx.logits()
        self.held = before[:keep] + before[end:] + [token]
        row.tokens, row.seconds, row.tokens_anew = meter.tokens, meter.seconds, len(self.held)
        stage.screen.figures(
            f"NoKvCacheSlot at {full + 1} tokens: dropped {self.drop} after the prompt and moved "
            f"the rest down in {time_of(meter.seconds)}; the last position moved from {full} to "
            f"{ctx.kv_cache_seq_pos_max(0)}"
        )
        self.compare(row, before, token, logits)
        return True

    def compare(self, row: Row, before: list[int], token: int, logits: Logits) -> None:
        """Compare with a fresh context that closes the same gap from the other side."""
        stage, keep, end = self.stage, self.keep, self.keep + self.drop
        with stage.fresh.context(self.ctx.n_ctx + 256) as other:
            other.decode(before)
            other.clear_kv_cache_seq(0, keep, end)
            other.kv_cache_seq_add(0, 0, keep, self.drop)
            other.decode([token])
            row.differences.append(apart(logits, other.logits()))
        alone = stage.fresh.difference(logits, self.held)
        row.note = " *"
        stage.notes.append(
            "* compared with a fresh context that drops the same tokens and moves the prompt up "
            "instead of the rest down: the same distances. A fresh run over the kept tokens alone "
            f"is {alone:.2g} off, and should be: what was kept was computed with the dropped "
            "tokens in view."
        )

    def ask(self) -> None:
        """Ask for a fact of the prompt, which was kept."""
        question = self.stage.tokens(self.stage.script.question_after_shift)
        if self.ctx.n_ctx - len(self.held) > len(question) + 12:
            answer = list(self.ctx.generate(question, 12))
            self.stage.screen.given(
                "", one_line(self.stage.text(question)), answer_of(self.stage.text(answer))
            )


def answer_of(text: str) -> str:
    """Return the first sentence of an answer."""
    line = text.strip("\n").split("\n")[0]
    for end in ('."', "."):
        if end in line:
            return line[: line.index(end) + len(end)]
    return line


def time_of(seconds: float) -> str:
    """Return a time in words."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
