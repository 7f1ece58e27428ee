"""From prompts to requests and back to groups: seeds of their own, canonical order, nothing lost or mixed up."""

import itertools
import random

import numpy as np
import pytest

from towline.rollout.engine import Generated, GenerationRequest
from towline.rollout.sampling import ChunkInFlight, SamplingSettings
from towline.storage.records import ChunkId, FinishReason, Prompt
from towline.storage.schedule import sampling_seed

ROWS = (17, 3, 40)
GROUP_SIZE = 4


def make_flight(*, step: int = 2, wave: int = 1, seed: int = 7, name: str = "train/a") -> ChunkInFlight:
    return ChunkInFlight(
        chunk=ChunkId(step=step, wave=wave, chunk=0),
        prompts=[Prompt(row=row, text=f"prompt {row}", answer=str(row)) for row in ROWS],
        prompt_token_ids=[[row, row + 1] for row in ROWS],
        settings=SamplingSettings(
            group_size=GROUP_SIZE, temperature=0.7, max_completion_tokens=9, stop_token_ids=(1, 2), seed=seed
        ),
        name=name,
    )


def answer(request: GenerationRequest) -> Generated:
    """A completion that tells which prompt and seed it was generated for."""
    return Generated(
        request_id=request.request_id,
        token_ids=[*request.prompt_token_ids, request.seed % 1000],
        logprobs=[-0.5, -0.25, -0.125],
        versions=[4, 4, 5],
        finish_reason=FinishReason.STOP,
    )


def test_each_request_carries_its_prompt_and_the_settings():
    requests = make_flight().requests()
    assert [request.prompt_token_ids for request in requests] == [[row, row + 1] for row in ROWS for _ in range(4)]
    assert len({request.request_id for request in requests}) == len(ROWS) * GROUP_SIZE
    for request in requests:
        assert (request.temperature, request.max_tokens, request.stop_token_ids) == (0.7, 9, [1, 2])


def test_every_sample_has_the_seed_of_the_schedule():
    # case G6-12: a group whose samples share a seed has no spread
    seeds = [request.seed for request in make_flight().requests()]
    assert seeds == [sampling_seed(7, 2, 1, row, sample) for row in ROWS for sample in range(GROUP_SIZE)]
    assert len(set(seeds)) == len(seeds)


def test_seeds_differ_between_steps_waves_and_experiments_and_are_reproducible():
    flights = [make_flight(), make_flight(step=3), make_flight(wave=2), make_flight(seed=8)]
    seeds = [{request.seed for request in flight.requests()} for flight in flights]
    for one, other in itertools.combinations(seeds, 2):
        assert not one & other
    again = make_flight(name="train/another-engine")
    assert [request.seed for request in again.requests()] == [request.seed for request in make_flight().requests()]


@pytest.mark.parametrize("order", range(5))
def test_groups_are_in_canonical_order_whatever_finishes_first(order: int):
    flight = make_flight()
    requests = flight.requests()
    for request in random.Random(order).sample(requests, len(requests)):
        assert not flight.is_complete
        assert flight.take(answer(request))
    assert flight.is_complete
    groups = flight.groups(decode=lambda token_ids: " ".join(map(str, token_ids)))
    assert [group.prompt.row for group in groups] == list(ROWS)
    for group in groups:
        row = group.prompt.row
        assert group.prompt_token_ids.tolist() == [row, row + 1]
        for sample, completion in enumerate(group.completions):
            seed = sampling_seed(7, 2, 1, row, sample)
            assert completion.seed == seed
            assert completion.token_ids.tolist() == [row, row + 1, seed % 1000]
            assert completion.text == f"{row} {row + 1} {seed % 1000}"


def test_a_completion_keeps_what_the_engine_recorded_of_each_token():
    # case G6-16: the engine's ids are the truth; ids, log-probs and versions stay equally long
    flight = make_flight()
    for request in flight.requests():
        flight.take(answer(request))
    completion = flight.groups(decode=lambda token_ids: "cut text")[0].completions[0]
    assert completion.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert completion.versions.tolist() == [4, 4, 5]
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 3
    assert (completion.logprobs.dtype, completion.token_ids.dtype) == (np.float32, np.int32)
    assert completion.finish_reason is FinishReason.STOP


def test_requests_of_another_chunk_are_left_to_it():
    flight, other = make_flight(name="train/step-1"), make_flight(name="train/step-10")
    assert not flight.take(answer(other.requests()[0]))
    assert not other.take(answer(flight.requests()[0]))
    assert not flight.is_complete
