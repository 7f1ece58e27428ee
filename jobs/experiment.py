"""The whole experiment: composed of the rooms' own configs, one class for each objective."""

import json
from typing import Literal, Self, cast

from pydantic import Field, model_validator

from towline.jobs.experiment_parts import (
    EvaluationConfig,
    ExampleEvaluationConfig,
    LocalConfig,
    NodesConfig,
    RunConfig,
    ScoringConfig,
    TrainerLocalConfig,
    TrainerNodesConfig,
)
from towline.rollout.config import RolloutConfig
from towline.rollout.rewards.compatible import refuse_impossible, refuse_slow_tests
from towline.rollout.rewards.config import RewardConfig
from towline.storage.config import StrictModel
from towline.storage.data_config import DataConfig
from towline.storage.example_config import DemonstrationData, PreferenceData, StepData
from towline.trainer.config import DpoPolicyConfig, ModelConfig, PolicyConfig, TrainerConfig
from towline.trainer.preference_config import IteratedDpoConfig
from towline.trainer.supervised_config import DpoConfig, RewardModelConfig, SftConfig, StepRewardConfig, SweepConfig


class _Experiment(StrictModel):
    """What every objective has."""

    seed: int = Field(default=0, ge=0)
    steps: int = Field(ge=1)
    """Outer steps."""
    deterministic: bool = False
    """The same bits in every run, killed and resumed or not: float32 on CPU, one thread a process, no staleness."""
    run: RunConfig = RunConfig()


