"""The proof, when a policy is loaded, that its output layer is what `head` takes it for.

T = tokens, D = model dim, V = vocabulary.
"""

from typing import Any

import torch

from towline.storage.errors import ModelError
from towline.trainer.attention import packed_arguments
from towline.trainer.head import DIVISORS, MULTIPLIERS, SOFTCAPS, head_transform
from towline.trainer.logprobs import token_logprobs
from towline.trainer.lora import head_weight

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a log-prob that rounding explains: about two steps of the dtype at a logit of 20."""


@torch.no_grad()
def check_head(model: Any, token_ids_T: torch.Tensor, *, arguments: dict[str, Any] | None = None) -> float:
    """Compare the model's own logits with decoder, output layer and transform put together as `token_logprobs` does it.

    A model that does anything else to its logits is refused rather than trained on other log-probs than its own.

    Args:
        model: a transformers causal language model.
        token_ids_T: a short text on the model's device, at least two tokens.
        arguments: of the model for this text; by default those of one packed row.

    Returns:
        The largest difference of a log-prob.

    Raises:
        ModelError: naming the difference.
    """
    arguments = packed_arguments([token_ids_T]) if arguments is None else arguments
    was_training = model.training
    try:
        # Dropout would make two passes differ.
        model.eval()
        logits_TV = model(**arguments).logits[0, :-1]
        hidden_TD = model.get_decoder()(**arguments).last_hidden_state[0, :-1]
    finally:
        model.train(was_training)
    head, targets_T = model.get_output_embeddings(), token_ids_T[1:].long()
    transform = head_transform(model.config)
    chunked_T = token_logprobs(
        hidden_TD, head_weight(head), targets_T, head_bias_V=getattr(head, "bias", None), transform=transform
    )
    logprobs_TV = torch.log_softmax(logits_TV.to(chunked_T.dtype), -1)
    full_T = logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1)
    difference = (full_T - chunked_T).abs().max().item()
    tolerance = TOLERANCE[hidden_TD.dtype]
    if not difference <= tolerance:
        known = ", ".join((*MULTIPLIERS, *DIVISORS, *SOFTCAPS))
        raise ModelError(
            f"the log-probs of this model ({model.config.model_type}) differ by up to {difference:.3g} from those of "
            f"its decoder times its output embeddings with multiplier {transform.multiplier:g} and soft-cap "
            f"{transform.softcap}, expected at most {tolerance:g}: it changes its logits in a way that training does "
            f"not support (supported are {known} of its configuration); take a model without that"
        )
    return difference
