"""`[policy]` and `[trainer]` of an experiment."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from towline.storage.config import ConfigPath, StrictModel, resolve_path

Home = Literal["on_device", "offloaded", "int8"]


class ModelConfig(StrictModel):
    model: Annotated[str, BeforeValidator(resolve_path)]
    """Folder of the model and its tokenizer (Hugging Face layout), relative to this file."""

    @property
    def folder(self) -> Path:
        return Path(self.model)


class DpoPolicyConfig(ModelConfig):
    """The reference of DPO is the model that the run begins with."""

    reference_tables: ConfigPath | None = None
    """Folder of tables with the reference's log-probs, which several runs may share; default: in the run's folder. A
    table that is missing is computed and written."""


class PolicyConfig(ModelConfig):
    reference: Home = "on_device"
    """Where the reference policy lives: on_device beside the policy; offloaded in main memory, and on the device only
    while it computes (the same numbers to the bit; without a GPU it is all one memory and nothing is moved); int8 on
    the device with one byte a weight of its linear layers (other numbers; needs zero_stage <= 2 and torchao). It is
    not loaded when trainer.kl_beta is 0."""


_WIDEST_SEQUENCE_CLIP = 0.05


class LoraConfig(StrictModel):
    """Low-rank adapters beside frozen weights. There is no dropout: with it the policy's log-probs before its first
    inner step would not be those of the engine, which has none."""

    rank: int = Field(default=16, ge=1)
    """Of the two factors of each adapter."""
    alpha: int = Field(default=32, ge=1)
    """Adapters are added times alpha / rank."""
    target_modules: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the linear layers that get one, such as "q_proj"; by default all but the head."""


