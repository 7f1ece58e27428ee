"""The loss of given tokens with its gradients in one pass: the logits of each chunk are computed once.

For losses that are a sum over tokens of a function of each token's own log-prob: then d loss / d log-prob is known as
soon as the log-prob is, and the gradients of hidden states and head follow while the chunk's softmax is at hand. GRPO
and PPO with per-token ratios are such losses, given their normaliser. So are sums over groups of tokens, such as the
pairs of DPO, if a chunk holds whole groups; of a group longer than a chunk the logits are computed twice. For any other
loss take `logprobs.token_logprobs`. What is saved for backward are the gradients themselves: D numbers a token, and as
much as the head's weight in float32.

T = tokens, D = model dim, V = vocabulary, C = tokens of one chunk.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from towline.trainer.head import PLAIN, Head, HeadGradients, HeadTransform
from towline.trainer.softmax import ChunkSoftmax, chunk_softmax, chunks

TokenLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(log-probs [C], their place among the T tokens) -> (losses [C] or the sum of these, d loss / d log-prob [C]); C are
those of a chunk, or of the one group that is longer than a chunk."""


def differentiated(loss: Callable[[Tensor, slice], Tensor]) -> TokenLoss:
    """Let torch find the derivative of a loss that is given as a function of log-probs [C] and their place among T.

        def loss(logprobs_C, tokens):
            return policy_loss(logprobs_C, old_T[tokens], advantages_T[tokens], weights_T[tokens]).loss

    Args:
        loss: returns the losses [C] or their sum. It must treat each token by itself, or each group of tokens: it sees
            one chunk at a time.
    """

    def token_loss(logprobs_C: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf_C = logprobs_C.detach().requires_grad_()
            losses = loss(leaf_C, tokens)
            (slopes_C,) = torch.autograd.grad(losses.sum(), leaf_C)
        return losses.detach(), slopes_C

    return token_loss


def fused_token_loss(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    targets_T: Tensor,
    token_loss: TokenLoss,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    head_bias_V: Tensor | None = None,
    transform: HeadTransform = PLAIN,
    with_entropy: bool = False,
    label_smoothing: float = 0.0,
    groups: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum `token_loss` over the tokens, with the gradients that `logprobs.token_logprobs` and the loss would give.

    backward scales the gradients in place by that of the sum, so it can be called once: a second call with
    `retain_graph` raises RuntimeError. float16 with a loss scale would underflow before it is scaled: put the scale
    into `token_loss`.

    Args:
        targets_T: int64, the token that each hidden state predicts.
        token_loss: called for each chunk in order, without gradient; not called for T = 0.
        temperature: that of sampling, > 0.
        transform: of the model, see `head.head_transform`.
        label_smoothing: s in [0, 1]: `token_loss` is given (1 - s) log-prob + s (the mean of log p over the vocabulary)
            in place of the log-prob, so that -1 times it is the cross entropy with smoothed labels (Szegedy et al.
            2015, arXiv:1512.00567, section 7).
        groups: numbers of neighbouring tokens that `token_loss` must see together, adding up to T; by default it sees
            each token by itself.

    Returns:
        The sum, a scalar differentiable in hidden states, head weight and bias; and detached, for metrics, the
        log-probs [T] and the entropies (nats) [T], or [0] without `with_entropy`. All float32, or float64 for float64
        inputs.
    """
    # In a Function's forward the grad mode is always off, and needs_input_grad does not know it.
    wants_gradients = torch.is_grad_enabled()
    return _FusedTokenLoss.apply(
        hidden_TD, head_weight_VD, head_bias_V, targets_T, token_loss, transform, temperature, chunk_tokens,
        with_entropy, wants_gradients, label_smoothing, groups,
    )  # fmt: skip


class _FusedTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_weight_VD: Tensor,
        head_bias_V: Tensor | None,
        targets_T: Tensor,
        token_loss: TokenLoss,
        transform: HeadTransform,
        temperature: float,
        chunk_tokens: int,
        wants_entropy: bool,
        wants_gradients: bool,
        label_smoothing: float,
        groups: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        logprobs_T = hidden_TD.new_empty(len(hidden_TD), dtype=dtype)
        entropy_T = torch.empty_like(logprobs_T) if wants_entropy else logprobs_T.new_empty(0)
        total = logprobs_T.new_zeros((), dtype=torch.float64)
        wants = ctx.needs_input_grad[:3] if wants_gradients else (False, False, False)
        head = Head(hidden_TD, head_weight_VD, head_bias_V, transform, temperature)
        gradients = HeadGradients(hidden_TD, head_weight_VD, head_bias_V, wants=wants)

        smoothed_T = torch.empty_like(logprobs_T) if label_smoothing > 0 else logprobs_T

        def softmax_of(chunk: slice) -> tuple[ChunkSoftmax, Tensor | None]:
            logits_CV = head.logits(hidden_TD[chunk])
            cap_slope_CV = head.cap_slope(logits_CV) if any(wants) else None
            softmax = chunk_softmax(
                logits_CV, targets_T[chunk], wants_entropy=wants_entropy, wants_mean=label_smoothing > 0
            )
            logprobs_T[chunk] = softmax.logprobs_C
            if softmax.entropy_C is not None:
                entropy_T[chunk] = softmax.entropy_C
            if softmax.mean_logprobs_C is not None:
                smoothed_T[chunk] = softmax.logprobs_C.lerp(softmax.mean_logprobs_C, label_smoothing)
            return softmax, cap_slope_CV

        def add_gradients(chunk: slice, slopes_C: Tensor, softmax: ChunkSoftmax, cap_slope_CV: Tensor | None) -> None:
            # d logprob / d logit = [is target] - softmax; smoothed: (1 - s) [is target] + s / V - softmax
            grad_C = slopes_C.to(dtype) * head.scale
            grad_CV = softmax.exp_CV.mul_(-(grad_C / softmax.sum_C)[:, None])
            grad_CV.scatter_add_(1, targets_T[chunk, None], ((1 - label_smoothing) * grad_C)[:, None])
            if label_smoothing > 0:
                grad_CV.add_((label_smoothing / grad_CV.shape[1] * grad_C)[:, None])
            if cap_slope_CV is not None:
                grad_CV.mul_(cap_slope_CV)
            gradients.add(head, chunk, grad_CV)

        # Functions, so that nothing of a chunk lives on while the logits of the next are computed.
        def process(stretch: slice) -> None:
            *others, last = chunks(stretch, chunk_tokens)
            for chunk in others:
                softmax_of(chunk)
            at_hand = softmax_of(last)
            losses, slopes = token_loss(smoothed_T[stretch], stretch)
            total.add_(losses.sum(dtype=torch.float64))
            if any(wants):
                add_gradients(last, slopes[last.start - stretch.start :], *at_hand)
                del at_hand
                for chunk in others:
                    slopes_C = slopes[chunk.start - stretch.start : chunk.stop - stretch.start]
                    add_gradients(chunk, slopes_C, *softmax_of(chunk))

        for stretch in _stretches(len(hidden_TD), chunk_tokens, groups):
            process(stretch)
        # Not the weight itself: under ZeRO-3 it need not be gathered for this backward.
        ctx.save_for_backward(gradients.hidden_TD, gradients.weight_VD, gradients.bias_V)
        ctx.dtypes = tuple(None if leaf is None else leaf.dtype for leaf in (hidden_TD, head_weight_VD, head_bias_V))
        ctx.mark_non_differentiable(logprobs_T, entropy_T)
        return total.to(dtype), logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type hides the name of `ctx`
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        gradients = [
            None if saved is None else saved.mul_(grad_outputs[0]).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, *[None] * 9)


def _stretches(num_tokens: int, chunk_tokens: int, groups: Sequence[int] | None) -> list[slice]:
    """What `token_loss` sees at a time: a chunk; with groups as many as a chunk holds, or one that is longer."""
    if groups is None:
        return chunks(slice(0, num_tokens), chunk_tokens)
    assert sum(groups) == num_tokens, f"{sum(groups)} tokens in groups, found {num_tokens}"
    ends: list[int] = []
    start = end = 0
    for size in groups:
        if end > start and end + size - start > chunk_tokens:
            ends.append(end)
            start = end
        end += size
    return [slice(*bounds) for bounds in pairwise([0, *ends, num_tokens])] if num_tokens else []
