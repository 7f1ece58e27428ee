"""Scored groups for tests of the trainer, as the ledger would give them."""

import numpy as np

from towline.storage.records import Completion, FinishReason, Prompt, RolloutGroup, Score, ScoreStatus
from towline.trainer.rollout_batch import ScoredGroup

NAN = float("nan")


def completion(token_ids, logprobs=None, *, finish_reason=FinishReason.STOP, version=0):
    token_ids = np.asarray(token_ids, dtype=np.int32)
    return Completion(
        token_ids=token_ids,
        logprobs=np.full(len(token_ids), -1.0, np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        versions=np.full(len(token_ids), version, np.uint32),
        finish_reason=finish_reason,
        seed=0,
        text="",
    )


def score(total, *, detail="", **parts):
    parts = parts or {"exact": total}
    return Score(
        parts=parts,
        part_status={name: ScoreStatus.FAILED if np.isnan(value) else ScoreStatus.OK for name, value in parts.items()},
        part_seconds=dict.fromkeys(parts, 0.1 / len(parts)),
        total=total,
        status=ScoreStatus.FAILED if np.isnan(total) else ScoreStatus.OK,
        seconds=0.1,
        detail=detail,
    )


def scored_group(prompt_token_ids, completions, rewards, *, row=0):
    """Rewards are numbers, NaN for a grader that failed, or whole scores."""
    scores = [
        reward if isinstance(reward, Score) else score(reward, detail="no answer" if np.isnan(reward) else "")
        for reward in rewards
    ]
    return ScoredGroup(
        group=RolloutGroup(
            prompt=Prompt(row=row, text="", answer=""),
            prompt_token_ids=np.asarray(prompt_token_ids, dtype=np.int32),
            completions=tuple(completions),
        ),
        scores=tuple(scores),
    )
