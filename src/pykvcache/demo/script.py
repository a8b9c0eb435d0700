"""What the demo says to the model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ANY_MODEL", "STORY_MODEL", "Script"]

_FACTS = (
    "Once upon a time there was a little village by the sea. "
    "This is the story of Lucy, Tom and Mara.\n"
    "Lucy has a red kite. Lucy lives by the river. Lucy likes plums. "
    "Tom is a baker. Tom has a dog called Biscuit. Tom lives on the hill. "
    "Mara is a sailor. Mara has a silver bell. Mara likes pancakes."
)


@dataclass(frozen=True)
class Script:
    """The texts for one kind of model."""

    prompt: str
    questions: tuple[str, str]
    """Each ends where the model's answer begins; both can be answered from the prompt."""
    question_after_shift: str
    scene: str
    """What a story goes on with when the model has ended it."""


def _asked(question: str) -> str:
    return f'\nThe reader asks, "{question}" The story says, "'


STORY_MODEL = Script(
    prompt=_FACTS + "\n",
    questions=(_asked("What does Lucy like?"), _asked("What is Tom's dog called?")),
    question_after_shift=_asked("What does Mara like?"),
    scene="\nThe next morning Tom walks to the mill.",
)

ANY_MODEL = Script(
    prompt=_FACTS + "\nOne morning",
    questions=(
        "\nQuestion: Where does Lucy live?\nAnswer: Lucy lives",
        "\nQuestion: What is Tom's dog called?\nAnswer: Tom's dog is called",
    ),
    question_after_shift="\nQuestion: What does Mara like?\nAnswer: Mara likes",
    scene="\nThe next morning",
)
