"""A conversation as the chat template writes it, cut where the assistant begins and ceases to speak.

Templates need no marks for it: the conversation up to a turn of the assistant, rendered with the generation prompt, is
what the model reads before it speaks, and the whole rendering must begin with it. Where it does not, the template
writes a turn otherwise than it was generated (Qwen3 leaves the thinking of earlier turns out), and is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import TemplateError

from towline.storage.errors import DataError
from towline.storage.records import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    text: str
    is_trained: bool


class ChatPieces:
    """
    Args:
        tokenizer: of transformers, with a chat template.
        end_tokens: text of each token that may end a turn.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = tuple(end_tokens)

    def prompt(self, row: int, turns: Sequence[Turn]) -> str:
        """What the model reads before the assistant speaks."""
        return self._render(row, [self._without_end(turn) for turn in turns], opens=True)

    def cut(self, row: int, turns: Sequence[Turn], trained: Sequence[int]) -> list[Piece]:
        """Pieces that make up the conversation up to the end of its last turn, by turns untrained and trained.

        A trained piece ends with the template's end token, if it writes one, and without what may follow.

        Args:
            row: for messages.
            turns: the last is the assistant's.
            trained: indices of turns of the assistant, ascending, with the last turn among them.

        Raises:
            DataError: the template refuses the turns, or does not write them as they are generated.
        """
        turns = [self._without_end(turn) for turn in turns]
        whole, cut_at = self._render(row, turns), 0
        pieces: list[Piece] = []
        for index in trained:
            opened = self._render(row, turns[:index], opens=True)
            closed = self._render(row, turns[: index + 1])
            said, is_ended = self._said(closed[len(opened) :])
            if not (closed.startswith(opened) and whole.startswith(opened + said)):
                _refuse_rewriting(row, index, is_last=index == len(turns) - 1)
            if index < len(turns) - 1 and not is_ended:
                _refuse_unended(row, index)
            pieces += [
                Piece(text=whole[cut_at : len(opened)], is_trained=False),
                Piece(text=said, is_trained=True),
            ]
            cut_at = len(opened) + len(said)
        return pieces

    def _without_end(self, turn: Turn) -> Turn:
        """What a dataset wrote as the end of a turn is left to the template."""
        if turn.role != "assistant":
            return turn
        return Turn(role=turn.role, content=without_end(turn.content, self._end_tokens))

    def _said(self, text: str) -> tuple[str, bool]:
        """A turn up to the first of the end tokens that it closes with, and whether there is one.

        Some templates write another, the end of the text, after the last turn, where the engine has long stopped.
        """
        said = without_end(text, self._end_tokens)
        closing = text[len(said) :]
        end = next((token for token in self._end_tokens if closing.startswith(token)), None)
        return (said.rstrip(), False) if end is None else (said + end, True)

    def _render(self, row: int, turns: Sequence[Turn], *, opens: bool = False) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=opens, tokenize=False)
        except TemplateError as error:
            roles = ", ".join(turn.role for turn in turns) or "none"
            system = any(turn.role == "system" for turn in turns)
            mend = " Write what the system turn says into the user's." if system else ""
            raise DataError(
                f"row {row} (from 0): the chat template refuses its turns ({roles}): {error}.{mend}"
            ) from None


def without_end(text: str, end_tokens: Sequence[str]) -> str:
    """What was said, without end tokens after it."""
    while token := next((token for token in end_tokens if text.rstrip().endswith(token)), None):
        text = text.rstrip().removesuffix(token)
    return text


def _refuse_rewriting(row: int, index: int, *, is_last: bool) -> NoReturn:
    if is_last:
        raise DataError(
            f"row {row} (from 0): the chat template does not write the last turn after the prompt that it opens for "
            "it, so that what is learned would not be what is generated. Set chat = false and write the turns into a "
            "template."
        )
    raise DataError(
        f"row {row} (from 0): the chat template writes turn {index} (from 0) otherwise than it was generated, because "
        'other turns follow it (some templates leave out the thinking of earlier turns). Set turns = "last".'
    )


def _refuse_unended(row: int, index: int) -> NoReturn:
    raise DataError(
        f"row {row} (from 0): the chat template writes no end token after turn {index} (from 0), so that the model "
        'would not learn to end it. Set turns = "last", of which the end is learned.'
    )