class EngineConfig(StrictModel):
    """What every objective says of its optimiser, its memory and its checkpoints."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the learning rate rises linearly; then it is constant, or follows trainer.schedule
    where the objective has one."""
    weight_decay: float = Field(default=0.0, ge=0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """L2 norm over all parameters to which a larger gradient is scaled down."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights; by default the weights."""
    max_tokens_per_microbatch: int = Field(default=4096, ge=16)
    """Budget of one forward and backward pass of one rank, tokens, padding included."""
    packing: Literal["packed", "buckets"] = "packed"
    """Sequences end to end in one row, a group's prompt once; or rows of lengths within 10 %, padded, for models whose
    layers cannot keep the sequences of one row apart."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of weights and activations; optimiser state and master weights are float32 always."""
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(default=50, ge=1)
    """Steps. The last step and a clean stop always leave a checkpoint."""
    keep_checkpoints: int = Field(default=3, ge=1)


class TrainerConfig(EngineConfig):
    """`[trainer]` of GRPO."""

    baseline: Literal["group", "leave_one_out", "batch"] = "group"
    """What a reward is compared with: the mean of its group; of the others of its group (RLOO); of the whole step."""
    scale: Literal["std", "batch_std", "none"] = "std"
    """Divide rewards less their baseline by their standard deviation in the group, in the step (REINFORCE++), or not
    (Dr. GRPO, RLOO)."""
    surrogate: Literal["clipped", "cispo"] = "clipped"
    """Tokens beyond the clip lose their gradient, or (CISPO) keep it with the clipped ratio as their weight."""
    ratio: Literal["token", "sequence"] = "token"
    """Probability ratio of each token, or one for the whole completion (GSPO), with clips of its own: 3e-4 and 4e-4."""
    clip: float = Field(default=0.2, gt=0, le=1)
    """The probability ratio is clipped to [1 - clip, 1 + clip]."""
    clip_high: float | None = Field(default=None, gt=0)
    """Upper clip, when it differs from the lower one (DAPO's clip-higher)."""
    normaliser: Literal["tokens", "sequence", "constant"] = "tokens"
    """What the summed token loss is divided by: loss tokens of the whole optimiser step; each completion's own length;
    completions times rollout.max_completion_tokens."""
    masks_truncated: bool = False
    """Completions cut at rollout.max_completion_tokens are compared with, and not trained on (DAPO's filter)."""
    old: Literal["rollout", "recomputed"] = "rollout"
    """Log-probs that the ratio is taken against: the engine's at generation, or the trainer's before the first inner
    step, which costs one forward pass more."""
    correction: Literal["none", "truncated", "masked"] = "none"
    """Weight of each token, exp(recomputed - engine's log-prob): none, at most correction_high, or 0 outside
    [correction_low, correction_high]."""
    correction_low: float = Field(default=0.5, ge=0)
    correction_high: float = Field(default=2.0, gt=0)
    kl_beta: float = Field(default=0.04, ge=0)
    """Weight of KL(policy, reference)."""
    kl_place: Literal["loss", "reward"] = "loss"
    """In the loss of each token; or taken off each completion's reward (k1, once a step)."""
    kl_estimator: Literal["k2", "k3", "k3_unbiased"] = "k3"
    """Of the KL in the loss."""
    reference_every: int | None = Field(default=None, ge=2)
    """Steps after which the policy of that moment becomes the reference, again and again; by default never."""
    inner_epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps per inner epoch; the step's groups are divided among them."""

    @property
    def has_reference_model(self) -> bool:
        """Whether there is a reference at all; with adapters it is the policy without them."""
        return self.kl_beta > 0

    def last_refresh(self, step: int) -> int | None:
        """The policy version that is the reference of outer step `step`; None for the policy that the run began with.

        With reference_every = N the reference of steps N to 2N - 1 is version N, and so on.
        """
        if self.reference_every is None or self.kl_beta == 0 or step < self.reference_every:
            return None
        return step - step % self.reference_every

    @field_validator("reference_every", mode="before")
    @classmethod
    def _refuse_every_step(cls, value: object) -> object:
        if value == 1 and not isinstance(value, bool):
            raise ValueError(
                "1 would make the policy its own reference at each step: their KL would always begin at 0 and hold "
                "nothing back. Leave it out, set 2 or more (200 to 500 is usual), or set kl_beta = 0"
            )
        return value

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _refuse_k1(cls, value: object) -> object:
        if value == "k1":
            raise ValueError(
                "k1 in the loss has an expected gradient of zero: it would not hold the policy near the reference. "
                'Use "k3" (default), "k3_unbiased" or "k2"; in the reward (kl_place = "reward") it is always k1'
            )
        return value

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "TrainerConfig":
        for is_wrong, reason in (
            (
                self.baseline == "leave_one_out" and self.scale != "none",
                f'baseline = "leave_one_out" is RLOO, which divides by no standard deviation: with scale = '
                f'"{self.scale}" its estimate is biased. Set scale = "none"',
            ),
            (
                self.baseline == "batch" and self.scale == "std",
                'baseline = "batch" compares over the whole step and scale = "std" divides by each group\'s spread: '
                'set scale = "batch_std" or "none"',
            ),
            (
                self.ratio == "sequence" and self.surrogate == "cispo",
                'surrogate = "cispo" weighs each token by its own ratio: set ratio = "token"',
            ),
            (
                self.ratio == "sequence" and self.clip > _WIDEST_SEQUENCE_CLIP,
                f'ratio = "sequence" is a mean over the completion and moves far less than a token\'s: clip = '
                f"{self.clip:g} would never act. Set clip = 3e-4 and clip_high = 4e-4 (GSPO)",
            ),
            (
                self.ratio == "sequence" and self.kl_estimator == "k3_unbiased",
                'kl_estimator = "k3_unbiased" weighs each token by its own ratio: set ratio = "token", or another '
                "estimator",
            ),
            (
                self.correction != "none" and self.old == "rollout",
                f'correction = "{self.correction}" weighs recomputed log-probs against the engine\'s, and old = '
                '"rollout" recomputes none: the ratio holds the engine\'s already. Set old = "recomputed"',
            ),
            (
                self.correction == "masked" and self.correction_low >= self.correction_high,
                f"correction_low ({self.correction_low:g}) must be below correction_high ({self.correction_high:g})",
            ),
            (
                self.lora is not None and self.reference_every is not None,
                "with [trainer.lora] the reference is the policy without its adapters, which cannot become the policy: "
                "leave reference_every out, or merge (checkpoints hold the merged model in hf/) and begin a new run "
                "from there",
            ),
            (
                self.kl_place == "reward" and self.kl_beta == 0,
                'kl_place = "reward" needs kl_beta > 0',
            ),
            (
                self.kl_place == "reward" and self.masks_truncated,
                'masks_truncated leaves completions out of the forward passes, and kl_place = "reward" needs the KL '
                'of every completion that is compared with: set kl_place = "loss"',
            ),
            (
                self.kl_place == "reward" and self.kl_estimator != "k3",
                'kl_place = "reward" always uses k1, the log-ratio itself: leave kl_estimator out',
            ),
        ):
            if is_wrong:
                raise ValueError(reason)
        return self
