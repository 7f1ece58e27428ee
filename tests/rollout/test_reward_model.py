"""A reward model as a part of the reward: its scores are transformers' own, and join those of the other parts."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM

from scored_groups import completion, scored_group
from tiny_models import VARLEN, small_llama, write_scorer
from towline.rollout import reward_model
from towline.rollout.grading import Grader
from towline.rollout.reward_model import RewardModel
from towline.rollout.rewards.config import RewardConfig
from towline.storage.errors import ModelError
from towline.storage.records import FinishReason, ScoreStatus
from towline.trainer import sequence_head
from towline.trainer.packing import TokenSequence, pack

pytestmark = pytest.mark.slow

EOS = 2
"""Which the folder pads with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_scorer(tmp_path_factory.mktemp("scorer"))


def texts(seed=0):
    """Of several lengths; some end with the token that ends a turn, once twice, some have it inside."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(3, 300, length).astype(np.int32) for length in (9, 4, 17, 6, 17, 1, 40)]
    made[0][-1] = made[1][-1] = made[1][-2] = EOS
    made[2][5] = EOS
    return made


@torch.no_grad()
def own_score(model, text):
    """transformers', of a text alone; it is told of no padding token, so that it reads the last one."""
    pad, model.config.pad_token_id = model.config.pad_token_id, None
    try:
        return model(input_ids=torch.from_numpy(text.astype(np.int64))[None], use_cache=False).logits.item()
    finally:
        model.config.pad_token_id = pad


def values(verdicts):
    assert all(verdict.status is ScoreStatus.OK for verdict in verdicts), verdicts
    return np.array([verdict.value for verdict in verdicts])


# --- scores ------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_transformers(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    wanted = [own_score(model, text) for text in texts()]
    found = values(RewardModel(folder).score(texts()))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert np.std(found) > 0.1


@torch.no_grad()
def test_scores_are_those_that_it_was_trained_with(folder):
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=VARLEN)
    longer = [text for text in texts() if len(text) > 1]
    batch = pack([TokenSequence(token_ids=text, num_prompt_tokens=1) for text in longer])
    wanted = sequence_head.RewardModel(loaded, is_fresh_head=False)(batch, batch.last_index)
    np.testing.assert_allclose(values(RewardModel(folder).score(longer)), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_batch_tokens", [1, 40, 50, 100_000])
def test_a_score_does_not_depend_on_what_is_scored_with_it(folder, monkeypatch, max_batch_tokens):
    model = RewardModel(folder)
    alone = np.concatenate([values(model.score([text])) for text in texts()])
    monkeypatch.setattr(reward_model, "MAX_BATCH_TOKENS", max_batch_tokens)
    np.testing.assert_allclose(values(model.score(texts())), alone, rtol=1e-5, atol=1e-5)


def test_batches_are_bounded_with_their_padding_and_progress_is_told_after_each(folder, monkeypatch):
    """40; 17 and 17; 9, 6, 4 and 1 padded to 36."""
    monkeypatch.setattr(reward_model, "MAX_BATCH_TOKENS", 40)
    told = []
    RewardModel(folder).score(texts(), lambda done, total: told.append((done, total)))
    assert told == [(1, 7), (3, 7), (7, 7)]


def test_a_bfloat16_folder_is_scored_in_its_precision_and_read_in_float32(folder, tmp_path):
    AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    found = values(RewardModel(tmp_path).score(texts()))
    np.testing.assert_allclose(found, values(RewardModel(folder).score(texts())), rtol=0.05, atol=0.1)
    assert np.abs(found - torch.from_numpy(found).bfloat16().double().numpy()).max() > 0


def test_the_process_keeps_its_number_of_threads(folder):
    before = torch.get_num_threads()
    RewardModel(folder, num_threads=before + 1).score(texts())
    assert torch.get_num_threads() == before


# --- texts without a score ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ([], "there are no tokens to score"),
        ([5] * 65, "65 tokens, and the reward model was made for 64"),
        ([5, 300], "a token id is none of the reward model's 300"),
        ([-1, 5], "a token id is none of the reward model's 300"),
    ],
)
def test_what_cannot_be_scored_fails_alone_with_the_reason(folder, text, reason):
    first, bad, last = RewardModel(folder).score([texts()[0], np.array(text, np.int32), texts()[1]])
    assert (bad.value, bad.status) == (None, ScoreStatus.FAILED)
    assert reason in bad.detail
    assert first.status is last.status is ScoreStatus.OK


def test_a_score_that_is_no_number_is_a_failure(folder, tmp_path):
    write_scorer(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][70] = math.inf
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    good, bad = RewardModel(tmp_path).score([np.array([30, 31]), np.array([30, 70])])
    assert (bad.value, bad.status, bad.detail) == (None, ScoreStatus.FAILED, "the score is nan")
    assert good.value == pytest.approx(RewardModel(folder).score([np.array([30, 31])])[0].value, abs=1e-5)


# --- folders -----------------------------------------------------------------------------------------------------


def test_other_models_are_refused(tmp_path):
    small_llama(attention=None).save_pretrained(tmp_path / "causal")
    with pytest.raises(ModelError, match="holds a LlamaForCausalLM, expected a model ForSequenceClassification"):
        RewardModel(tmp_path / "causal")
    write_scorer(tmp_path / "three", num_labels=3)
    with pytest.raises(ModelError, match="gives 3 scores a text, expected one"):
        RewardModel(tmp_path / "three")


