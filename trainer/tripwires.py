"""What a run says of itself when it goes silently wrong: judged from its metrics, step by step.

Each wire is a rule over the steps so far, and a sentence. A wire that fired is silent until its rule stops to hold.
Nothing is stopped: what must end a run raises where it is found.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from towline.trainer.over_optimisation import OverOptimisation

Metrics = Mapping[str, float]

MISMATCH_K3 = {"float32": 1e-4, "bfloat16": 2e-2}
"""nats a token, by the engine's precision: healthy runs were measured at 1e-8 and below, and at 2e-4 to 3e-3."""
FIRST_CLIPPED = 0.01
"""Of the loss tokens before anything was learned from them: the ratio should be 1."""
EQUAL_STEPS = 10
ENTROPY_LEFT = 0.05
"""Of the first steps' entropy: below it the policy hardly samples any more."""
ENTROPY_FLOOR = 0.02
"""nats a token: nobody calls this a collapse, where the first steps had no more than that."""
FIRST_STEPS = 5
KL_DRIFT = 0.5
"""nats a token from the reference."""
DRIFT_STEPS = 3
"""k3 is a mean of exponentials: a few unlikely tokens make a step of it large."""
STILL_STEPS = 3
SCORING_STEPS = 5
SCORING_SHARE = 0.1
"""Of a step's time: who waits less loses nothing worth a word."""
SPLIT = {"float32": 1e-4, "bfloat16": 0.1}
"""nats a token, and of the loss, by the trainer's precision."""
STILL_LOGPROB = 1e-3
"""nats, where passes over the same numbers need not give the same bits."""


