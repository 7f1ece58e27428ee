"""Log-probs of given tokens from hidden states, without ever holding the logits of all tokens.

Done in chunks with the logits computed again in backward: 0.2 GiB instead of 2.3 GiB for 4,096 tokens and a vocabulary
of 49,152, and any loss may follow. (`fused_loss` saves the second computation where the loss allows it.) exp and log
are in float32 (float64 for float64 inputs); the matmuls are in the dtype of the hidden states. Under ZeRO-3 call this
inside the engine's forward, where the head weight is gathered.

T = tokens, D = model dim, V = vocabulary, C = tokens of one chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from towline.trainer.head import PLAIN, Head, HeadGradients, HeadTransform
from towline.trainer.softmax import chunk_softmax, chunks


def token_logprobs(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    head_bias_V: Tensor | None = None,
    transform: HeadTransform = PLAIN,
) -> Tensor:
    """Give log softmax(transform(hidden W^T + bias) / temperature)[target] for each token, <= 0.

    Args:
        targets_T: int64, the token that each hidden state predicts.
        temperature: that of sampling, > 0.
        transform: of the model, see `head.head_transform`.

    Returns:
        [T] float32 (float64 for float64 inputs), differentiable in hidden states, head weight and bias. T may be 0:
        the gradients are then zeros.
    """
    return _TokenLogprobs.apply(
        hidden_TD, head_weight_VD, head_bias_V, targets_T, transform, temperature, chunk_tokens, False
    )[0]


def token_logprobs_and_entropy(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    head_bias_V: Tensor | None = None,
    transform: HeadTransform = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Like `token_logprobs`, with the entropy (nats) of each token's distribution: to be watched, it has no gradient.

    Costs one more buffer and one more read of each chunk, forward only.
    """
    return _TokenLogprobs.apply(
        hidden_TD, head_weight_VD, head_bias_V, targets_T, transform, temperature, chunk_tokens, True
    )


class _TokenLogprobs(torch.autograd.Function):
    """Saves the log-sum-exp of each token (4 bytes) and its inputs; nothing of size T x V outlives a chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_weight_VD: Tensor,
        head_bias_V: Tensor | None,
        targets_T: Tensor,
        transform: HeadTransform,
        temperature: float,
        chunk_tokens: int,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T = hidden_TD.new_empty(len(hidden_TD), dtype=dtype)
        log_normaliser_T = torch.empty_like(logprobs_T)
        entropy_T = torch.empty_like(logprobs_T) if wants_entropy else logprobs_T.new_empty(0)
        head = Head(hidden_TD, head_weight_VD, head_bias_V, transform, temperature)

        # A function, so that nothing of a chunk lives on while the logits of the next are computed.
        def process(chunk: slice) -> None:
            softmax = chunk_softmax(head.logits(hidden_TD[chunk]), targets_T[chunk], wants_entropy=wants_entropy)
            logprobs_T[chunk] = softmax.logprobs_C
            log_normaliser_T[chunk] = softmax.log_normaliser_C
            if softmax.entropy_C is not None:
                entropy_T[chunk] = softmax.entropy_C

        for chunk in chunks(slice(0, len(hidden_TD)), chunk_tokens):
            process(chunk)
        ctx.save_for_backward(hidden_TD, head_weight_VD, head_bias_V, targets_T, log_normaliser_T)
        ctx.transform, ctx.temperature, ctx.chunk_tokens = transform, temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type hides the name of `ctx`
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_logprobs_T, _ = grad_outputs
        hidden_TD, head_weight_VD, head_bias_V, targets_T, log_normaliser_T = ctx.saved_tensors
        head = Head(hidden_TD, head_weight_VD, head_bias_V, ctx.transform, ctx.temperature)
        gradients = HeadGradients(hidden_TD, head_weight_VD, head_bias_V, wants=ctx.needs_input_grad[:3])

        def process(chunk: slice) -> None:
            logits_CV = head.logits(hidden_TD[chunk])
            cap_slope_CV = head.cap_slope(logits_CV)
            # d logprob / d logit = [is target] - softmax
            grad_C1 = grad_logprobs_T[chunk, None] * head.scale
            grad_CV = logits_CV.sub_(log_normaliser_T[chunk, None]).exp_().mul_(-grad_C1)
            grad_CV.scatter_add_(1, targets_T[chunk, None], grad_C1)
            if cap_slope_CV is not None:
                grad_CV.mul_(cap_slope_CV)
            gradients.add(head, chunk, grad_CV)

        for chunk in chunks(slice(0, len(hidden_TD)), ctx.chunk_tokens):
            process(chunk)
        weight_VD, bias_V = gradients.weight_VD, gradients.bias_V
        return (
            gradients.hidden_TD,
            None if weight_VD is None else weight_VD.to(head_weight_VD.dtype),
            None if bias_V is None else bias_V.to(head_bias_V.dtype),
            *[None] * 5,
        )
