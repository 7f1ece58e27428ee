"""Metric names with their units, and the two sinks: JSON lines (one object a step) and TensorBoard."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from towline.storage.publish import replace_whole
from towline.storage.run_directory import read_jsonl

METRICS: dict[str, str] = {
    "reward/mean": "mean total reward of the scored completions, with the part `length` once that counts",
    "reward/length_on": "1 from the step on at which the part `length` counts",
    "reward/std": "standard deviation of the total reward over the step",
    "reward/failed": "fraction of completions whose grading failed or ran out of time",
    "reward/useful_groups": "fraction of groups whose rewards differ",
    "reward/kl_penalty": "mean of what KL(old, reference) took off a completion's reward, where kl_place = reward",
    "reward/part/*": "mean of one reward part, unweighted",
    "reward/spread/*": "standard deviation of that part over the step's completions",
    "completion/length": "mean completion length, tokens",
    "completion/length_max": "longest completion, tokens",
    "completion/truncated": "fraction cut at max_completion_tokens",
    "loss/policy": "the loss that was minimised, mean over the inner steps",
    "loss/nll": "negative log-likelihood of the trained tokens, nats a token; with its label smoothing",
    "loss/preference": "the loss of pairs that was minimised, mean over the pairs of the step",
    "loss/step_labels": "cross entropy of the judged steps, nats a step",
    "steps/accuracy": "fraction of the judged steps whose score has the sign of their label",
    "preference/chosen_reward": "mean reward of the chosen completions: beta x log-ratio (DPO), or score",
    "preference/rejected_reward": "the same of the rejected ones",
    "preference/margin": "mean difference of the two",
    "preference/accuracy": "fraction of pairs whose chosen completion has the larger reward; ties count half",
    "preference/pairs": "pairs that a round's rewards made, of which it trained on each once an inner epoch",
    "preference/reward_gap": "mean difference of the rewards of their two completions",
    "preference/chosen_logprob": "mean log-prob of a chosen completion, nats",
    "loss/kl": "k3 estimate of KL(policy, reference), nats per token",
    "loss/clipped": "fraction of loss tokens whose ratio was clipped",
    "loss/clipped_first": "the same at the first inner step (0 when old log-probs are right)",
    "loss/entropy": "entropy of the policy, nats per token",
    "loss/gradient_norm": "before clipping, L2, mean over the inner steps",
    "loss/learning_rate": "of the last inner step",
    "mismatch/k3": "k3 between engine and trainer before the first inner step, nats per token",
    "mismatch/max_abs_logprob": "largest difference of one token's log-prob between engine and trainer, nats",
    "mismatch/weight": "mean weight of a token for having been sampled by the engine, where old = recomputed",
    "mismatch/weight_bounded": "fraction of tokens whose weight was truncated or set to 0",
    "probe/new": "largest difference of the probe text's log-probs: engine and trainer, new weights, nats",
    "probe/old": "the same against the trainer's previous weights, nats",
    "probe/verdict": "1 new weights are in use, 0 step too small to tell apart",
    "tokens/loss": "completion tokens trained on; of a reward model of steps the judged steps",
    "tokens/trained": "prompt and completion tokens that went through the trainer, per inner epoch",
    "tokens/fill": "share of the packed token budget that is not padding",
    "tokens/padding_saved": "share of one padded batch of the step that is not computed: padding and shared prompts",
    "tokens/imbalance": "work of the busiest rank over the mean rank's, less 1, as estimated in FLOPs",
    "speed/tokens_per_s": "tokens/trained divided by seconds/step",
    "scoring/p50_s/*": "median wall time of one reward for one completion, s",
    "scoring/p99_s/*": "its 99th percentile, s",
    "scoring/max_s/*": "its longest, s",
    "weights/moved": "change of the weights' mean square over the step",
    "check/fixed_gradient": "L2 norm of the loss's gradient in what must be constant in it, of the first micro-batch",
    "check/fixed_graphs": "tensors among these that could carry a gradient on",
    "check/kl_effect": "the KL's part of the loss's slopes in the log-probs (kl_place = loss), or of the advantages",
    "check/split_logprob": "mean difference of a token's log-prob alone and in the first micro-batch, nats",
    "check/split_loss": "the same of the loss, relative to weight x (1 + |advantage|)",
    "check/still_logprob": "largest change of a log-prob by the start's step with learning rate 0, nats",
    "tripwire/mismatch": "1 while engine and trainer disagree about the tokens' log-probs beyond their bound",
    "tripwire/first_clipped": "1 while tokens are clipped before anything was learned from them",
    "tripwire/equal_rewards": "1 while every group has had equal rewards for ten steps",
    "tripwire/entropy": "1 while the entropy is below a twentieth of the first steps'",
    "tripwire/drift": "1 while the policy has been more than 0.5 nats a token from its reference for three steps",
    "tripwire/kl_still": "1 while the KL is exactly 0 although the weights move",
    "tripwire/still": "1 while a step leaves the weights as they were",
    "tripwire/fixed_gradient": "1 while the loss has a gradient in what must be constant in it",
    "tripwire/kl_effect": "1 while a KL that is not 0 has no effect on gradient or advantages",
    "tripwire/split": "1 where the first micro-batch's log-probs or loss depend on how it is split",
    "tripwire/scoring": "1 while the trainer has waited longer for scores than for anything else, for five steps",
    "tripwire/narrowing_scores": "1 while a trained reward model's scores are less spread than they were, and higher",
    "tripwire/dissent": "1 while a trained reward model's scores have risen and a watching one's have not",
    "tripwire/still_step": "1 where a step with learning rate 0 changed log-probs",
    "rollouts/waves": "waves drawn for the step, where max_waves > 1; reward/* and completion/* are of the first",
    "rollouts/useful": "groups of all its waves whose rewards differ",
    "rollouts/surplus": "those of them that were not trained on, because the batch was full",
    "rollouts/lost": "fraction of prompts whose chunk was given up after it was lost three times",
    "rollouts/off_policy": "fraction of shards that the policy of another branch wrote, after a resume or roll-back",
    "seconds/wait": "trainer waiting for generation and scoring, s",
    "seconds/wait_scores": "part of it in which everything was generated and not yet scored, s",
    "seconds/generate": "from the first request of a wave to the last, of the slowest engine; sum of the waves, s",
    "seconds/score": "wall time of scoring, s",
    "seconds/train": "inner steps, s",
    "seconds/sync": "publication of the weights and probe, s",
    "seconds/probe": "the slowest engine's answer to the probe, part of seconds/sync, s",
    "seconds/step": "from one step's end to the next, s",
    "memory/trainer_gib": "largest resident memory of a trainer rank so far, GiB",
    "version": "policy version after the step",
    "staleness/max": "largest step minus version over the tokens trained on, steps",
}


class MetricsWriter:
    """Append one row a step. A value that is not finite is written as null in JSON and left out of TensorBoard."""

    def __init__(self, jsonl: Path, tensorboard: Path, *, first_step: int = 0) -> None:
        """
        Args:
            first_step: TensorBoard hides what an earlier attempt wrote of this step and later ones.
        """
        # Slow to import, wanted only by the process that writes.
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingTypeStubs]

        self._jsonl = jsonl
        self._tensorboard: Any = SummaryWriter(str(tensorboard), flush_secs=30, purge_step=first_step or None)

    def write(self, step: int, values: dict[str, float]) -> None:
        check_names(values)
        append_jsonl(self._jsonl, {"step": step, **values})
        for name, value in values.items():
            if math.isfinite(value):
                self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        self._tensorboard.close()


def check_names(values: dict[str, float]) -> None:
    unknown = [name for name in values if name not in METRICS and f"{name.rsplit('/', 1)[0]}/*" not in METRICS]
    assert not unknown, f"metrics without an entry in METRICS: {unknown}"


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one row. A file has one writer at a time; a reader may find its last line unfinished.

    A line that a killed writer left unfinished is cut off first: the two would make a line that nobody can read.
    """
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    line = json.dumps(finite).encode() + b"\n"
    with path.open("ab+") as file:
        if not _ends_whole(file):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)


def cut_rows(path: Path, keeps: Callable[[dict[str, Any]], bool], superseded: Path) -> int:
    """Leave the rows that `keeps` wants; the others, of steps that will be trained again, go to the end of another
    file. Returns how many those are."""
    rows = read_jsonl(path)
    cut = [row for row in rows if not keeps(row)]
    if not cut:
        return 0
    for row in cut:
        append_jsonl(superseded, {"file": path.name, **row})
    kept = [row for row in rows if keeps(row)]
    with replace_whole(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return len(cut)


def _ends_whole(file: BinaryIO) -> bool:
    if file.seek(0, os.SEEK_END) == 0:
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
