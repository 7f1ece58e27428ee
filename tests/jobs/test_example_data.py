"""Which examples a step holds, and the hash that tells a checkpoint of other ones."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chat_tokenizers import byte_tokenizer, save_tokenizer
from towline.jobs.example_data import context_tokens, data_hash, example_schedule, token_digest, token_pairs
from towline.jobs.experiment import SftExperiment
from towline.storage.errors import ConfigError
from towline.storage.example_config import Half, PreferenceData
from towline.storage.schedule import PromptSchedule
from towline.trainer.packing import TokenSequence


def sequence(*token_ids: int, prompt: int = 1) -> TokenSequence:
    return TokenSequence(token_ids=np.array(token_ids, dtype=np.int32), num_prompt_tokens=prompt)


def experiment(tmp_path: Path, **trainer: Any) -> SftExperiment:
    (tmp_path / "train.jsonl").touch()
    fields = {
        "objective": "sft",
        "steps": 80,
        "policy": {"model": str(tmp_path)},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "trainer": {"learning_rate": 1e-4, "batch_size": 4} | trainer,
    }
    return SftExperiment.model_validate_json(json.dumps(fields))


TWO = [sequence(1, 2, 3), sequence(4, 5)]
OTHERS = {
    "a token": [sequence(1, 2, 9), sequence(4, 5)],
    "the order": [sequence(4, 5), sequence(1, 2, 3)],
    "one example less": [sequence(1, 2, 3)],
    "one more": [*TWO, sequence(6, 7)],
    "where a prompt ends": [sequence(1, 2, 3, prompt=2), sequence(4, 5)],
    "a token that moved to the next": [sequence(1, 2), sequence(3, 4, 5)],
    "one long example": [sequence(1, 2, 3, 4, 5)],
    "a large token": [sequence(1, 2, 3 + 2**16), sequence(4, 5)],
}


def test_a_digest_is_that_of_every_other_machine_and_width() -> None:
    """Changing this number would make every reference table and checkpoint that is there useless."""
    wide = [TokenSequence(token_ids=one.token_ids.astype(np.int64), num_prompt_tokens=1) for one in TWO]
    assert token_digest(TWO) == token_digest(wide) == token_digest(iter(TWO)) == "abfba6b791b9a6fa52e807fd21a86324"


@pytest.mark.parametrize("change", OTHERS)
def test_a_digest_tells_other_examples(change: str) -> None:
    assert token_digest(OTHERS[change]) != token_digest(TWO)


def test_a_data_hash_tells_everything_that_a_step_trains_on() -> None:
    schedule = PromptSchedule(9, 3, 0)
    masks = [[True, False], [True]]
    known = [
        data_hash(TWO, masks, schedule),
        data_hash(TWO, [[True, True], [True]], schedule),
        data_hash(TWO, [0.5, None], schedule),
        data_hash(TWO, [None, 0.5], schedule),
        data_hash(TWO, masks, PromptSchedule(9, 4, 0)),
        data_hash(TWO, masks, PromptSchedule(9, 3, 1)),
        *(data_hash(other, masks, schedule) for other in OTHERS.values()),
    ]
    assert len(set(known)) == len(known)
    assert known[0] == data_hash(TWO, masks, PromptSchedule(9, 3, 0, key="trainer.batch_size"))


def test_a_data_hash_tells_the_half_that_is_trained_on(tmp_path: Path) -> None:
    """A resume with another half, or another division into halves, is refused by it."""
    rows = [json.dumps({"prompt": f"p{number}", "chosen": "a", "rejected": "b"}) + "\n" for number in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(rows))
    policy = SimpleNamespace(folder=save_tokenizer(tmp_path / "model", byte_tokenizer(), eos_token="</s>"))
    role = SimpleNamespace(heartbeat=SimpleNamespace(beat=lambda phase: None))

    def tokens(half: Half | None, seed: int = 0) -> list[TokenSequence]:
        data = PreferenceData(train=str(tmp_path / "train.jsonl"), chat=False, half=half, half_seed=seed)
        pairs = token_pairs(role, SimpleNamespace(policy=policy), data, None)
        return [one for pair in pairs for one in (pair.chosen, pair.rejected)]

    found = [tokens(None), tokens("first"), tokens("second"), tokens("first", 1)]
    assert len(found[1]) + len(found[2]) == len(found[0]) == 40
    assert len({data_hash(one, None, PromptSchedule(5, 1, 0)) for one in found}) == 4


def test_a_run_of_two_epochs_goes_on_at_the_end_of_the_first(tmp_path: Path) -> None:
    """G3-36: 40 steps an epoch, taken up at step 40: 40 are left, and they hold every example once."""
    schedule = example_schedule(160, experiment(tmp_path))
    left = [row for step in range(40, 80) for row in schedule.rows(step)]
    assert sorted(left) == list(range(160))


def test_a_step_holds_the_batch_however_it_is_split(tmp_path: Path) -> None:
    """G3-37: 8 examples a step, whether four micro-batches hold two each or one holds all: 24 are behind at step 3."""
    schedules = [
        example_schedule(160, experiment(tmp_path, batch_size=8, max_tokens_per_microbatch=tokens))
        for tokens in (16, 4096)
    ]
    assert len({row for step in range(3) for row in schedules[0].rows(step)}) == 24
    assert [schedules[0].rows(step) for step in range(40)] == [schedules[1].rows(step) for step in range(40)]


def test_more_examples_a_step_than_there_are_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trainer.batch_size \(4\) must be from 1 to the 3 rows"):
        example_schedule(3, experiment(tmp_path))


def test_what_a_model_can_read() -> None:
    text = SimpleNamespace(max_position_embeddings=2048)
    assert context_tokens(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))) == 2048
    silent = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
    assert context_tokens(SimpleNamespace(config=silent)) is None
