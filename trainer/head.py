"""The output layer: one matrix product, then what some models do to its logits; and its gradients, chunk by chunk.

logits = cap(multiplier (hidden W^T + bias)) / temperature, cap(x) = softcap tanh(x / softcap).

The matmuls are in the dtype of the hidden states; all else is in float32, or in float64 for float64 states.

T = tokens, D = model dim, V = vocabulary, C = tokens of one chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
DIVISORS = ("logits_scaling",)
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Names in transformers 5.19, read in its modeling files: logit_scale in Cohere, lm_head_multiplier in Falcon-H1,
output_multiplier in Muse Glimmer; logits_scaling in Granite, and in MiniCPM3, which divides its hidden states by
hidden_size / dim_model_base; final_logit_softcapping in Gemma, VaultGemma, nanochat, logits_soft_cap in
RecurrentGemma."""

MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)
"""Model types that mean by Granite's name the opposite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """What a model does to the logits of its output embeddings: the multiplier first, then the cap."""

    multiplier: float = 1.0
    softcap: float | None = None
    """Largest absolute logit, > 0."""

    def __post_init__(self) -> None:
        assert self.softcap is None or self.softcap > 0, f"softcap {self.softcap}, expected > 0"


PLAIN = HeadTransform()


def head_transform(config: Any) -> HeadTransform:
    """Read the transform off a transformers configuration.

    A model may ignore what its configuration says, or do what no name tells: `head_check.check_head` finds out.
    """
    text = config.get_text_config()
    multiplier = 1.0
    for name in (*MULTIPLIERS, *DIVISORS):
        if (value := _number(text, name)) is not None:
            multiplies = name in MULTIPLIERS or text.model_type in MULTIPLIES_BY_LOGITS_SCALING
            multiplier *= value if multiplies else 1 / value
    caps = [value for name in SOFTCAPS if (value := _number(text, name)) is not None]
    return HeadTransform(multiplier=multiplier, softcap=min(caps, default=None))


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None


class Head:
    """The output layer, in the dtype of the hidden states: with autocast the weight is float32 beside bf16 states."""

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, transform: HeadTransform, temperature: float
    ) -> None:
        self.weight_VD = weight_VD.to(hidden_TD.dtype)
        self._bias_V = None if bias_V is None else bias_V.to(hidden_TD.dtype)
        self.scale = transform.multiplier / temperature
        """d logit / d output of the matrix product, where the cap does not bend."""
        self._capped_range = None if transform.softcap is None else transform.softcap / temperature

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """[C, V], at the temperature; the caller's to overwrite."""
        # Autocast holds in forward and not in backward; the logits must be the same numbers in both.
        with torch.autocast(hidden_CD.device.type, enabled=False):
            logits_CV = nn.functional.linear(hidden_CD, self.weight_VD, self._bias_V)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        if self._capped_range is not None:
            return logits_CV.mul_(self.scale / self._capped_range).tanh_().mul_(self._capped_range)
        return logits_CV if self.scale == 1 else logits_CV.mul_(self.scale)

    def cap_slope(self, logits_CV: Tensor) -> Tensor | None:
        """By how much the cap bends the gradient, 1 - tanh^2 in [0, 1], [C, V]; None without a cap."""
        if self._capped_range is None:
            return None
        return logits_CV.div(self._capped_range).square_().neg_().add_(1)


class HeadGradients:
    """Gradients of the head's inputs, added up over chunks; those that are not wanted stay None.

    Sums over chunks are kept in float32 (float64): bf16 would lose the small chunks.
    """

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, wants: tuple[bool, bool, bool]
    ) -> None:
        sum_dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        self._states_TD = hidden_TD
        # The first chunk overwrites; without any the sums are 0.
        self._is_first = len(hidden_TD) > 0
        make = torch.empty_like if self._is_first else torch.zeros_like
        self.hidden_TD = make(hidden_TD) if wants[0] else None
        self.weight_VD = make(weight_VD, dtype=sum_dtype) if wants[1] else None
        self.bias_V = torch.zeros_like(bias_V, dtype=sum_dtype) if bias_V is not None and wants[2] else None

    def add(self, head: Head, chunk: slice, grad_CV: Tensor) -> None:
        """Add a chunk whose gradient of the loss in the outputs of the matrix product is `grad_CV`."""
        hidden_CD = self._states_TD[chunk]
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0)
        grad_CV = grad_CV.to(hidden_CD.dtype)
        if self.hidden_TD is not None:
            torch.mm(grad_CV, head.weight_VD, out=self.hidden_TD[chunk])
        if self.weight_VD is not None and self.weight_VD.dtype == hidden_CD.dtype:
            self.weight_VD.addmm_(grad_CV.T, hidden_CD, beta=0 if self._is_first else 1)
        elif self.weight_VD is not None:
            chunk_VD = grad_CV.T @ hidden_CD
            if self._is_first:
                self.weight_VD.copy_(chunk_VD)
            else:
                self.weight_VD += chunk_VD
        self._is_first = False
