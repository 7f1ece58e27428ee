"""A reward model: a transformer with one number on top, read at the last token of a completion or of each of its steps.

Scores are read by position. transformers reads the last token that is not `pad_token_id`, which is another one where a
completion ends with that token; so a reward model is given a padding token that ends none, and keeps it in its folder.

T = tokens of the batch, S = positions that are scored, D = model dim.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from towline.storage.errors import ModelError
from towline.storage.reward_folder import SCORE_OF, ScoreOf
from towline.trainer.attention import batch_arguments, shares_prompts
from towline.trainer.packing import PackedBatch
from towline.trainer.packing_step import Packing
from towline.trainer.packing_work import work_model
from towline.trainer.pretrained import (
    arguments_of_text,
    assert_apart,
    checkpoint_gradients,
    from_folder,
    training_device,
    usual_attention,
)

HEAD = "score.weight"
"""transformers' name, in all decoders that it can give such a head (5.19)."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of a score that rounding explains, relative to the larger of it and 1."""


class RewardModel(nn.Module):
    """Its forward gives scores, so that the head is used where ZeRO-3 gathers it. `DeepSpeedEngine` takes it as policy.

    scores_S = engine.scores(batch, batch.last_index)
    """

    def __init__(self, model: Any, *, is_fresh_head: bool) -> None:
        super().__init__()
        self.model = model
        self.is_fresh_head = is_fresh_head
        """The head was drawn at random, since the folder had none."""
        self.work = work_model(model)
        """What a step's balance goes by."""

    @property
    def shares_prompts(self) -> bool:
        """Whether both completions of a pair may be computed after one prompt, see `packing_pairs`."""
        return shares_prompts(self.model)

    @property
    def direct_parameters(self) -> list[nn.Parameter]:
        """As of `Policy`."""
        return list(self.model.score.parameters())

    def forward(self, batch: PackedBatch, positions_S: NDArray[np.int64]) -> Tensor:
        """Return [S] float32 (float64 of a float64 model), unbounded. S may be 0: the gradients are then zeros.

        Args:
            positions_S: in T: `PackedBatch.last_index`, or places in `PackedBatch.completion_index` where steps end.
        """
        assert self.shares_prompts or not batch.shares_prompts, (
            "pairs were laid out with shares_prompts, see RewardModel"
        )
        hidden_TD = _hidden_states(self.model, **batch_arguments(batch, self.model.device)).flatten(0, 1)
        hidden_SD = hidden_TD[torch.from_numpy(positions_S).to(hidden_TD.device)]
        # bf16 scores would tell no more than 256 margins apart; the head is one row.
        dtype = torch.promote_types(hidden_SD.dtype, torch.float32)
        return nn.functional.linear(hidden_SD.to(dtype), self.model.score.weight.to(dtype))[:, 0]


