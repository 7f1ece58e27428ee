"""The parts that count tokens, DAPO's soft overlong penalty and length, and how they join those that judge the text."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from scored_groups import NAN, completion, score, scored_group
from towline.rollout.grading import Grader
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.token_penalty import TokenPenalty
from towline.rollout.scoring import ScoringPool
from towline.storage.ledger import ScoreSheet, read_scores, seal_scores
from towline.storage.records import ScoreStatus


def penalty(max_tokens: int = 20, **table: Any) -> TokenPenalty:
    found = TokenPenalty.of(RewardConfig.model_validate({"weight": 0.5} | table), max_tokens)
    assert found is not None
    return found


def overlong(**table: Any) -> TokenPenalty:
    return penalty(**{"use": "overlong", "cache_tokens": 8} | table)


PART = overlong()


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (21, -1.0)],
)
def test_the_penalty_by_hand(num_tokens, expected):
    found = PART.value(num_tokens)
    assert found == expected
    assert math.copysign(1, found) == math.copysign(1, -1 if expected else 1)


def test_the_penalty_with_dapos_lengths():
    part = penalty(20_480, use="overlong", cache_tokens=4096)
    assert [part.value(tokens) for tokens in (16_384, 18_432, 20_480)] == [0.0, -0.5, -1.0]


def test_a_cache_as_long_as_a_completion_begins_with_the_first_token():
    part = penalty(4, use="overlong", cache_tokens=4)
    assert [part.value(tokens) for tokens in range(5)] == [0.0, -0.25, -0.5, -0.75, -1.0]


def test_it_joins_parts_and_total():
    joined = PART.added_to(score(1.0), 16)
    assert joined.parts == {"exact": 1.0, "overlong": -0.5}
    assert (joined.total, joined.status) == (0.75, ScoreStatus.OK)
    assert joined.part_status == {"exact": ScoreStatus.OK, "overlong": ScoreStatus.OK}
    assert joined.part_seconds == {"exact": 0.1, "overlong": 0.0}


def test_a_completion_that_is_short_enough_keeps_its_total():
    assert PART.added_to(score(0.1), 12).total == score(0.1).total


def test_a_score_that_failed_stays_failed():
    joined = PART.added_to(score(NAN, detail="died"), 20)
    assert math.isnan(joined.total)
    assert (joined.parts["overlong"], joined.status, joined.detail) == (-1.0, ScoreStatus.FAILED, "died")


def test_the_hash_is_that_of_all_that_gives_the_number():
    hashes = {PART.added_to_hash("a"), PART.added_to_hash("b")} | {
        overlong(**change).added_to_hash("a")
        for change in ({"name": "long"}, {"max_tokens": 21}, {"cache_tokens": 7}, {"when": {"exact": 1.0}})
    }
    assert len(hashes) == 6
    assert overlong(weight=1.0).added_to_hash("a") == PART.added_to_hash("a")


@pytest.fixture
def grade(tmp_path):
    """Scores and code hash that `[[rewards]]` give to groups."""

    def grade(groups, *rewards, max_tokens=4):
        grader = Grader(
            [RewardConfig(**reward) for reward in rewards],
            max_completion_tokens=max_tokens, num_workers=1, limit_s=5.0, folder=tmp_path,
        )  # fmt: skip
        try:
            return grader.score(groups), grader
        finally:
            grader.close()

    return grade


EXACT = {"use": "exact_match", "weight": 1.0}
OVERLONG = {"use": "overlong", "weight": 0.5, "cache_tokens": 2}


def group(texts_and_tokens):
    completions = [dataclasses.replace(completion(np.arange(tokens)), text=text) for text, tokens in texts_and_tokens]
    made = scored_group([1], completions, [0.0] * len(completions)).group
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, answer="7"))


def test_the_same_text_in_more_tokens_costs_more(grade):
    """The pool remembers what it said of a text; lengths are none of what it remembers."""
    groups = [group([("\\boxed{7}", 2), ("\\boxed{7}", 3)]), group([("\\boxed{7}", 4), ("no", 4)])]
    scores, grader = grade(groups, EXACT, OVERLONG)
    assert [one.parts for one in scores] == [
        {"exact_match": 1.0, "overlong": 0.0},
        {"exact_match": 1.0, "overlong": -0.5},
        {"exact_match": 1.0, "overlong": -1.0},
        {"exact_match": 0.0, "overlong": -1.0},
    ]
    assert [one.total for one in scores] == [1.0, 0.75, 0.5, -0.5]
    assert grader.weights == {"exact_match": 1.0, "overlong": 0.5}


def test_the_ledger_keeps_it_as_a_part_of_its_own(grade, tmp_path):
    scores, grader = grade([group([("no", 3)])], EXACT, OVERLONG)
    sheet = ScoreSheet(scores=tuple(scores), weights=grader.weights, code_hash=grader.code_hash, shard_digest="d",
                       began=0.0, ended=1.0)  # fmt: skip
    seal_scores(tmp_path / "chunk-000.h5", sheet)
    (kept,) = read_scores(tmp_path / "chunk-000.h5").scores
    assert (kept.parts, kept.total) == ({"exact_match": 0.0, "overlong": -0.5}, -0.25)


LENGTH = {"use": "length", "weight": 0.5, "target_tokens": 2, "when": {"exact_match": 1.0},
          "converged": {"min_reward": 0.9}}  # fmt: skip


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0.0), (2, 0.0), (3, -0.5), (4, -1.0), (5, -1.0)])
def test_length_by_hand(num_tokens, expected):
    assert penalty(4, **LENGTH).value(num_tokens) == expected


def test_length_is_recorded_and_in_no_total(grade):
    (score,), grader = grade([group([("\\boxed{7}", 3)])], EXACT, LENGTH)
    assert (score.parts, score.total) == ({"exact_match": 1.0, "length": -0.5}, 1.0)
    assert score.part_status == {"exact_match": ScoreStatus.OK, "length": ScoreStatus.OK}
    assert grader.weights == {"exact_match": 1.0, "length": 0.5}


def test_conditions_hold_in_the_workers_and_for_tokens(grade):
    conditional = {"when": {"exact_match": 1.0}}
    form = {"use": "format", "weight": 0.25}
    groups = [group([("\\boxed{7}", 4), ("\\boxed{8}", 4)])]
    scores, _ = grade(groups, EXACT, form | conditional, OVERLONG | conditional)
    assert [one.total for one in scores] == [1.0 + 0.25 - 0.5, 0.0]
    assert [one.parts["format"] for one in scores] == [1.0, 1.0]
    assert [one.parts["overlong"] for one in scores] == [-1.0, -1.0]


def test_without_it_scores_and_hash_are_the_pools(grade, tmp_path):
    (one,), grader = grade([group([("no", 4)])], EXACT)
    assert (one.parts, one.total) == ({"exact_match": 0.0}, 0.0)
    with ScoringPool([RewardConfig(**EXACT)], 1, 5.0, tmp_path) as pool:
        assert grader.code_hash == pool.code_hash


def test_other_lengths_are_other_rewards(grade):
    hashes = {
        grade([], EXACT, *more, max_tokens=tokens)[1].code_hash
        for tokens, more in (
            (4, [OVERLONG]),
            (5, [OVERLONG]),
            (4, [OVERLONG | {"cache_tokens": 3}]),
            (4, []),
            (4, [LENGTH]),
            (4, [LENGTH | {"target_tokens": 1}]),
        )
    }
    assert len(hashes) == 6


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use": "overlong", "weight": 1.0}, "needs cache_tokens"),
        ({"use": "overlong", "weight": -1.0, "cache_tokens": 2}, "would pay for length"),
        ({"use": "overlong", "weight": 1.0, "cache_tokens": 0}, "greater than or equal to 1"),
        ({"use": "format", "weight": 1.0, "cache_tokens": 2}, 'cache_tokens is of use = "overlong" alone'),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        RewardConfig(**settings)
