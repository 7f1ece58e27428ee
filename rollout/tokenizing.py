"""Prompt text to token ids, and completion ids back to text. Needs transformers, not torch."""

import json
from pathlib import Path
from typing import Any

from towline.storage.errors import ModelError


class PromptTokenizer:
    """The policy's own tokenizer.

    Args:
        folder: the model folder.
        chat: wrap a prompt as one user turn with the chat template; else it is read as it is.
    """

    def __init__(self, folder: Path, *, chat: bool) -> None:
        try:
            self._tokenizer = _tokenizer_class(folder).from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"policy.model {folder} has no tokenizer that can be loaded: {error}") from error
        if chat and not self._tokenizer.chat_template:
            raise ModelError(
                f"data.chat is true, but the tokenizer of {folder} has no chat template. "
                "Set data.chat = false and write the turns into data.template."
            )
        self._chat = chat

    def render(self, text: str) -> str:
        """The prompt as the model reads it, the chat template's turns included."""
        if not self._chat:
            return text
        turn = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects exactly once."""
        if self._chat:
            return self._tokenizer.encode(self.render(text), add_special_tokens=False)
        begins = self._tokenizer.bos_token
        has_begin = begins is not None and text.startswith(begins)
        return self._tokenizer.encode(text, add_special_tokens=not has_begin)

    def decode(self, token_ids: list[int]) -> str:
        """Text without special tokens. All ids at once: a character may be split over several."""
        # Some tokenizers would remove spaces before punctuation: what is graded is what was written.
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a completion: the tokenizer's end token and those of the model's generation settings."""
        ends = _read_json(Path(self._tokenizer.name_or_path) / "generation_config.json").get("eos_token_id")
        ids = {self._tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        return sorted(token for token in ids if token is not None)


def _tokenizer_class(folder: Path) -> Any:
    """The class that AutoTokenizer would choose.

    Asked itself only where the folder does not name the plain one: AutoTokenizer imports half of torch, which is two
    seconds in each engine and before each submission.
    """
    import transformers  # a second; not needed to show the command's help

    named = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    return transformers.TokenizersBackend if named == "TokenizersBackend" else transformers.AutoTokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Copy it from the model again.") from error