def load_reward_model(
    folder: Path,
    *,
    precision: str,
    head_seed: int,
    gradient_checkpointing: bool = False,
    attention: str | None = None,
    packing: Packing = "packed",
    score_of: ScoreOf = "completion",
) -> RewardModel:
    """Load a reward model, or a causal language model whose head is replaced, and prove that its scores are right.

    Args:
        head_seed: of a fresh head, which is drawn as transformers would draw it, and alike on all ranks.
        attention, packing: as of `policy.load_policy`.
        score_of: what it is trained to score; its folder will say so.

    Raises:
        ModelError: the folder holds neither, or a model that cannot be trained in this way, or its tokenizer has no
            token to pad with.
    """
    if attention is None:
        attention = usual_attention(packing, precision)
    model, loading = from_folder(
        AutoModelForSequenceClassification, "a reward model", folder, precision, attention, num_labels=1,
        pad_token_id=padding_token(folder), output_loading_info=True, ignore_mismatched_sizes=True,
    )  # fmt: skip
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(
            f"policy.model {folder} ({model.config.model_type}) has a head of its own kind for sequences, expected one "
            f"linear layer, {HEAD}: take a decoder model"
        )
    if loading["mismatched_keys"]:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape, _ in sorted(loading["mismatched_keys"]))
        raise ModelError(
            f"policy.model {folder} has weights of another shape than its config.json says, or more scores than one: "
            f"{found}, expected {HEAD} {tuple(head.weight.shape)}: take a model with one score, or one without a head"
        )
    missing = set(loading["missing_keys"])
    if missing - {HEAD}:
        raise ModelError(
            f"policy.model {folder} lacks the weights {', '.join(sorted(missing - {HEAD}))}, which would be drawn at "
            "random: take a folder that is whole"
        )
    if missing:
        _draw_head(model, head_seed)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"policy.model {folder} has no score head: a new one is drawn from seed {head_seed}", flush=True)
    setattr(model.config, SCORE_OF, score_of)
    model.to(training_device())
    assert_apart(_HiddenStates(model), packing)
    reward_model = RewardModel(model, is_fresh_head=bool(missing))
    _check_score(reward_model, packing)
    if gradient_checkpointing:
        checkpoint_gradients(model)
    return reward_model


def padding_token(folder: Path) -> int:
    """The token that transformers is to take for padding: the tokenizer's, unless texts end with it.

    Many models pad with their end-of-text token. transformers would then read the score of a completion one token
    early, at what comes before its end. Instead the token for unknown ones is taken, or another special one that begins
    or ends no text.

    Raises:
        ModelError: there is none, or no model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise ModelError(f"policy.model {folder} cannot be loaded as a reward model: {error}") from error
    ends = getattr(config, "eos_token_id", None)
    taken = {tokenizer.eos_token_id, tokenizer.bos_token_id, *(ends if isinstance(ends, list) else [ends])}
    special = [tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(tokenizer.all_special_ids)]
    fitting = (token for token in special if token is not None and token not in taken and token < config.vocab_size)
    found = next(fitting, None)
    if found is None:
        raise ModelError(
            f"policy.model {folder}: its tokenizer has no special token to pad with but those that begin or end a text "
            "or that the model does not know, and transformers would read scores at the wrong place: give it one "
            "(pad_token in tokenizer_config.json)"
        )
    return found


def _draw_head(model: Any, seed: int) -> None:
    spread = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    drawn = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(seed)) * spread
    with torch.no_grad():
        model.score.weight.copy_(drawn)


def _hidden_states(model: Any, **arguments: Any) -> Tensor:
    """[rows, tokens, D]"""
    return model.base_model(**arguments).last_hidden_state


class _HiddenStates(nn.Module):
    """What `isolation` asks of a causal language model, with hidden states for logits: one score could stay the same
    to the bit where they moved."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.train(model.training)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, **arguments: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=_hidden_states(self.model, **arguments))


@torch.no_grad()
def _check_score(reward_model: RewardModel, packing: Packing) -> None:
    """Compare with transformers' own score of a text."""
    model = reward_model.model
    config = model.config.get_text_config()
    ids = [token for token in range(1, 19) if token % config.vocab_size != config.pad_token_id][:17]
    token_ids_T = torch.tensor(ids, device=model.device) % config.vocab_size
    arguments = arguments_of_text(token_ids_T, packing)
    was_training = model.training
    try:
        model.eval()
        theirs = model(**arguments).logits.flatten()
        hidden_D = _hidden_states(model, **arguments)[0, -1]
        ours = nn.functional.linear(hidden_D.to(torch.float64), model.score.weight.to(torch.float64))
    finally:
        model.train(was_training)
    difference = (ours - theirs).abs().max().item()
    if not difference <= TOLERANCE[theirs.dtype] * max(1.0, ours.abs().max().item()):
        raise ModelError(
            f"model type {config.model_type}: a score differs by {difference:.3g} from that of its last hidden state "
            f"times {HEAD}: it changes one of them in a way that training does not support; take another model"
        )
