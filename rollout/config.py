"""`[rollout]` of an experiment."""

from typing import Literal

from pydantic import Field, field_validator

from towline.storage.config import StrictModel


class RolloutConfig(StrictModel):
    prompts_per_step: int = Field(ge=1)
    """Prompts (groups) of one outer step."""
    group_size: int = Field(default=8)
    """Completions of each prompt."""
    max_waves: int = Field(default=1, ge=1)
    """How often a step may draw prompts_per_step prompts, until as many groups have rewards that differ; it trains on
    the first of those alone (DAPO's dynamic sampling). 1: it trains on whatever it drew."""
    max_completion_tokens: int = Field(ge=1)
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Prompt and completion together; default: the longest prompt plus max_completion_tokens."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """At most 2, as vLLM has it."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_staleness: int = Field(default=0, ge=0)
    """How many steps the generating policy may lag behind the one being trained, steps."""
    engine: Literal["vllm", "scripted"] = "vllm"
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine's weights and activations."""
    chunk_prompts: int | None = Field(default=None, ge=1)
    """Prompts leased by an engine at a time; default: what divides a step over twice the engines."""
    max_sequences: int = Field(default=64, ge=1)
    """Completions generated at the same time by one engine."""
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights and KV cache; without a GPU, kv_cache_gib is used."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache of an engine on CPU, GiB."""

    @field_validator("group_size")
    @classmethod
    def _at_least_two(cls, value: int) -> int:
        if value < 2:
            raise ValueError(
                f"a group of {value} has no other completion to compare with: its advantage is 0 and nothing is "
                "learned. Use 2 or more (8 is usual)"
            )
        return value

    @field_validator("top_p", "top_k", "min_p")
    @classmethod
    def _full_distribution(cls, value: float, info: object) -> float:
        name = getattr(info, "field_name", "")
        if value != {"top_p": 1.0, "top_k": 0, "min_p": 0.0}[name]:
            raise ValueError(
                f"{name} = {value} cuts the distribution that is sampled from, and biases the probability ratio by the "
                "mass that was cut. For training leave it at its default"
            )
        return value