@dataclass(slots=True)
class Tripwires:
    """
    Args:
        engine_precision: "float32" or "bfloat16"; None for an engine without the policy's weights (a scripted one).
        kl_beta: weight of the KL in loss or reward; 0 where it is not measured.
        precision: the trainer's, "float32" or "bfloat16".
        is_exact: its passes over the same numbers give the same bits, as on CPU.
        trained_models, watching_models: names of the reward parts that are reward models, trained on and not.
    """

    engine_precision: str | None
    kl_beta: float
    precision: str
    is_exact: bool
    trained_models: tuple[str, ...] = ()
    watching_models: tuple[str, ...] = ()
    _scores: OverOptimisation = field(init=False)
    _history: list[Metrics] = field(default_factory=list[Metrics])
    _fired: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self._scores = OverOptimisation(self.trained_models, self.watching_models)

    def recall(self, rows: Iterable[Metrics]) -> None:
        """Steps of earlier attempts: what they said is not said again."""
        for step, row in enumerate(rows):
            self.judge(step, {name: value for name, value in row.items() if value is not None})

    def judge(self, step: int, metrics: Metrics) -> tuple[dict[str, float], list[str]]:
        """
        Returns:
            `tripwire/NAME`, 1 while the rule holds and 0 else, for the metrics; and what is new, in sentences.
        """
        self._history.append(metrics)
        self._scores.note(metrics)
        said = {
            "tripwire/mismatch": self._mismatch(metrics),
            "tripwire/first_clipped": self._first_clipped(metrics),
            "tripwire/equal_rewards": self._equal_rewards(),
            "tripwire/entropy": self._entropy(metrics),
            "tripwire/drift": self._drift(),
            "tripwire/kl_still": self._kl_still(),
            "tripwire/still": self._still(metrics),
            "tripwire/fixed_gradient": self._fixed_gradient(metrics),
            "tripwire/kl_effect": self._kl_effect(metrics),
            "tripwire/split": self._split(metrics),
            "tripwire/still_step": self._still_step(metrics),
            "tripwire/scoring": self._scoring(),
            "tripwire/narrowing_scores": self._scores.narrowing(),
            "tripwire/dissent": self._scores.dissent(),
        }
        holding = {name for name, sentence in said.items() if sentence is not None}
        new = [f"step {step}: {said[name]}" for name in said if name in holding - self._fired]
        self._fired = holding
        return {name: float(name in holding) for name in said}, new

    def _mismatch(self, now: Metrics) -> str | None:
        if self.engine_precision is None:
            return None
        bound = MISMATCH_K3[self.engine_precision]
        if not now.get("mismatch/k3", 0.0) > bound:
            return None
        return (
            f"engine and trainer disagree by {now['mismatch/k3']:.2g} nats a token (k3), expected at most {bound:g} in "
            f"{self.engine_precision}: what is trained on is not what was sampled. Look at mismatch/* and at the "
            "engines' precision, sampling settings and weights"
        )

    def _first_clipped(self, now: Metrics) -> str | None:
        is_stale = now.get("staleness/max", 0.0) > 0
        if self.engine_precision is None or is_stale or not now.get("loss/clipped_first", 0.0) > FIRST_CLIPPED:
            return None
        return (
            f"{100 * now['loss/clipped_first']:.1f} % of the tokens are clipped before the first inner step: their old "
            "log-probs are not those of the policy (temperature, truncation of the distribution, or the mismatch above)"
        )

    def _equal_rewards(self) -> str | None:
        recent = self._history[-EQUAL_STEPS:]
        # With dynamic sampling a later wave may have what the first, which reward/* is of, has not.
        num_useful = [row.get("rollouts/useful", row.get("reward/useful_groups", 1.0)) for row in recent]
        if len(recent) < EQUAL_STEPS or any(num_useful):
            return None
        return (
            f"for {EQUAL_STEPS} steps every group has had equal rewards ({recent[-1].get('reward/mean', 0.0):.3g} on "
            "average): nothing is learned. The task is too easy or too hard for the policy, or the reward is constant: "
            "towline samples"
        )

    def _entropy(self, now: Metrics) -> str | None:
        # One step's NaN must not blind the wire for good.
        first = [row["loss/entropy"] for row in self._history[:FIRST_STEPS] if _is_finite(row, "loss/entropy")]
        if len(self._history) <= FIRST_STEPS or not first:
            return None
        usual = sum(first) / len(first)
        if usual <= ENTROPY_FLOOR or now.get("loss/entropy", usual) >= ENTROPY_LEFT * usual:
            return None
        return (
            f"the policy's entropy has fallen from {usual:.3g} to {now['loss/entropy']:.3g} nats a token: it samples "
            "the same completions again and again. clip_high = 0.28 or a larger kl_beta keep it up; go on from an "
            "earlier checkpoint"
        )

    def _drift(self) -> str | None:
        recent = [row.get("loss/kl", 0.0) for row in self._history[-DRIFT_STEPS:]]
        if self.kl_beta == 0 or len(recent) < DRIFT_STEPS or not all(kl > KL_DRIFT for kl in recent):
            return None
        return (
            f"for {DRIFT_STEPS} steps the policy has been {min(recent):.2g} nats a token or more away from its "
            f"reference (kl_beta = {self.kl_beta:g}): it may have forgotten what is not rewarded. Raise "
            "kl_beta, or lower the learning rate"
        )

    def _kl_still(self) -> str | None:
        """A reference that follows the policy gives a KL of exactly 0, whatever is learned."""
        recent = self._history[1:][-STILL_STEPS:]
        moved = [row.get("loss/gradient_norm", 0.0) > 0 and row.get("loss/learning_rate", 0.0) > 0 for row in recent]
        if self.kl_beta == 0 or len(recent) < STILL_STEPS or not all(moved):
            return None
        if any(row.get("loss/kl", 1.0) != 0 for row in recent):
            return None
        return (
            f"the KL to the reference has been exactly 0 for {STILL_STEPS} steps in which the weights moved: the "
            "reference is the policy itself, and its penalty has no effect"
        )

    def _still(self, now: Metrics) -> str | None:
        learns = now.get("loss/gradient_norm", 0.0) > 0 and now.get("loss/learning_rate", 0.0) > 0
        if not learns or now.get("weights/moved", 1.0) != 0:
            return None
        return (
            "the weights are the same after the step, although gradient norm and learning rate are not 0: the "
            "optimiser does not reach them"
        )

    def _fixed_gradient(self, now: Metrics) -> str | None:
        norm, graphs = now.get("check/fixed_gradient", 0.0), now.get("check/fixed_graphs", 0.0)
        if not (norm > 0 or graphs > 0):
            return None
        return (
            f"the loss has a gradient (norm {norm:.2g}) in what must be constant in it, or {graphs:g} of these tensors "
            "carry one on: log-probs of rollout, old policy or reference, corrections, advantages or weights. "
            "They must be detached"
        )

    def _kl_effect(self, now: Metrics) -> str | None:
        if now.get("check/kl_effect", 1.0) != 0:
            return None
        return (
            f"the KL to the reference is not 0, and its term (kl_beta = {self.kl_beta:g}) changes neither gradient nor "
            "advantages: nothing holds the policy near its reference"
        )

    def _split(self, now: Metrics) -> str | None:
        logprob, loss = now.get("check/split_logprob", 0.0), now.get("check/split_loss", 0.0)
        bound = SPLIT[self.precision]
        if not (logprob > bound or loss > bound):
            return None
        return (
            f"sequences of the first micro-batch have other log-probs alone, by {logprob:.2g} nats a token, or another "
            f"loss, by {loss:.2g} of it; expected at most {bound:g} in {self.precision}. They see one another, have "
            'wrong positions, or the loss depends on how they are split: try packing = "buckets"'
        )

    def _still_step(self, now: Metrics) -> str | None:
        change = now.get("check/still_logprob", 0.0)
        if not change > (0.0 if self.is_exact else STILL_LOGPROB):
            return None
        return (
            f"an optimiser step with learning rate 0 changed log-probs by up to {change:.2g} nats: dropout is on, a "
            "buffer changes with each pass, or the optimiser changes weights by more than its learning rate"
        )

    def _scoring(self) -> str | None:
        recent = self._history[-SCORING_STEPS:]
        if len(recent) < SCORING_STEPS or not all(map(_waits_for_scores, recent)):
            return None
        waited, took = (
            sum(row.get(name, 0.0) for row in recent) / len(recent) for name in ("seconds/wait_scores", "seconds/step")
        )
        return (
            f"for {SCORING_STEPS} steps the trainer has waited longer for scores than for generation "
            f"({waited:.1f} s of {took:.1f} s a step): scoring is the bottleneck.{_slowest_reward(recent[-1])} More "
            "workers: local.scorers, cpus-per-task of the profile's [scorer], nodes.scorer"
        )


def _waits_for_scores(row: Metrics) -> bool:
    waited, scores = row.get("seconds/wait", 0.0), row.get("seconds/wait_scores", 0.0)
    return scores > waited - scores and scores > SCORING_SHARE * row.get("seconds/step", 0.0)


def _slowest_reward(row: Metrics) -> str:
    prefix = "scoring/p99_s/"
    times = {name.removeprefix(prefix): seconds for name, seconds in row.items() if name.startswith(prefix)}
    if not times:
        return ""
    slowest = max(times, key=lambda part: times[part])
    return f" The slowest reward is {slowest}, p99 {times[slowest]:.2g} s."


def _is_finite(row: Metrics, name: str) -> bool:
    return name in row and math.isfinite(row[name])
