"""Load or recompute: how long a request waits for its tiers, and in which parts it evaluates.

With T the seconds that evaluating would take, and E what is left of loading, as far as is known:

- E over 20 T: nothing is loaded.
- A request may lose 0.025 T, by waiting and by cutting its evaluation in parts. What it does not
  lose, and what loading saves, is put by (`Savings`): later requests may lose that, too, but none
  of them more than 0.035 T. So all requests together lose 0.025 T at most. 0.035 T is little where
  prompts are short: once the tiers have said what they have, it may be 10 ms, and 0.2 T.
- Nobody waits for what will not come in time: only where 1.5 E is within what may be lost. But
  what a tier does beside an evaluation tells little of what it could do alone: after 8 requests
  that did not wait, one waits 0.025 T; after 2, where half an evaluation has been put by.
- What has come from the back need not be evaluated: for as long as that would have taken, a
  request waits for the rest at no loss.
- Else, and after the wait: both. Evaluation begins at the front, loading at the back, and they
  meet (arXiv 2410.03065). A part is as long as it should take until they do.
"""

from __future__ import annotations

__all__ = ["PATIENCE", "RISK", "Savings", "is_hopeless", "next_part", "wait_until"]

#: Estimates over this many times the evaluation are not tried.
HOPELESS = 20.0
#: What a request may lose, as a part of its evaluation, whatever was before.
PATIENCE = 0.025
#: What it may lose at most: a tier that does not answer costs no more.
RISK = 0.035
#: The same of tiers that have just answered, ...
RISK_ANSWERED = 0.2
#: ... in seconds.
RISK_SECONDS = 0.01
#: Loading often takes longer than was thought: by so much a request expects it, ...
FITS = 1.5
#: ... and after so much it does not believe in it any more.
LATE = 3.0
#: No wait is meant to be shorter, in seconds: a thread is not woken more exactly.
SHORTEST = 0.001
#: After so many requests that did not wait, one does.
TRY_AFTER = 8
#: The same where loading has saved this part of an evaluation before.
TRY_AFTER_SAVED, SAVED = 2, 0.5


class Savings:
    """What requests have put by: what they were allowed to lose, and did not, and what they saved.

    Attributes
    ----------
    seconds
        How much that is; never more than the last evaluation would have taken.
    in_a_row
        How many requests before this one did not wait.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.in_a_row = 0

    def allowance(self, evaluation: float, *, answered: bool) -> float:
        """Return how many seconds a request may lose whose evaluation takes so many.

        ``answered``: whether the tiers have said what they have.
        """
        most = RISK * evaluation
        if answered:
            most = max(most, min(RISK_ANSWERED * evaluation, RISK_SECONDS))
        return max(0.0, min(most, PATIENCE * evaluation + self.seconds))

    def try_until(self, evaluation: float) -> float:
        """Return for how many seconds a request waits though nothing is thought to come."""
        has_saved = self.seconds >= SAVED * evaluation
        if self.in_a_row < (TRY_AFTER_SAVED if has_saved else TRY_AFTER):
            return 0.0
        return min(self.allowance(evaluation, answered=False), PATIENCE * evaluation)

    def note(self, evaluation: float, waited: float) -> None:
        """Put by what a request was allowed to lose whatever was before, but what it has waited."""
        self.in_a_row = 0 if waited > 0.25 * PATIENCE * evaluation else self.in_a_row + 1
        self.gain(evaluation, PATIENCE * evaluation - waited)

    def gain(self, evaluation: float, seconds: float) -> None:
        """Put by what was saved, or, below 0, take what was lost."""
        self.seconds = min(evaluation, self.seconds + seconds)


def is_hopeless(estimate: float, evaluation: float) -> bool:
    """Return whether a tier is not worth asking."""
    return estimate > HOPELESS * evaluation


def wait_until(waited: float, left: float, allowance: float, saved: float) -> float:
    """Return for how many seconds from its beginning a request waits; then it is asked again.

    Parameters
    ----------
    waited
        Seconds since it began.
    left
        Seconds until the rest is thought to have come.
    allowance
        Seconds that the request may lose.
    saved
        Seconds that it need not evaluate any more, because of what has come.

    Returns
    -------
    float
        Not more than ``waited`` where it waits no longer.
    """
    most = allowance + saved
    if waited + FITS * left > most:
        return 0.0
    return min(most, waited + max(SHORTEST, LATE * left))


def next_part(
    pending: int, seconds: float, left: float, n_ubatch: int, cut: float, may_lose: float
) -> tuple[int, float]:
    """Return how many tokens to evaluate before looking what has come, and what that loses.

    Parameters
    ----------
    pending
        Tokens that have not come and are not evaluated.
    seconds
        How long evaluating them is thought to take.
    left
        How long loading them is thought to take.
    n_ubatch
        Tokens that are computed together: parts of this size lose nothing.
    cut
        Seconds that one part more takes.
    may_lose
        Seconds that may be lost.
    """
    whole = max(1, min(pending, n_ubatch))
    if seconds <= 0 or left > HOPELESS * seconds:
        return whole, 0.0
    # Where both are as fast as they are thought to be, they meet after so many tokens. A part
    # that takes less than cutting it off does not pay.
    part = int(pending * max(left / (left + seconds), cut / seconds)) + 1
    if part >= whole:
        return whole, 0.0
    more = -(-part // n_ubatch) - (-(pending - part) // n_ubatch) + (-pending // n_ubatch)
    loss = more * cut
    return (part, loss) if loss <= may_lose else (whole, 0.0)
