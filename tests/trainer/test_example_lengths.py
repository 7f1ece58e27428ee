"""Over-long examples by every policy: what is kept, what is counted, and that nothing is left empty."""

import numpy as np
import pytest

from towline.storage.errors import ConfigError, DataError
from towline.trainer.example_lengths import (
    FittedExamples,
    LengthCounts,
    cut_demonstration,
    cut_pair,
    cut_steps,
    example_limit,
    fit_demonstrations,
    fit_pairs,
    fit_steps,
)
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import TokenExample, TokenPair, TokenSteps

EOS = 99


def sequence(num_prompt: int, *completion: int) -> TokenSequence:
    return TokenSequence(token_ids=np.array([*range(num_prompt), *completion]), num_prompt_tokens=num_prompt)


def demonstration(num_prompt: int, trained: str, row: int = 0) -> TokenExample:
    """`trained`: a letter for each token after the prompt, T where it is learned; the last one is the end."""
    completion = [*range(50, 50 + len(trained) - 1), EOS]
    return TokenExample(
        row=row, tokens=sequence(num_prompt, *completion), trained=np.array([letter == "T" for letter in trained])
    )


def pair(num_prompt: int, chosen: list[int], rejected: list[int], row: int = 0) -> TokenPair:
    return TokenPair(
        row=row, chosen=sequence(num_prompt, *chosen), rejected=sequence(num_prompt, *rejected), margin=0.5
    )


def judged(labels: list[int], num_prompt: int = 2, step_tokens: int = 3, row: int = 0) -> TokenSteps:
    return TokenSteps(
        row=row,
        tokens=sequence(num_prompt, *range(50, 50 + step_tokens * len(labels))),
        step_ends=num_prompt - 1 + step_tokens * np.arange(1, len(labels) + 1),
        labels=np.array(labels),
    )


def completions(found: TokenPair) -> tuple[list[int], list[int]]:
    return (
        found.chosen.token_ids[found.chosen.num_prompt_tokens :].tolist(),
        found.rejected.token_ids[found.rejected.num_prompt_tokens :].tolist(),
    )


# Cuts


def test_a_demonstration_that_is_cut_is_not_taught_an_end():
    cut = cut_demonstration(demonstration(3, "TTTTT"), 6)
    assert cut is not None
    assert cut.tokens.token_ids.tolist() == [0, 1, 2, 50, 51, 52]
    assert cut.trained.tolist() == [True] * 3
    assert EOS not in cut.tokens.token_ids


def test_a_conversation_that_is_cut_ends_with_what_is_learned():
    cut = cut_demonstration(demonstration(2, "TT...TT"), 6)
    assert cut is not None
    assert cut.tokens.token_ids.tolist() == [0, 1, 50, 51]
    assert cut.trained.tolist() == [True, True]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_demonstration_whose_prompt_leaves_no_room_is_left_out(max_tokens: int):
    assert cut_demonstration(demonstration(3, "TTTTT"), max_tokens) is None


def test_g3_28_a_pair_that_is_cut_keeps_its_prompt_and_both_completions():
    cut = cut_pair(pair(3, list(range(50, 60)), [60, 61]), 8)
    assert cut is not None
    assert completions(cut) == ([50, 51, 52, 53, 54], [60, 61])
    for tokens in (cut.chosen, cut.rejected):
        assert tokens.token_ids[: tokens.num_prompt_tokens].tolist() == [0, 1, 2]
    assert cut.margin == 0.5


@pytest.mark.parametrize(("max_tokens", "kept"), [(4, ([50], [60])), (3, None), (2, None)])
def test_g3_28_a_prompt_without_room_after_it_leaves_its_pair_out(max_tokens: int, kept: object):
    cut = cut_pair(pair(3, [50, 51], [60, 61]), max_tokens)
    assert (cut and completions(cut)) == kept


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_g3_28_no_pair_is_kept_empty(max_tokens: int):
    assert cut_pair(pair(3, [50, 51], [50, 51]), max_tokens) is None


