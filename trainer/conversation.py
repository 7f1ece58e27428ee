"""Examples to token ids with exact masks, by the model's own tokenizer. Needs transformers, not torch.

The prompt has the ids that the engine reads, special tokens exactly once; the completion those that the engine would
have to write after them, with the token that ends it exactly once, and nothing after that.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from towline.storage.errors import DataError, ModelError
from towline.storage.example_config import Turns
from towline.storage.records import Demonstration, LabelledSteps, Preference, Turn
from towline.trainer.chat_pieces import ChatPieces, Piece, without_end
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import NO_LABEL, TokenExample, TokenPair, TokenSteps


class ConversationTokenizer:
    """The model's own tokenizer.

    Args:
        folder: the model folder.
        chat: wrap turns with the chat template; else a prompt of one turn and its completion are read as they are.

    Every method raises DataError, naming the row, where an example cannot be learned exactly.
    """

    def __init__(self, folder: Path, *, chat: bool) -> None:
        import transformers  # a second; not needed to show the command's help

        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"policy.model {folder} has no tokenizer that can be loaded: {error}") from error
        self._folder = folder
        self.stop_token_ids = _stop_token_ids(self._tokenizer, folder)
        """At which the engine ends a completion."""
        self._chat: ChatPieces | None = None
        if chat:
            self._require_template()
            self._ends = self._texts_of({*self.stop_token_ids, *_end_of_turn(self._tokenizer, self.stop_token_ids)})
            self._chat = ChatPieces(self._tokenizer, list(self._ends.values()))
        else:
            self._ends = self._texts_of(self.stop_token_ids)
            self._refuse_ended_prompts()

    def demonstration(self, example: Demonstration, *, turns: Turns = "all") -> TokenExample:
        """
        Args:
            turns: learn every turn of the assistant, or the last only.
        """
        pieces = self._pieces(example.row, example.prompt, example.turns[-1].content, all_turns=turns == "all")
        pieces_ids = self._encode_ended(example.row, pieces)
        trained = np.repeat([piece.is_trained for piece in pieces], [len(ids) for ids in pieces_ids])
        tokens = _sequence(pieces_ids)
        return TokenExample(row=example.row, tokens=tokens, trained=trained[tokens.num_prompt_tokens :])

    def preference(self, example: Preference) -> TokenPair:
        chosen, rejected = (
            _sequence(self._encode_ended(example.row, self._pieces(example.row, example.prompt, said)))
            for said in example.completions
        )
        assert chosen.num_prompt_tokens == rejected.num_prompt_tokens, "found two prompts in a pair, need one"
        return TokenPair(row=example.row, chosen=chosen, rejected=rejected, margin=example.margin)

    def steps(self, example: LabelledSteps, *, separator: str = "\n") -> TokenSteps:
        """
        Args:
            separator: written after every step; its last token is where the step is judged.
        """
        prompt = self._prompt(example.row, example.prompt)
        pieces_ids = self._encode(example.row, [prompt, *(step + separator for step in example.steps)])
        return TokenSteps(
            row=example.row,
            tokens=_sequence(pieces_ids),
            step_ends=np.cumsum([len(ids) for ids in pieces_ids], dtype=np.int64)[1:] - 1,
            labels=np.array([NO_LABEL if label is None else label for label in example.labels], dtype=np.int64),
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with its special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @property
    def unstopped_end(self) -> tuple[int, str] | None:
        """Id and text of the token that the chat template ends a turn with, if the engine would not stop at it."""
        return next(((token, text) for token, text in self._ends.items() if token not in self.stop_token_ids), None)

    @property
    def unknown_token_id(self) -> int | None:
        """Stands for what the vocabulary cannot write; None where there is none, or it is the end token too."""
        unknown = self._tokenizer.unk_token_id
        return None if unknown in self._ends else unknown

    def _pieces(self, row: int, prompt: Sequence[Turn], said: str, *, all_turns: bool = False) -> list[Piece]:
        if not without_end(said, list(self._ends.values())).strip():
            raise DataError(f"row {row} (from 0): the assistant says nothing but {said.strip()}; expected a text")
        if self._chat is None:
            return [
                Piece(text=self._prompt(row, prompt), is_trained=False),
                Piece(text=without_end(said, list(self._ends.values())), is_trained=True),
            ]
        turns = [*prompt, Turn(role="assistant", content=said)]
        last = len(turns) - 1
        trained = [index for index, turn in enumerate(turns) if turn.role == "assistant"] if all_turns else [last]
        return self._chat.cut(row, turns, trained)

    def _prompt(self, row: int, turns: Sequence[Turn]) -> str:
        if self._chat is not None:
            return self._chat.prompt(row, turns)
        if [turn.role for turn in turns] != ["user"]:
            roles = ", ".join(turn.role for turn in turns)
            raise DataError(
                f"row {row} (from 0) has the turns {roles} before its completion; without the chat template"
                " a prompt is one text"
            )
        return turns[0].content

    def _encode_ended(self, row: int, pieces: Sequence[Piece]) -> list[list[int]]:
        """Ids of each piece; the last one ends with an end token, and each trained piece has no other."""
        pieces_ids = self._encode(row, [piece.text for piece in pieces])
        if not pieces_ids[-1] or pieces_ids[-1][-1] not in self._ends:
            pieces_ids[-1].append(self._end_token_id())
        for piece, ids in zip(pieces, pieces_ids, strict=True):
            if piece.is_trained and (inside := [token for token in ids[:-1] if token in self._ends]):
                raise DataError(
                    f"row {row} (from 0): the assistant says {self._ends[inside[0]]}, which ends its turn, before the "
                    "end. Take it out of the text."
                )
        return pieces_ids

    def _encode(self, row: int, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that follow one another, the first of them the prompt, with a begin token where it needs one."""
        alone = self._plain_ids(texts)
        if self._plain_ids(["".join(texts)])[0] != list(chain.from_iterable(alone)):
            alone = self._continued(row, texts)
        pieces_ids = [self._prompt_ids(texts[0]), *alone[1:]]
        if not pieces_ids[0]:
            raise DataError(f"row {row} (from 0): no token stands before what the assistant says")
        return pieces_ids

    def _prompt_ids(self, text: str) -> list[int]:
        """As `rollout.tokenizing.PromptTokenizer.encode`: the template wrote what it needs."""
        begins = self._tokenizer.bos_token
        is_begun = self._chat is not None or (begins is not None and text.startswith(begins))
        return self._tokenizer.encode(text, add_special_tokens=not is_begun)

    def _continued(self, row: int, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as the continuation of those before it, which stay as they are.

        Not by itself, where a tokenizer would put a space before it that is not there; and not as part of the whole,
        where a token would reach over the cut, which no engine can write after it has read the prompt.
        """
        before, before_ids = texts[0], self._plain_ids(texts[:1])[0]
        pieces_ids = [before_ids]
        for text in texts[1:]:
            alone, whole = self._plain_ids([text, before + text])
            if whole[: len(before_ids)] == before_ids:
                ids = whole[len(before_ids) :]
            elif self.decode(before_ids + alone) == self.decode(whole):
                ids = alone
            else:
                raise DataError(
                    f"row {row} (from 0): the tokenizer cannot write {text[:40]!r} after {before[-40:]!r}: a token "
                    "would reach over the cut. Put a line end between prompt and completion."
                )
            pieces_ids.append(ids)
            before, before_ids = before + text, before_ids + ids
        return pieces_ids

    def _plain_ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def _end_token_id(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {self._folder} has no end token, so that a completion could not be ended. Name one "
                "as eos_token in tokenizer_config.json."
            )
        return self._tokenizer.eos_token_id

    def _texts_of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Generation settings may name an id that the tokenizer does not have."""
        texts = {token: self._tokenizer.convert_ids_to_tokens(token) for token in sorted(token_ids)}
        return {token: text for token, text in texts.items() if text is not None}

    def _require_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"data.chat is true, but the tokenizer of {self._folder} has no chat template. "
                "Set data.chat = false and write the turns into data.template."
            )

    def _refuse_ended_prompts(self) -> None:
        """Some tokenizers end every text: a completion would come after the end."""
        (plain,) = self._plain_ids(["a"])
        if self._prompt_ids("a")[-1:] != plain[-1:]:
            raise ModelError(
                f"the tokenizer of {self._folder} ends every text with a special token, so that a prompt would end "
                "before its completion. Set add_eos_token = false in tokenizer_config.json."
            )


def _sequence(pieces_ids: Sequence[Sequence[int]]) -> TokenSequence:
    token_ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in pieces_ids])
    return TokenSequence(token_ids=token_ids, num_prompt_tokens=len(pieces_ids[0]))


def _stop_token_ids(tokenizer: Any, folder: Path) -> list[int]:
    """As `rollout.tokenizing.PromptTokenizer.stop_token_ids`."""
    path = folder / "generation_config.json"
    try:
        ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Copy it from the model again.") from error
    ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(token for token in ids if token is not None)


def _end_of_turn(tokenizer: Any, stop_token_ids: Sequence[int]) -> list[int]:
    """The special token that the chat template ends the assistant's turn with, if the engine stops at none there.

    It is so where a base model has a template but no generation settings to match.
    """
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        whole: str = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError:  # the turns of the dataset will say what it refuses
        return []
    closing = tokenizer.encode(whole.rpartition("answer")[2], add_special_tokens=False)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return [] if set(closing) & set(stop_token_ids) else [token for token in closing if token in special][-1:]
