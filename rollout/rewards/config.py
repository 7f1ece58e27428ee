"""One `[[rewards]]` table of an experiment file."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from towline.rollout.rewards.total import Term
from towline.rollout.sandbox.limits import Limits
from towline.storage.config import ConfigPath, StrictModel, resolve_path

OVERLONG, LENGTH, CODE_TESTS, REWARD_MODEL = "overlong", "length", "code_tests", "reward_model"
_CODE_OPTIONS = ("limit_s", "memory_mib", "partial_credit", "allow_unsandboxed")
TOKEN_COUNTERS = (OVERLONG, LENGTH)
"""The built-in parts that look at a completion's number of tokens, and not at its text."""


def _resolve_file(value: object, info: ValidationInfo) -> object:
    """Make the path of a user's own reward absolute; a built-in name stays as it is."""
    if not isinstance(value, str):
        return value
    file, colon, function = value.rpartition(":")
    return f"{resolve_path(file, info)}:{function}" if colon else value


_Finite = Annotated[float, Field(allow_inf_nan=False)]


class Convergence(StrictModel):
    """When the task reward counts as converged: two windows of steps in a row have about the same mean, high enough."""

    min_reward: _Finite
    """Least mean total reward of the later window; without it, a policy that has learnt nothing yet would pass."""
    window: int = Field(default=20, ge=1)
    """Steps of each window."""
    tolerance: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    """The two means differ by less than this."""


class RewardConfig(StrictModel):
    use: Annotated[str, BeforeValidator(_resolve_file), Field(min_length=1)]
    """A built-in reward (`math_answer`, `format`, …), or `path/to/file.py:function` relative to the experiment."""
    weight: _Finite
    """Factor of this part in the total; 0 records the part without training on it."""
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = None
    """What the part is called in the ledger and the metrics; by default taken from `use`."""
    when: dict[str, _Finite] = Field(default_factory=dict[str, float])
    """Conditions: name of another part → the least value of it at which this one counts. Elsewhere this part is
    recorded and adds 0."""
    floor: _Finite | None = None
    """Of your own function or of a reward model: a value below it counts as it; what is recorded is the value as
    given."""
    model: ConfigPath | None = None
    """Only for use = "reward_model": a Hugging Face folder of a sequence classifier with one score, and with the
    policy's tokenizer; such as checkpoints/step-…/hf of a run with objective = "reward_model"."""
    cache_tokens: Annotated[int | None, Field(ge=1)] = None
    """Only for use = "overlong", DAPO's soft penalty: it falls from 0 to -1 over the last so many tokens before
    rollout.max_completion_tokens."""
    target_tokens: Annotated[int | None, Field(ge=1)] = None
    """Only for use = "length": up to so many tokens it is 0, from there it falls to -1 at
    rollout.max_completion_tokens."""
    converged: Convergence | None = None
    """Only for use = "length": it counts once the rest of the reward has converged."""
    limit_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Only for use = "code_tests": wall time of all tests of a program together, s; by default 4. It lies below
    scoring.limit_s: a program that takes longer is wrong, a reward that takes longer has no score."""
    memory_mib: Annotated[int | None, Field(ge=16)] = None
    """Only for use = "code_tests": address space of a program, MiB; by default 1024."""
    partial_credit: bool | None = None
    """Only for use = "code_tests": the share of tests passed, in place of all or nothing."""
    allow_unsandboxed: bool | None = None
    """Only for use = "code_tests": run programs also where nothing shuts them in. They can then do what you can."""

    @model_validator(mode="after")
    def _fields_belong_to_their_parts(self) -> "RewardConfig":
        owners = {"model": REWARD_MODEL, "cache_tokens": OVERLONG, "target_tokens": LENGTH, "converged": LENGTH}
        owners |= dict.fromkeys(_CODE_OPTIONS, CODE_TESTS)
        for name, owner in owners.items():
            if getattr(self, name) is not None and self.use != owner:
                raise ValueError(f'{name} is of use = "{owner}" alone; {self.use} has no use for it. Remove it')
        if self.is_reward_model and self.model is None:
            raise ValueError(
                f'use = "{REWARD_MODEL}" needs model: the folder of the reward model, for example model = '
                '"../runs/NAME/checkpoints/step-000040/hf"'
            )
        if self.is_overlong and self.cache_tokens is None:
            raise ValueError(
                f'use = "{OVERLONG}" needs cache_tokens: over how many tokens before rollout.max_completion_tokens the '
                "penalty grows (DAPO: a fifth of it)"
            )
        if self.is_length and self.target_tokens is None:
            raise ValueError(f'use = "{LENGTH}" needs target_tokens: how long a completion may be at no cost')
        if self.is_length and self.converged is None:
            raise ValueError(
                f'use = "{LENGTH}" needs converged: what the mean reward must have reached before length counts, for '
                "example converged = { min_reward = 0.9 }"
            )
        if self.is_length and not self.when:
            raise ValueError(
                f'use = "{LENGTH}" needs when: wrong answers are not to be short, for example when = {{ math_answer = '
                "1.0 }"
            )
        return self

    @model_validator(mode="after")
    def _has_an_effect(self) -> "RewardConfig":
        if self.counts_tokens and self.weight < 0:
            raise ValueError(
                f'use = "{self.use}" is 0 or negative already: weight = {self.weight:g} would pay for length. Set a '
                "weight of 0 or more (DAPO: 1)"
            )
        if self.floor is not None and not self.is_unbounded:
            bounds = "-1 to 0" if self.counts_tokens else "0 to 1"
            raise ValueError(
                f"floor is for functions of your own and reward models; {self.use} is from {bounds} already. Remove it"
            )
        return self

    @property
    def is_own(self) -> bool:
        """Whether it is a function in a user's file."""
        return ":" in self.use

    @property
    def is_reward_model(self) -> bool:
        return self.use == REWARD_MODEL

    @property
    def is_unbounded(self) -> bool:
        """Whether any number can be its value."""
        return self.is_own or self.is_reward_model

    @property
    def is_overlong(self) -> bool:
        return self.use == OVERLONG

    @property
    def is_length(self) -> bool:
        return self.use == LENGTH

    @property
    def options(self) -> dict[str, Any]:
        """What is set of the fields that a built-in part takes."""
        return {name: value for name in _CODE_OPTIONS if (value := getattr(self, name)) is not None}

    @property
    def tests_limit_s(self) -> float:
        """Longest time that a program of this part may take, s; 0 if it runs none."""
        if self.use != CODE_TESTS:
            return 0.0
        return Limits().seconds if self.limit_s is None else self.limit_s

    @property
    def counts_tokens(self) -> bool:
        return self.use in TOKEN_COUNTERS

    @property
    def judges_text(self) -> bool:
        """Whether it is a function of completion and gold answer, which workers are asked."""
        return not (self.counts_tokens or self.is_reward_model)

    @property
    def part_name(self) -> str:
        """`name`, or the built-in's name, or `file.function`: never a path, since it becomes a column name."""
        if self.name is not None:
            return self.name
        file, colon, function = self.use.rpartition(":")
        return f"{Path(file).stem}.{function}" if colon else self.use

    @property
    def term(self) -> Term:
        return Term(name=self.part_name, weight=self.weight, floor=self.floor, when=self.when)
