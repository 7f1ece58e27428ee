"""Scores of steps: read where each ends, however solutions are laid out; and an optimiser step on their labels."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from single_rank import single_rank
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.packing_rows import pad_rows
from towline.trainer.step_reward import num_judged, step_positions
from towline.trainer.token_examples import NO_LABEL, TokenSteps

MODEL = Path(__file__).parents[2] / "models" / "tiny-sort"


def solution(prompt, steps, labels):
    """A prompt and steps of tokens."""
    tokens = np.array([*prompt, *(token for step in steps for token in step)])
    ends = len(prompt) + np.cumsum([len(step) for step in steps]) - 1
    return TokenSteps(
        row=0,
        tokens=TokenSequence(token_ids=tokens, num_prompt_tokens=len(prompt)),
        step_ends=ends,
        labels=np.array(labels),
    )


SOLUTIONS = [
    solution([2, 3], [[4, 5], [6]], [1, 0]),
    solution([7], [[8], [9, 10, 11], [12]], [NO_LABEL, 1, 0]),
    solution([13, 14, 15], [[16]], [1]),
]


@pytest.mark.parametrize("lay_out", [pack, pad_rows], ids=["packed", "padded"])
def test_a_step_is_read_at_its_last_token(lay_out):
    batch = lay_out([one.tokens for one in SOLUTIONS])
    found = batch.token_ids[step_positions(batch, SOLUTIONS)]
    assert found.tolist() == [5, 6, 8, 11, 12, 16]


def test_a_micro_batch_of_nothing_has_no_steps():
    assert step_positions(pack([]), []).tolist() == []


def test_steps_without_a_label_are_not_counted():
    assert [num_judged(one) for one in SOLUTIONS] == [2, 2, 1]


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh")
def test_a_step_on_labels_has_the_loss_and_the_gradient_of_plain_torch(monkeypatch):
    from towline.trainer.deepspeed_engine import DeepSpeedEngine
    from towline.trainer.sequence_head import load_reward_model
    from towline.trainer.step_reward import StepReward, step_scores
    from towline.trainer.supervised_config import StepRewardConfig

    monkeypatch.setitem(os.environ, "LOCAL_RANK", "0")
    plain = load_reward_model(MODEL, precision="float32", head_seed=1, packing="buckets").model
    scores, labels = [], []
    for one in SOLUTIONS:
        hidden = plain.base_model(input_ids=torch.from_numpy(one.tokens.token_ids)[None], use_cache=False)
        scores.append(plain.score(hidden.last_hidden_state)[0, one.step_ends, 0])
        labels.append(torch.from_numpy(one.labels))
    score_S, label_S = torch.cat(scores), torch.cat(labels)
    is_judged = label_S != NO_LABEL
    loss = binary_cross_entropy_with_logits(score_S[is_judged], label_S[is_judged].float())
    loss.backward()
    norm = torch.stack([one.grad.norm() for one in plain.parameters() if one.grad is not None]).norm().item()
    right = ((score_S > 0) == (label_S == 1))[is_judged].float().mean().item()
    # One group for both: DeepSpeed remembers the first.
    with single_rank():
        for max_tokens in (16, 64):
            config = StepRewardConfig(
                head="process", learning_rate=1e-3, batch_size=3, precision="float32", zero_stage=0,
                max_grad_norm=1e9, max_tokens_per_microbatch=max_tokens,
            )  # fmt: skip
            engine = DeepSpeedEngine(load_reward_model(MODEL, precision="float32", head_seed=1), config)
            found = step_scores(engine, config, SOLUTIONS, lambda: None)
            np.testing.assert_allclose(np.concatenate(found), score_S.detach().numpy(), atol=1e-5)
            objective = StepReward(
                engine=engine, config=config, examples=SOLUTIONS, rows=lambda step: range(3), total_steps=10,
                on_progress=lambda phase: None,
            )  # fmt: skip
            metrics = objective.take_step(0)
            assert metrics["loss/step_labels"] == pytest.approx(loss.item(), rel=1e-5)
            assert metrics["loss/gradient_norm"] == pytest.approx(norm, rel=1e-4)
            assert metrics["steps/accuracy"] == pytest.approx(right)