class _RolloutExperiment(_Experiment):
    """Engines generate, scorers rank, the trainer learns from what they make."""

    policy: PolicyConfig
    data: DataConfig
    rollout: RolloutConfig
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    scoring: ScoringConfig = ScoringConfig()
    evaluation: EvaluationConfig | None = None
    local: LocalConfig = LocalConfig()
    nodes: NodesConfig | None = None

    @model_validator(mode="after")
    def _rewards_go_together(self) -> Self:
        refuse_impossible(self.rewards)
        refuse_slow_tests(self.rewards, self.scoring.limit_s)
        return self

    @model_validator(mode="after")
    def _token_penalties_have_a_use(self) -> Self:
        limit = self.rollout.max_completion_tokens
        for reward in self.rewards:
            if (reward.cache_tokens or 0) > limit:
                raise ValueError(
                    f"rewards: cache_tokens ({reward.cache_tokens}) of {reward.part_name} must be at most "
                    f"rollout.max_completion_tokens ({limit}): the penalty begins so many tokens before it"
                )
            if (reward.target_tokens or 0) >= limit:
                raise ValueError(
                    f"rewards: target_tokens ({reward.target_tokens}) of {reward.part_name} must be below "
                    f"rollout.max_completion_tokens ({limit}): no completion is longer"
                )
        return self

    @model_validator(mode="after")
    def _trainer_and_engines_go_together(self) -> Self:
        _refuse_impossible_circle(cast("RolloutExperiment", self))
        return self

    @property
    def num_engines(self) -> int:
        return self.local.engines

    @property
    def num_scorers(self) -> int:
        """Scorer processes, each with `local.scorers` workers."""
        return self.nodes.num_scorers if self.nodes else 1

    @property
    def chunk_prompts(self) -> int:
        """Prompts of a chunk: an engine should find more than one chunk a step, so that none waits idle."""
        if self.rollout.chunk_prompts is not None:
            return self.rollout.chunk_prompts
        return max(1, -(-self.rollout.prompts_per_step // (2 * self.local.engines)))


class GrpoExperiment(_RolloutExperiment):
    """Reinforcement learning from the rewards of groups of completions."""

    objective: Literal["grpo"]
    trainer: TrainerConfig

    @model_validator(mode="after")
    def _truncated_completions_are_masked_or_punished(self) -> "GrpoExperiment":
        if self.trainer.masks_truncated and any(reward.is_overlong and reward.weight for reward in self.rewards):
            raise ValueError(
                "trainer.masks_truncated leaves out the very completions that the reward overlong punishes most: they "
                "would only make the others of their group look better. Set masks_truncated = false (DAPO's recipe), "
                "or overlong's weight to 0, which records it"
            )
        return self

    @model_validator(mode="after")
    def _waves_leave_the_baseline_alone(self) -> "GrpoExperiment":
        if self.rollout.max_waves > 1 and self.trainer.baseline == "batch":
            raise ValueError(
                f"rollout.max_waves = {self.rollout.max_waves} leaves out groups of equal rewards, and "
                'trainer.baseline = "batch" compares with the mean of the step: those groups teach something there, '
                "and a mean without the easiest and the hardest prompts is not that of the prompts that were drawn. "
                'Set baseline = "group" or max_waves = 1'
            )
        return self


class IteratedDpoExperiment(_RolloutExperiment):
    """DPO in rounds, on pairs of the policy's own completions that the rewards rank."""

    objective: Literal["dpo"]
    trainer: IteratedDpoConfig

    @model_validator(mode="after")
    def _groups_hold_the_pairs(self) -> "IteratedDpoExperiment":
        wanted, size = self.trainer.pairs_per_prompt, self.rollout.group_size
        if 2 * wanted > size:
            raise ValueError(
                f"trainer.pairs_per_prompt ({wanted}) must be at most {size // 2}: a group of rollout.group_size = "
                f"{size} completions holds no more pairs, of which each completion is in one at most"
            )
        return self

    @model_validator(mode="after")
    def _reference_has_a_home(self) -> "IteratedDpoExperiment":
        if self.policy.reference != "on_device" and not self.trainer.has_reference_model:
            raise ValueError(
                f'policy.reference = "{self.policy.reference}" says where a second model lives, and trainer.reference '
                '= "round" has none: it is the policy as the round began. Leave one of them out'
            )
        return self


class _SupervisedExperiment(_Experiment):
    """One trainer group, and nothing else: no engine and no scorer."""

    local: TrainerLocalConfig = TrainerLocalConfig()
    nodes: TrainerNodesConfig | None = None

    @model_validator(mode="after")
    def _steps_can_be_taken(self) -> Self:
        _refuse_impossible_steps(cast("SupervisedExperiment", self))
        return self

    @property
    def num_engines(self) -> int:
        """For the same code to serve every objective."""
        return 0

    @property
    def num_scorers(self) -> int:
        return 0


class SftExperiment(_SupervisedExperiment):
    """Supervised fine-tuning on demonstrations."""

    objective: Literal["sft"]
    policy: ModelConfig
    data: DemonstrationData
    trainer: SftConfig
    evaluation: ExampleEvaluationConfig[DemonstrationData] | None = None


class DpoExperiment(_SupervisedExperiment):
    """Direct preference optimisation on pairs."""

    objective: Literal["dpo"]
    policy: DpoPolicyConfig
    data: PreferenceData
    trainer: DpoConfig
    evaluation: ExampleEvaluationConfig[PreferenceData] | None = None
    sweep: SweepConfig | None = None

    @model_validator(mode="after")
    def _sweep_has_pairs_to_compare(self) -> "DpoExperiment":
        if self.sweep is not None and self.evaluation is None:
            raise ValueError("sweep compares held-out win rates: add [evaluation.data], pairs that are not trained on")
        return self


class RewardModelExperiment(_SupervisedExperiment):
    """A reward model from pairs."""

    objective: Literal["reward_model"]
    policy: ModelConfig
    data: PreferenceData
    trainer: RewardModelConfig
    evaluation: ExampleEvaluationConfig[PreferenceData] | None = None
    watcher: bool = False
    """Train two, one after the other, each on the pairs of one half of the prompts: the second can watch the first for
    over-optimisation in a later run with rollouts."""

    @model_validator(mode="after")
    def _watcher_has_its_own_half_and_pairs_to_compare(self) -> "RewardModelExperiment":
        if self.watcher and self.data.half is not None:
            raise ValueError("watcher trains a model on each half of the pairs: leave data.half out, or watcher = true")
        if self.watcher and self.evaluation is None:
            raise ValueError(
                "watcher compares two models on held-out pairs: add [evaluation.data], pairs that neither is trained on"
            )
        return self

    @model_validator(mode="after")
    def _weights_are_trained(self) -> "RewardModelExperiment":
        _refuse_adapters(self.trainer)
        return self


class StepRewardExperiment(_SupervisedExperiment):
    """A reward model of steps, from steps that were judged."""

    objective: Literal["reward_model"]
    policy: ModelConfig
    data: StepData
    trainer: StepRewardConfig
    evaluation: ExampleEvaluationConfig[StepData] | None = None

    @model_validator(mode="after")
    def _weights_are_trained(self) -> "StepRewardExperiment":
        _refuse_adapters(self.trainer)
        return self


RolloutExperiment = GrpoExperiment | IteratedDpoExperiment
"""What generates."""
SupervisedExperiment = SftExperiment | DpoExperiment | RewardModelExperiment | StepRewardExperiment
ExperimentConfig = SupervisedExperiment | RolloutExperiment


def _refuse_impossible_circle(experiment: RolloutExperiment) -> None:
    rollout, trainer, policy = experiment.rollout, experiment.trainer, experiment.policy
    if trainer.minibatches > rollout.prompts_per_step:
        raise ValueError(
            f"trainer.minibatches ({trainer.minibatches}) must not exceed rollout.prompts_per_step "
            f"({rollout.prompts_per_step}): every optimiser step needs at least one group"
        )
    if experiment.deterministic:
        _require(
            {
                "rollout.max_staleness": (rollout.max_staleness, 0),
                "rollout.precision": (rollout.precision, "float32"),
                "trainer.precision": (trainer.precision, "float32"),
                "local.trainer_threads": (experiment.local.trainer_threads, 1),
                "local.engine_threads": (experiment.local.engine_threads, 1),
            }
        )
    if not trainer.has_reference_model or policy.reference == "on_device":
        return
    if policy.reference == "int8" and trainer.zero_stage == 3:
        raise ValueError(
            'policy.reference = "int8" does not go with trainer.zero_stage = 3: ZeRO-3 cuts weights into shards '
            "and transposes them in every linear layer, which torchao's int8 weights cannot do; set "
            'policy.reference = "offloaded", which is sharded too, or trainer.zero_stage <= 2'
        )
    if trainer.lora is not None:
        raise ValueError(
            f'policy.reference = "{policy.reference}" does not go with [trainer.lora]: the reference is the '
            "policy without its adapters, and takes no memory of its own. Leave policy.reference out"
        )


def _refuse_impossible_steps(experiment: SupervisedExperiment) -> None:
    trainer = experiment.trainer
    if trainer.schedule != "constant" and trainer.warmup_steps >= experiment.steps:
        raise ValueError(
            f"trainer.warmup_steps ({trainer.warmup_steps}) must be below steps ({experiment.steps}): schedule = "
            f'"{trainer.schedule}" falls to 0 over those that are left'
        )
    if experiment.deterministic:
        _require(
            {
                "trainer.precision": (trainer.precision, "float32"),
                "local.trainer_threads": (experiment.local.trainer_threads, 1),
            }
        )


def _refuse_adapters(trainer: RewardModelConfig | StepRewardConfig) -> None:
    if trainer.lora is not None:
        raise ValueError(
            "[trainer.lora] does not go with a reward model yet: its head is new and would be frozen. Leave it out"
        )


def _require(wanted: dict[str, tuple[object, object]]) -> None:
    """
    Args:
        wanted: by field, what it is and what it must be.
    """
    for name, (found, needed) in wanted.items():
        if found != needed:
            raise ValueError(f"deterministic = true needs {name} = {json.dumps(needed)}, found {json.dumps(found)}")
