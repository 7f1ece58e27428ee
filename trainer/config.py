"""`[policy]` and `[trainer]` of an experiment."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from towline.storage.config import StrictModel, resolve_path


class PolicyConfig(StrictModel):
    model: Annotated[str, BeforeValidator(resolve_path)]
    """Folder of the model and its tokenizer (Hugging Face layout), relative to this file."""
    reference: Literal["on_device"] = "on_device"
    """Where the frozen reference policy lives. It is not loaded when trainer.kl_beta is 0."""


class TrainerConfig(StrictModel):
    learning_rate: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Inner steps over which the learning rate rises linearly; constant afterwards."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """L2 norm over all parameters to which a larger gradient is scaled down."""
    kl_beta: float = Field(default=0.04, ge=0)
    """Weight of KL(policy, reference) in the loss."""
    kl_estimator: Literal["k2", "k3"] = "k3"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The probability ratio is clipped to [1 - clip, 1 + clip]."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip, when it differs from the lower one (DAPO's clip-higher)."""
    scale: Literal["std", "none"] = "std"
    """Divide a group's centred rewards by their standard deviation, or not (Dr. GRPO)."""
    normaliser: Literal["tokens", "sequence", "constant"] = "tokens"
    """What the summed token loss is divided by: loss tokens of the whole optimiser step; each completion's own length;
    completions times rollout.max_completion_tokens."""
    inner_epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps per inner epoch; the step's groups are divided among them."""
    max_tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Budget of one packed forward and backward pass of one rank, tokens."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations; optimiser state and master weights are float32 always."""
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps. The last step and a clean stop always leave a checkpoint."""
    keep_checkpoints: int = Field(default=3, ge=1)

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _refuse_k1(cls, value: object) -> object:
        if value == "k1":
            raise ValueError(
                "k1 in the loss has an expected gradient of zero: it would not hold the policy near the reference. "
                'Use "k3" (default) or "k2"'
            )
        return value
