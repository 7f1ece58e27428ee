"""How long a piece takes, in estimated floating-point operations of its forward and backward pass.

Tokens alone would call a completion of 8,000 tokens as long as eight of 1,000; with 135 million parameters its
attention takes as much again. Ranks are balanced by this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Operations of forward and backward. Integers: sums are exact, so that every rank balances alike."""

    per_token: int
    """Of the layers' matrix products."""
    per_pair: int
    """Of attention, for each pair of a token and one that it sees."""
    per_target: int = 0
    """Of the head, for each completion token."""

    def piece(self, num_prompt_tokens: int, num_completion_tokens: Sequence[int]) -> int:
        """Of a prompt computed once, with its completions: prompt²/2 + sum of completion x (prompt + completion/2)
        pairs."""
        num_targets = sum(num_completion_tokens)
        pairs = _causal_pairs(num_prompt_tokens) + sum(
            length * num_prompt_tokens + _causal_pairs(length) for length in num_completion_tokens
        )
        return self._sum(num_prompt_tokens + num_targets, pairs, num_targets)

    def row(self, num_tokens: int, num_targets: int) -> int:
        """Of a row of tokens, padding included, of which some are completion tokens."""
        return self._sum(num_tokens, _causal_pairs(num_tokens), num_targets)

    def _sum(self, num_tokens: int, num_pairs: int, num_targets: int) -> int:
        return self.per_token * num_tokens + self.per_pair * num_pairs + self.per_target * num_targets


TOKENS_ONLY = WorkModel(per_token=1, per_pair=0)
"""For sequences so short that attention does not count."""


def work_model(model: Any) -> WorkModel:
    """Estimate from a transformers model: 2 operations a multiply-add, backward twice forward, as in Kaplan et al. 2020
    (arXiv:2001.08361, section 2.1). To be called before ZeRO-3 takes the weights apart.

    Counted as if every layer had full attention and every expert saw every token. Without attention heads in its config
    a model has no pairs; a reward model has no output embeddings.
    """
    config = model.config.get_text_config()
    ends = [part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    embeddings = {id(weight) for weight in ends}
    body = [parameter for parameter in model.parameters() if id(parameter) not in embeddings]
    head = ends[1] if len(ends) > 1 else None
    heads = getattr(config, "num_attention_heads", None) or 0
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return WorkModel(
        # a frozen weight has no gradient
        per_token=sum((6 if parameter.requires_grad else 4) * parameter.numel() for parameter in body),
        # queries times keys, then scores times values
        per_pair=12 * config.num_hidden_layers * heads * head_dim,
        # its logits are computed again in backward
        per_target=0 if head is None else (8 if head.requires_grad else 6) * head.numel(),
    )


def _causal_pairs(length: int) -> int:
    return length * (length + 1) // 2