def test_a_folder_without_its_head_is_refused(folder, tmp_path):
    """transformers would draw one at random."""
    body = LlamaForCausalLM.from_pretrained(folder)
    body.save_pretrained(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lacks the weights score\.weight"):
        RewardModel(tmp_path)


# --- as parts of the reward --------------------------------------------------------------------------------------


def part(folder, **table):
    return RewardConfig.model_validate({"use": "reward_model", "weight": 1.0, "model": folder} | table)


EXACT = RewardConfig(use="exact_match", weight=2.0)


def group(*answers, prompt=(4, 5)):
    """Completions of 3, 4, … tokens."""
    rng = np.random.default_rng(1)
    completions = [
        replace(completion(rng.integers(3, 300, 3 + number)), text=answer) for number, answer in enumerate(answers)
    ]
    made = scored_group(prompt, completions, [0.0] * len(completions)).group
    return replace(made, prompt=replace(made.prompt, answer="7"))


def own_values(folder, groups):
    scorer = RewardModel(folder)
    return [
        scorer.score([np.concatenate([one.prompt_token_ids, completion.token_ids])])[0].value
        for one in groups
        for completion in one.completions
    ]


@pytest.fixture
def grade(tmp_path):
    def grade(groups, *rewards, on_progress=None):
        grader = Grader(rewards, max_completion_tokens=8, num_workers=1, limit_s=5.0, folder=tmp_path)
        try:
            return grader.score(groups, on_progress, "step 3, "), grader
        finally:
            grader.close()

    return grade


GROUPS = [group("\\boxed{7}", "no"), group("\\boxed{8}", "\\boxed{7}", prompt=(9,))]


def test_a_reward_model_alone_needs_no_workers(grade, folder):
    told = []
    scores, grader = grade(GROUPS, part(folder, weight=0.5), on_progress=lambda *counts: told.append(counts))
    wanted = own_values(folder, GROUPS)
    assert grader.scorer is None
    assert [score.parts for score in scores] == [{"reward_model": pytest.approx(value, abs=1e-5)} for value in wanted]
    assert [score.total for score in scores] == pytest.approx([0.5 * value for value in wanted], abs=1e-5)
    assert all(score.part_status == {"reward_model": ScoreStatus.OK} for score in scores)
    assert all(score.seconds == score.part_seconds["reward_model"] > 0 for score in scores)
    assert told[-1] == (4, 4)
    assert (grader.isolation, grader.why_slow_starts) == ("", "")


def test_it_joins_parts_of_the_text_and_of_tokens(grade, folder, tmp_path_factory):
    other = write_scorer(tmp_path_factory.mktemp("watcher"), seed=1)
    told = []
    scores, grader = grade(
        GROUPS,
        part(folder, name="preference", floor=-0.1, when={"exact_match": 1.0}),
        EXACT,
        part(other, name="watcher", weight=0.0),
        RewardConfig(use="overlong", weight=1.0, cache_tokens=5),
        on_progress=lambda *counts: told.append(counts),
    )
    preference, watcher = own_values(folder, GROUPS), own_values(other, GROUPS)
    right, penalty = [1.0, 0.0, 0.0, 1.0], [0.0, -0.2, 0.0, -0.2]
    assert [score.parts for score in scores] == [
        {
            "exact_match": right[i],
            "preference": pytest.approx(preference[i], abs=1e-5),
            "watcher": pytest.approx(watcher[i], abs=1e-5),
            "overlong": pytest.approx(penalty[i]),
        }
        for i in range(4)
    ]
    totals = [2.0 * right[i] + right[i] * max(preference[i], -0.1) + penalty[i] for i in range(4)]
    assert [score.total for score in scores] == pytest.approx(totals, abs=1e-5)
    assert abs(np.array(preference) - watcher).min() > 1e-3
    assert sorted(told) == told
    assert told[-1] == (4, 4)
    assert set(grader.timings.latencies()) == {"exact_match", "preference", "watcher"}
    assert all(one.num_scored == 4 for one in grader.timings.latencies().values())
    assert {slow.where for slow in grader.timings.slowest} <= {
        f"step 3, row 0, completion {number}" for number in range(2)
    }


def test_a_failure_leaves_no_total_whatever_the_weight(grade, folder):
    long = replace(group("\\boxed{7}"), prompt_token_ids=np.full(63, 5, np.int32))
    (score,), _ = grade([long], EXACT, part(folder, weight=0.0))
    assert (score.status, score.parts["exact_match"]) == (ScoreStatus.FAILED, 1.0)
    assert math.isnan(score.total)
    assert math.isnan(score.parts["reward_model"])
    assert score.part_status == {"exact_match": ScoreStatus.OK, "reward_model": ScoreStatus.FAILED}
    assert score.detail == "reward_model: 66 tokens, and the reward model was made for 64"


def test_an_empty_completion_is_scored_as_it_stands(grade, folder):
    empty = completion([], finish_reason=FinishReason.ABORTED)
    (score,), _ = grade([scored_group([4, 5], [empty], [0.0]).group], part(folder))
    wanted = RewardModel(folder).score([np.array([4, 5])])[0].value
    assert score.total == pytest.approx(wanted, abs=1e-5)


def test_no_groups_have_no_scores(grade, folder):
    assert grade([], part(folder))[0] == []


def test_the_hash_is_that_of_the_weights_and_of_the_rule(grade, folder, tmp_path_factory):
    other = write_scorer(tmp_path_factory.mktemp("other"), seed=1)
    kinds = (
        [part(folder)], [part(other)], [part(folder, name="else")], [part(folder, floor=0.0)], [EXACT],
        [EXACT, part(folder)], [EXACT, part(other)],
    )  # fmt: skip
    hashes = [grade([], *kind)[1].code_hash for kind in kinds]
    assert len(set(hashes)) == len(kinds)
    assert grade([], part(folder, weight=3.0))[1].code_hash == hashes[0]
