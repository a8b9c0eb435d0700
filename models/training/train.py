"""Train the story model on two CPU cores: ``python models/training/train.py --work-dir DIR``.

Every batch is generated from the seed and the number of its step, so a run that was stopped
goes on from its last checkpoint exactly as if it had not been stopped.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from data import ANSWER_WEIGHT, batch
from net import Net, Shape
from tokenizer import Tokenizer
from torch.nn import functional

# Up to which step, the length of a row, and the share of quizzes in it: to look back is learnt
# from short and dense texts first, and only then from stories.
STAGES = (
    (120, 64, 1.0),
    (480, 128, 1.0),
    (800, 256, 0.5),
    (1500, 640, 0.1),
    (2500, 256, 0.5),
    (3500, 640, 0.1),
)
N_STEPS = STAGES[-1][0]
TOKENS_PER_STEP = 4096
# The learning rate: up to which step, and the first step, the last one and the top of the cosine
# on which it falls. There are two rounds, each with a slow fall and a fast one.
RATES = (
    (800, 100, 2400, 2e-3),
    (1500, 800, 1500, 1.587e-3),
    (2500, 1500, 4500, 1.5e-3),
    (3500, 2500, 3500, 1.1375e-3),
)
WARM_UP, LAST_RATE = 100, 5e-5
CHECKPOINT_EVERY = 50


def stage(step: int) -> tuple[int, float]:
    """Return the row length and the share of quizzes at a step."""
    return next((length, quizzes) for end, length, quizzes in STAGES if step < end)


def learning_rate(step: int) -> float:
    """Return the learning rate: a linear rise at first, then parts of cosines."""
    start, end, top = next(fall for until, *fall in RATES if step < until)
    if step < WARM_UP:
        return top * (step + 1) / WARM_UP
    left = (1 + math.cos(math.pi * (step - start) / (end - start))) / 2
    return LAST_RATE + (top - LAST_RATE) * left


def new_net(tokenizer: Tokenizer) -> Net:
    """Make a net, in which a word begins alike with and without its space."""
    net = Net(Shape(n_vocab=len(tokenizer)))
    space = tokenizer.vocabulary[tokenizer.piece_ids(" ")[0]]
    with torch.no_grad():
        for token, i in tokenizer.ids.items():
            twin = tokenizer.ids.get(space + token)
            if twin is not None and token.isalpha() and len(token) > 1:
                net.token_embd.weight[i] = net.token_embd.weight[twin]
    return net


class Optimizer:
    """Muon for the matrices, AdamW for embeddings and norms.

    Muon pays here: it recalled after 300 steps what AdamW alone did not after 1,000.
    """

    def __init__(self, net: Net) -> None:
        matrices = [p for n, p in net.named_parameters() if p.dim() == 2 and "embd" not in n]
        others = [p for n, p in net.named_parameters() if p.dim() != 2 or "embd" in n]
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices,
                lr=LAST_RATE,
                momentum=0.95,
                weight_decay=0.05,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                others, lr=LAST_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
            ),
        )

    def step(self, rate: float) -> None:
        """One step at a learning rate; gradients are zero afterwards."""
        for part, scale in zip(self.parts, (1.0, 0.5), strict=True):
            for group in part.param_groups:
                group["lr"] = rate * scale
            part.step()
            part.zero_grad()

    def state_dict(self) -> tuple[dict[str, Any], ...]:
        """Return what a checkpoint must hold."""
        return tuple(part.state_dict() for part in self.parts)

    def load_state_dict(self, states: tuple[dict[str, Any], ...]) -> None:
        """Take up a checkpoint."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="checkpoints go here")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop-at", type=int, help="stop early, as if interrupted")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    args = parser.parse_args()

    args.work_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work_dir / "checkpoint.pt"
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer()
    net = new_net(tokenizer)
    optimizer = Optimizer(net)
    first, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        first, seconds = state["step"], state["seconds"]
    forward = net if args.eager else torch.compile(net, dynamic=False)
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, from step {first}", flush=True)

    started = time.monotonic()
    seen: list[tuple[float, float, float]] = []
    for step in range(first, args.stop_at or N_STEPS):
        length, quizzes = stage(step)
        n_rows = TOKENS_PER_STEP // length
        ids, answers = batch(tokenizer, f"{args.seed}/{step}", n_rows, length, quizzes)
        tokens, is_answer = torch.from_numpy(ids), torch.from_numpy(answers)[:, 1:].flatten()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = forward(tokens[:, :-1]).flatten(0, 1).float()
        targets = tokens[:, 1:].flatten()
        losses = functional.cross_entropy(logits, targets, reduction="none")
        weights = torch.where(is_answer, ANSWER_WEIGHT, 1.0)
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step(learning_rate(step))

        with torch.no_grad():
            hits = (logits.argmax(-1) == targets)[is_answer].float().mean()
            seen.append((losses.mean().item(), losses[is_answer].mean().item(), hits.item()))
        if (step + 1) % 50 == 0:
            loss, answer_loss, recalled = (
                sum(column) / len(seen) for column in zip(*seen, strict=True)
            )
            spent = seconds + time.monotonic() - started
            print(
                f"step {step + 1} length {length} loss {loss:.4f} answers {answer_loss:.4f} "
                f"recalled {recalled:.3f} {spent:.0f} s",
                flush=True,
            )
            seen.clear()
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == N_STEPS:
            state = {
                "net": net.state_dict(),
                "shape": asdict(net.shape),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
                "seconds": seconds + time.monotonic() - started,
            }
            partial = checkpoint.with_suffix(".part")
            torch.save(state, partial)
            partial.replace(checkpoint)


if __name__ == "__main__":
    main()
