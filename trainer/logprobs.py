"""Log-probs of given tokens from hidden states, without ever holding the logits of all tokens.

Done in chunks with the logits computed again in backward: 0.3 GiB instead of 2.3 GiB for 4,096 tokens and a vocabulary
of 49,152, and any loss may follow. exp and log are in float32 (float64 for float64 inputs); the matmuls are in the
dtype of the hidden states. Under ZeRO-3 call this inside the engine's forward, where the head weight is gathered.

T = tokens, D = model dim, V = vocabulary, C = tokens of one chunk.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from towline.storage.errors import ModelError
from towline.trainer.attention import packed_arguments


def token_logprobs(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    head_bias_V: Tensor | None = None,
) -> Tensor:
    """Give log softmax((hidden W^T + bias) / temperature)[target] for each token, <= 0.

    Args:
        targets_T: int64, the token that each hidden state predicts.
        temperature: that of sampling, > 0.

    Returns:
        [T] float32 (float64 for float64 inputs), differentiable in hidden states, head weight and bias. T may be 0:
        the gradients are then zeros.
    """
    return _TokenLogprobs.apply(hidden_TD, head_weight_VD, head_bias_V, targets_T, temperature, chunk_tokens, False)[0]


def token_logprobs_and_entropy(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    head_bias_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, with the entropy (nats) of each token's distribution: to be watched, it has no gradient.

    Costs one more softmax over a chunk, forward only.
    """
    return _TokenLogprobs.apply(hidden_TD, head_weight_VD, head_bias_V, targets_T, temperature, chunk_tokens, True)


class _TokenLogprobs(torch.autograd.Function):
    """Saves the log-sum-exp of each token (4 bytes) and its inputs; nothing of size T x V outlives a chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_weight_VD: Tensor,
        head_bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        chunk_tokens: int,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T = hidden_TD.new_empty(len(hidden_TD), dtype=dtype)
        log_normaliser_T = torch.empty_like(logprobs_T)
        entropy_T = torch.empty_like(logprobs_T) if wants_entropy else logprobs_T.new_empty(0)
        head = _Head(hidden_TD, head_weight_VD, head_bias_V, temperature)
        for chunk in _chunks(len(hidden_TD), chunk_tokens):
            logits_CV = head.logits(hidden_TD[chunk])
            log_normaliser_C = torch.logsumexp(logits_CV, -1)
            target_logits_C = logits_CV.gather(-1, targets_T[chunk, None]).squeeze(-1)
            logprobs_T[chunk] = target_logits_C - log_normaliser_C
            log_normaliser_T[chunk] = log_normaliser_C
            if wants_entropy:
                probabilities_CV = torch.exp(logits_CV - log_normaliser_C[:, None])
                entropy_T[chunk] = log_normaliser_C - (probabilities_CV * logits_CV).sum(-1)
        ctx.save_for_backward(hidden_TD, head_weight_VD, head_bias_V, targets_T, log_normaliser_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type hides the name of `ctx`
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, _ = grad_outputs
        hidden_TD, head_weight_VD, head_bias_V, targets_T, log_normaliser_T = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head = _Head(hidden_TD, head_weight_VD, head_bias_V, ctx.temperature)
        grad_hidden_TD = torch.zeros_like(hidden_TD) if needs_hidden else None
        # Sums over chunks are kept in float32: bf16 would lose the small chunks.
        grad_weight_VD = torch.zeros_like(head_weight_VD, dtype=log_normaliser_T.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(head_bias_V, dtype=log_normaliser_T.dtype) if needs_bias else None
        for chunk in _chunks(len(hidden_TD), ctx.chunk_tokens):
            # d logprob / d logit = [is target] - softmax
            grad_C = grad_logprobs_T[chunk, None] / ctx.temperature
            grad_logits_CV = head.logits(hidden_TD[chunk]).sub_(log_normaliser_T[chunk, None]).exp_().mul_(-grad_C)
            grad_logits_CV.scatter_add_(1, targets_T[chunk, None], grad_C)
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0)
            grad_logits_CV = grad_logits_CV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                grad_hidden_TD[chunk] = grad_logits_CV @ head.weight_VD
            if grad_weight_VD is not None and grad_weight_VD.dtype == hidden_TD.dtype:
                grad_weight_VD.addmm_(grad_logits_CV.T, hidden_TD[chunk])
            elif grad_weight_VD is not None:
                grad_weight_VD += grad_logits_CV.T @ hidden_TD[chunk]
        return (
            grad_hidden_TD,
            None if grad_weight_VD is None else grad_weight_VD.to(head_weight_VD.dtype),
            None if grad_bias_V is None else grad_bias_V.to(head_bias_V.dtype),
            None,
            None,
            None,
            None,
        )


class _Head:
    """The output layer, in the dtype of the hidden states: with autocast the weight is float32 beside bf16 states."""

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> None:
        self.weight_VD = weight_VD.to(hidden_TD.dtype)
        self.bias_V = None if bias_V is None else bias_V.to(hidden_TD.dtype)
        self.temperature = temperature

    def logits(self, hidden_CD: Tensor) -> Tensor:
        # Autocast holds in forward and not in backward; the logits must be the same numbers in both.
        with torch.autocast(hidden_CD.device.type, enabled=False):
            logits_CV = nn.functional.linear(hidden_CD, self.weight_VD, self.bias_V)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return logits_CV.div_(self.temperature)


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]


HEAD_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a log-prob that rounding explains: about two steps of the dtype at a logit of 20."""


@torch.no_grad()
def check_head(model: Any, token_ids_T: Tensor) -> float:
    """Compare the model's own logits with decoder and output layer put together as `token_logprobs` does it.

    Called when a policy is loaded. Models that do more after the decoder than one matrix product (`logits_scaling`,
    `final_logit_softcapping`, a multiplier) differ, and are refused rather than trained on other log-probs than theirs.

    Args:
        model: a transformers causal language model.
        token_ids_T: a short text on the model's device, at least two tokens.

    Returns:
        The largest difference of a log-prob.

    Raises:
        ModelError: naming the difference.
    """
    arguments = packed_arguments([token_ids_T])
    was_training = model.training
    try:
        # Dropout would make two passes differ.
        model.eval()
        logits_TV = model(**arguments).logits[0, :-1]
        hidden_TD = model.get_decoder()(**arguments).last_hidden_state[0, :-1]
    finally:
        model.train(was_training)
    head, targets_T = model.get_output_embeddings(), token_ids_T[1:].long()
    chunked_T = token_logprobs(hidden_TD, head.weight, targets_T, head_bias_V=getattr(head, "bias", None))
    logprobs_TV = torch.log_softmax(logits_TV.to(chunked_T.dtype), -1)
    full_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    difference = (full_T - chunked_T).abs().max().item()
    tolerance = HEAD_TOLERANCE[hidden_TD.dtype]
    if not difference <= tolerance:
        raise ModelError(
            f"the log-probs of this model ({model.config.model_type}) differ by up to {difference:.3g} from those of "
            f"its decoder times its output embeddings, expected at most {tolerance:g}: it scales, caps or otherwise "
            "changes its logits, which training does not support yet; take a model without that"
        )
    return difference
