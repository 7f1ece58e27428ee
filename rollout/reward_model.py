"""A reward model that scores token ids as they are, on CPU. Imports torch, so that only runs with such a part load it.

    model = RewardModel(folder, num_threads=2)
    verdicts = model.score([token_ids, ...])    # of prompt and completion, in the order of the texts

Scores are transformers' own, read at the last token. They are read by position: transformers looks for the last token
that is no padding, which is another one where a completion ends with that token.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import ModelError
from towline.storage.records import ScoreStatus
from towline.storage.reward_folder import read_reward_folder

MAX_BATCH_TOKENS = 2048
"""Of a forward pass, padding included; a longer text is one alone. Larger ones are no faster on CPU, and between them
progress is told: 1.5 B parameters are about two minutes of a core of 50 GFLOP/s."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of a score that rounding explains, relative to the larger of it and 1."""


class RewardModel:
    def __init__(self, folder: Path, *, num_threads: int = 1) -> None:
        """Load it in the precision that its folder has.

        Args:
            num_threads: of each forward pass; the process has its own number again after it.

        Raises:
            ModelError: the folder holds no reward model whose score can be read at the last token.
        """
        self._max_tokens = read_reward_folder(folder).max_positions or math.inf
        self._num_threads = num_threads
        self._model = _load(folder)
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)

    @torch.inference_mode()
    def score(
        self, texts: Sequence[NDArray[np.int32]], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Verdict]:
        """
        Args:
            texts: token ids of prompt and completion together.
            on_progress: called with (number done, number of texts) after each forward pass. What it raises ends the
                call.

        Returns:
            In the order of the texts. A time is a text's share of that of its forward pass.
        """
        verdicts = {place: self._unread(text) for place, text in enumerate(texts)}
        readable = [place for place, verdict in verdicts.items() if verdict is None]
        num_usual = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            for batch in _batches(readable, texts):
                began = time.perf_counter()
                scores = self._forward([texts[place] for place in batch]).tolist()
                seconds = (time.perf_counter() - began) / len(batch)
                verdicts |= {place: _verdict(score, seconds) for place, score in zip(batch, scores, strict=True)}
                if on_progress is not None:
                    on_progress(sum(verdict is not None for verdict in verdicts.values()), len(texts))
        finally:
            torch.set_num_threads(num_usual)
        return [verdict for verdict in verdicts.values() if verdict is not None]

    def _unread(self, text: NDArray[np.int32]) -> Verdict | None:
        """Why a text has no score; None where it can have one."""
        if len(text) == 0:
            return _failed("there are no tokens to score")
        if len(text) > self._max_tokens:
            return _failed(f"{len(text):,} tokens, and the reward model was made for {self._max_tokens:,}")
        if not 0 <= text.min() <= text.max() < self._vocabulary:
            return _failed(f"a token id is none of the reward model's {self._vocabulary:,}: it has another tokenizer")
        return None

    def _forward(self, texts: Sequence[NDArray[np.int32]]) -> Tensor:
        """[rows] float32 or wider. What stands behind a row's last token has no say in its score: a decoder looks back
        only."""
        lengths = torch.tensor([len(text) for text in texts])
        rows = nn.utils.rnn.pad_sequence([torch.from_numpy(np.asarray(text, np.int64)) for text in texts], True)
        is_token = torch.arange(rows.shape[1]) < lengths[:, None]
        return _score_at(self._model, lengths - 1, input_ids=rows, attention_mask=is_token.long(), use_cache=False)


def _batches(places: Sequence[int], texts: Sequence[NDArray[np.int32]]) -> Iterator[list[int]]:
    """The longest first, in rows of about one length; a batch of padded rows has at most `MAX_BATCH_TOKENS`."""
    by_length = sorted(places, key=lambda place: -len(texts[place]))
    while by_length:
        num_rows = max(1, MAX_BATCH_TOKENS // len(texts[by_length[0]]))
        yield by_length[:num_rows]
        by_length = by_length[num_rows:]


def _score_at(model: Any, last: Tensor, **arguments: Any) -> Tensor:
    """[rows], of the hidden states [rows, tokens, model dim] at each row's last token."""
    states = model.base_model(**arguments).last_hidden_state
    states = states[torch.arange(len(last)), last]
    # bf16 scores would tell no more than 256 margins apart; the head is one row.
    dtype = torch.promote_types(states.dtype, torch.float32)
    bias = None if model.score.bias is None else model.score.bias.to(dtype)
    return nn.functional.linear(states.to(dtype), model.score.weight.to(dtype), bias)[:, 0]


def _verdict(score: float, seconds: float) -> Verdict:
    if not math.isfinite(score):
        return Verdict(value=None, status=ScoreStatus.FAILED, detail=f"the score is {score}", seconds=seconds)
    return Verdict(value=score, seconds=seconds)


def _failed(why: str) -> Verdict:
    return Verdict(value=None, status=ScoreStatus.FAILED, detail=why)


def _load(folder: Path) -> Any:
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"{folder} cannot be loaded as a reward model: {error}") from error
    if loading["missing_keys"]:
        raise ModelError(
            f"{folder} lacks the weights {', '.join(sorted(loading['missing_keys']))}, which would be drawn at random: "
            "take a folder that is whole."
        )
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            f"{folder} ({model.config.model_type}) has a head of its own kind, expected one linear layer, "
            "score.weight, read at the last token: take a decoder model."
        )
    model.eval()
    _check_score(model, folder)
    return model


@torch.inference_mode()
def _check_score(model: Any, folder: Path) -> None:
    """Compare with transformers' own score of a text."""
    config = model.config.get_text_config()
    ids = [token for token in range(min(20, config.vocab_size)) if token != config.pad_token_id]
    arguments = {"input_ids": torch.tensor([ids]), "use_cache": False}
    theirs = model(**arguments).logits.flatten()
    ours = _score_at(model, torch.tensor([len(ids) - 1]), **arguments)
    difference = (ours - theirs).abs().max().item()
    if not difference <= TOLERANCE[theirs.dtype] * max(1.0, ours.abs().max().item()):
        raise ModelError(
            f"{folder} ({config.model_type}): a score differs by {difference:.3g} from that of its last hidden state: "
            "it changes one of them in a way that is not supported; take another model."
        )
