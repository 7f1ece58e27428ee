"""What a folder says of the reward model in it, without loading it: whether its scores can pay for a policy's rollouts.

It must be a Hugging Face folder of a sequence classifier with one score, and read token ids as the policy writes them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from towline.storage.errors import ModelError

ScoreOf = Literal["completion", "step"]
SCORE_OF = "score_of"
"""Key of config.json in folders that Towline writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFolder:
    vocabulary: int
    """Token ids that it has an embedding for."""
    max_positions: int | None
    """The longest text that it was made for, tokens."""
    weight_bytes: int


def read_reward_folder(folder: Path) -> RewardFolder:
    """
    Raises:
        ModelError: it holds no reward model that gives a completion one score.
    """
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; expected a reward model, such as RUN/checkpoints/step-000040/hf of a run with "
            'objective = "reward_model".'
        )
    config = _read_json(folder / "config.json")
    _refuse_other_models(folder, config)
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not weights:
        raise ModelError(f"{folder} has no weights; expected model.safetensors (or its numbered parts).")
    text = cast("dict[str, Any]", config.get("text_config", config))
    return RewardFolder(
        vocabulary=int(text.get("vocab_size", 0)),
        max_positions=text.get("max_position_embeddings"),
        weight_bytes=sum(path.stat().st_size for path in weights),
    )


def _refuse_other_models(folder: Path, config: dict[str, Any]) -> None:
    kinds: list[str] = config.get("architectures") or ["model of an unknown kind"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise ModelError(
            f"{folder} holds a {kinds[0]}, expected a model ForSequenceClassification with one score: train one with "
            'objective = "reward_model" and name checkpoints/step-…/hf of that run.'
        )
    num_scores = len(config.get("id2label") or ()) or int(config.get("num_labels", 2))  # transformers leaves 2 out
    if num_scores != 1:
        raise ModelError(f"{folder} gives {num_scores} scores a text, expected one: take a reward model.")
    if config.get(SCORE_OF) == "step":
        raise ModelError(
            f'{folder} scores the steps of a solution (trainer.head = "process"), not completions: take one that was '
            "trained on pairs."
        )


def tokenizer_problem(folder: Path, policy: Path) -> str | None:
    """How the reward model would misread what the policy writes; None where every token id means the same.

    It may know more tokens than the policy does. Raises ModelError where a tokenizer cannot be read.
    """
    own, wanted = folder / "tokenizer.json", policy / "tokenizer.json"
    for path in (own, wanted):
        if not path.is_file():
            return (
                f"{path.parent} has no tokenizer.json, by which token ids are compared: save its tokenizer with "
                "transformers (AutoTokenizer.from_pretrained(…).save_pretrained(…))."
            )
    if own.read_bytes() == wanted.read_bytes():
        return None
    known, tokens = _tokens(own), _tokens(wanted)
    others = sorted(number for number, token in tokens.items() if known.get(number) != token)
    if not others:
        return None
    first = others[0]
    means = f"{known[first]!r}" if first in known else "nothing"
    return (
        f"{folder} has another tokenizer than the policy {policy}: {len(others):,} of {len(tokens):,} token ids "
        f"differ, such as {first}, which is {tokens[first]!r} to the policy and {means} to the reward model. It reads "
        "the policy's token ids as they are: train a reward model from the policy's folder, or from one of its family."
    )


def ending_difference(folder: Path, policy: Path) -> str | None:
    """A word on it where the two tokenizers end texts with different tokens."""
    own, wanted = (_end_token(path / "tokenizer_config.json") for path in (folder, policy))
    if None in (own, wanted) or own == wanted:
        return None
    return (
        f"{folder} has learnt from texts that end with {own}, and the policy's end with {wanted}: scores are read there"
    )


def _tokens(path: Path) -> dict[int, str]:
    """Token id → token, of a tokenizer.json."""
    raw = _read_json(path)
    try:
        vocabulary: dict[str, int] | list[tuple[str, float]] = raw["model"]["vocab"]
        if isinstance(vocabulary, dict):
            known = {number: token for token, number in vocabulary.items()}
        else:  # Unigram: [token, log-prob], the id being the place
            known = {number: entry[0] for number, entry in enumerate(vocabulary)}
        return known | {token["id"]: token["content"] for token in raw.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error!r}. Was the folder copied whole?") from error


def _end_token(path: Path) -> str | None:
    token: str | dict[str, str] | None = _read_json(path).get("eos_token") if path.is_file() else None
    return token["content"] if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; expected a folder in Hugging Face layout.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Was the folder copied whole?") from error
