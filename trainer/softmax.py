"""Softmax over a chunk of logits in place: log-prob of the target, entropy and probabilities from one exp.

V = vocabulary, C = tokens of one chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSoftmax:
    exp_CV: Tensor
    """exp(logit - the token's largest logit), in the memory of the logits unless the entropy was wanted."""
    sum_C: Tensor
    """Of exp, >= 1: the probabilities are exp / sum."""
    log_normaliser_C: Tensor
    """log-sum-exp of the logits, nats."""
    logprobs_C: Tensor
    """Of the targets, nats, <= 0."""
    entropy_C: Tensor | None
    """Nats, >= 0."""
    mean_logprobs_C: Tensor | None
    """Over the vocabulary, each token of it counting alike, nats, <= -log V."""


def chunk_softmax(
    logits_CV: Tensor, targets_C: Tensor, *, wants_entropy: bool, wants_mean: bool = False
) -> ChunkSoftmax:
    """Overwrites the logits. The entropy takes a second buffer [C, V] and one more read of both, the mean a read."""
    largest_C = logits_CV.amax(-1)
    shifted_CV = logits_CV.sub_(largest_C[:, None])
    target_C = shifted_CV.gather(-1, targets_C[:, None])[:, 0]
    mean_C = shifted_CV.mean(-1) if wants_mean else None
    exp_CV = shifted_CV.exp() if wants_entropy else shifted_CV.exp_()
    sum_C = exp_CV.sum(-1)
    log_sum_C = sum_C.log()
    entropy_C = None
    if wants_entropy:
        # As products of rows with columns: exp * shifted would be a third buffer.
        weighted_C = torch.bmm(exp_CV[:, None, :], shifted_CV[:, :, None])[:, 0, 0]
        entropy_C = log_sum_C - weighted_C / sum_C
    return ChunkSoftmax(
        exp_CV=exp_CV,
        sum_C=sum_C,
        log_normaliser_C=largest_C + log_sum_C,
        logprobs_C=target_C - log_sum_C,
        entropy_C=entropy_C,
        mean_logprobs_C=None if mean_C is None else mean_C - log_sum_C,
    )


def chunks(tokens: slice, chunk_tokens: int) -> list[slice]:
    """Cut a stretch of tokens into chunks of `chunk_tokens`; the last may be shorter."""
    starts = range(tokens.start, tokens.stop, chunk_tokens)
    return [slice(start, min(start + chunk_tokens, tokens.stop)) for start in starts]