def test_a_pair_that_a_cut_makes_one_is_left_out():
    assert cut_pair(pair(1, [50, 51, 52], [50, 51, 53]), 3) is None
    already = cut_pair(pair(1, [50, 51, 52], [50, 51, 52]), 3)
    assert already is not None
    assert completions(already) == ([50, 51], [50, 51])


@pytest.mark.parametrize(("max_tokens", "ends"), [(5, [4]), (7, [4]), (8, [4, 7]), (10, [4, 7])])
def test_a_solution_that_is_cut_keeps_whole_steps(max_tokens: int, ends: list[int]):
    cut = cut_steps(judged([1, 0, 1]), max_tokens)
    assert cut is not None
    assert cut.step_ends.tolist() == ends
    assert len(cut.tokens.token_ids) == ends[-1] + 1
    assert cut.labels.tolist() == [1, 0][: len(ends)]


def test_a_solution_of_which_no_judged_step_is_left_is_left_out():
    assert cut_steps(judged([-100, 0, 1]), 6) is None
    assert cut_steps(judged([1, 0, 1]), 4) is None


# Policies


def test_what_fits_is_kept_as_it_is():
    examples = [demonstration(3, "TT", row=0), demonstration(2, "TTTT", row=1)]
    for limit in (6, None):
        fitted = fit_demonstrations(examples, max_tokens=limit, overlong="refuse")
        assert fitted == FittedExamples(
            examples=tuple(examples),
            counts=LengthCounts(
                num_examples=2,
                num_overlong=0,
                num_truncated=0,
                num_dropped=0,
                max_tokens=limit,
                longest_row=1,
                longest_tokens=6,
            ),
        )


def test_refusing_names_the_longest_and_the_remedies():
    examples = [demonstration(2, "T" * length, row=length) for length in (1, 1200, 5, 2)]
    with pytest.raises(DataError) as caught:
        fit_demonstrations(examples, max_tokens=4, overlong="refuse")
    assert str(caught.value) == (
        "row 1200 (from 0) has 1,202 tokens; 2 of 4 examples have more than max_tokens (4). Allow more, or set "
        'overlong = "drop" or "truncate".'
    )


def test_dropping_is_counted():
    examples = [pair(2, [5], [6], row=0), pair(2, [5], [6, 7, 8], row=1), pair(2, [5, 6], [6, 7], row=2)]
    fitted = fit_pairs(examples, max_tokens=4, overlong="drop")
    assert [example.row for example in fitted.examples] == [0, 2]
    counts = fitted.counts
    assert (counts.num_examples, counts.num_overlong, counts.num_dropped, counts.num_truncated) == (3, 1, 1, 0)
    assert (counts.longest_row, counts.longest_tokens) == (1, 5)


def test_cutting_is_counted_and_what_has_no_room_is_left_out():
    examples = [judged([1], row=0), judged([1, 1, 0], row=1), judged([0, 1], num_prompt=7, row=2)]
    fitted = fit_steps(examples, max_tokens=8, overlong="truncate")
    assert [example.row for example in fitted.examples] == [0, 1]
    assert fitted.examples[1].labels.tolist() == [1, 1]
    counts = fitted.counts
    assert (counts.num_overlong, counts.num_dropped, counts.num_truncated) == (2, 1, 1)


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_nothing_left_is_an_error(overlong):
    with pytest.raises(DataError, match=r"no example is left of 2: all have more than max_tokens \(3\)"):
        fit_demonstrations([demonstration(3, "TT"), demonstration(4, "T")], max_tokens=3, overlong=overlong)


def test_the_limit_is_the_models_context_unless_told():
    assert example_limit(None, 512) == 512
    assert example_limit(64, 512) == 64
    assert example_limit(64, None) == 64
    assert example_limit(None, None) is None
    with pytest.raises(ConfigError, match=r"max_tokens \(1,024\) is more than the model's context \(512 tokens\)"):
        example_limit(1024, 512)
