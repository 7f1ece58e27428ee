"""One process in which SFT, DPO and a reward model learn the small sorting task, a few seeds one after the other.

    python tests/integration/supervised_learning.py FOLDER SEED...

SFT begins with random weights, the others with models/tiny-sort. FOLDER/learned.json gets, by objective and seed, what
each held-out example measured before and after: [sums, sizes], as `ratio_interval` takes them.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from single_rank import single_rank
from towline.storage.example_config import DemonstrationData, PreferenceData
from towline.storage.examples import load_demonstrations, load_preferences
from towline.storage.schedule import PromptSchedule
from towline.trainer.completion_logprobs import completion_logprobs
from towline.trainer.conversation import ConversationTokenizer
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.dpo import Dpo
from towline.trainer.pair_step import plan_pair_step
from towline.trainer.policy import load_policy
from towline.trainer.reward_model import PairReward
from towline.trainer.sequence_head import load_reward_model
from towline.trainer.sft import Sft
from towline.trainer.supervised import Objective
from towline.trainer.supervised_config import DpoConfig, RewardModelConfig, SftConfig

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-sort"
BATCH_SIZE, NUM_HELD_OUT, NUM_GENERATED = 64, 200, 100
STEPS = {"sft": 50, "dpo": 25, "reward_model": 25}
FORM = re.compile(r"\\boxed\{\d{5}\}")
Values = tuple[list[float], list[int]]
USUAL = {"batch_size": BATCH_SIZE, "precision": "float32", "zero_stage": 0, "warmup_steps": 3}


class Examples:
    """Tokens of the data, read once."""

    def __init__(self) -> None:
        tokenizer = ConversationTokenizer(MODEL, chat=False)

        def demonstrations(split: str):
            data = DemonstrationData(train=str(ROOT / "data" / "sort-demonstrations" / f"{split}.jsonl"), chat=False)
            return [tokenizer.demonstration(row) for row in load_demonstrations(data).rows]

        def pairs(split: str):
            data = PreferenceData(train=str(ROOT / "data" / "sort-pairs" / f"{split}.jsonl"), chat=False)
            return [tokenizer.preference(row) for row in load_preferences(data).rows]

        self.demonstrations, self.held_out = demonstrations("train"), demonstrations("held_out")[:NUM_HELD_OUT]
        self.pairs, self.held_out_pairs = pairs("train"), pairs("held_out")[:NUM_HELD_OUT]


def learn(seeds: Sequence[int], folder: Path) -> dict[str, list[dict[str, Values]]]:
    examples = Examples()
    return {
        name: [one(examples, seed, folder) for seed in seeds]
        for name, one in (("sft", _sft), ("dpo", _dpo), ("reward_model", _reward_model))
    }


def _take_steps(objective: Objective, name: str) -> None:
    for step in range(STEPS[name]):
        objective.take_step(step)


def _rows(num_examples: int, seed: int) -> Callable[[int], Sequence[int]]:
    return PromptSchedule(num_examples, BATCH_SIZE, seed).rows


def _sft(examples: Examples, seed: int, folder: Path) -> dict[str, Values]:
    blank = folder / f"blank-{seed}"
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).save_pretrained(blank)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(blank)
    config = SftConfig(learning_rate=3e-3, **USUAL)
    engine = DeepSpeedEngine(load_policy(blank, temperature=1.0, precision="float32"), config)
    sizes = [int(one.trained.sum()) for one in examples.held_out]

    def measured() -> tuple[Values, Values]:
        sums = completion_logprobs(
            engine, config, [one.tokens for one in examples.held_out], groups=range(len(sizes)),
            trained=[one.trained for one in examples.held_out], on_progress=lambda: None,
        )  # fmt: skip
        return (sums.tolist(), sizes), _formatted(engine, examples)

    before, form_before = measured()
    sft = Sft(
        engine=engine, config=config, examples=examples.demonstrations, total_steps=STEPS["sft"],
        rows=_rows(len(examples.demonstrations), seed), on_progress=lambda phase: None,
    )  # fmt: skip
    _take_steps(sft, "sft")
    after, form_after = measured()
    return {"before": before, "after": after, "form_before": form_before, "form_after": form_after}


@torch.no_grad()
def _formatted(engine: DeepSpeedEngine, examples: Examples) -> Values:
    """Whether each greedy completion is a box of five digits."""
    prompts = [one.tokens.token_ids[: one.tokens.num_prompt_tokens] for one in examples.held_out[:NUM_GENERATED]]
    assert len({len(prompt) for prompt in prompts}) == 1, "prompts of one length need no padding"
    rows = torch.from_numpy(np.stack(prompts).astype(np.int64))
    plain = AutoModelForCausalLM.from_config(engine.policy.model.config, attn_implementation="sdpa").eval()
    plain.load_state_dict(engine.policy.model.state_dict())
    written = plain.generate(rows, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = tokenizer.batch_decode(written[:, rows.shape[1] :], skip_special_tokens=True)
    return [float(FORM.fullmatch(text) is not None) for text in texts], [1] * len(texts)


def _dpo(examples: Examples, seed: int, folder: Path) -> dict[str, Values]:
    config = DpoConfig(learning_rate=3e-4, beta=0.1, **USUAL)
    engine = DeepSpeedEngine(load_policy(MODEL, temperature=1.0, precision="float32"), config)

    def logprobs(pairs) -> np.ndarray:
        sequences = [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]
        whole = [np.ones(len(one.token_ids) - one.num_prompt_tokens, dtype=np.bool_) for one in sequences]
        groups = [number // 2 for number in range(len(sequences))]
        return completion_logprobs(
            engine, config, sequences, trained=whole, groups=groups, on_progress=lambda: None
        ).reshape(-1, 2)  # fmt: skip

    # Only what the steps will see.
    rows = _rows(len(examples.pairs), seed)
    used = [examples.pairs[row] for step in range(STEPS["dpo"]) for row in rows(step)]
    reference, held_out = logprobs(used), logprobs(examples.held_out_pairs)
    dpo = Dpo(
        engine=engine, config=config, pairs=used, reference=reference, total_steps=STEPS["dpo"],
        rows=lambda step: range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE), on_progress=lambda phase: None,
    )  # fmt: skip
    _take_steps(dpo, "dpo")
    gained = logprobs(examples.held_out_pairs) - held_out
    wins = (gained[:, 0] > gained[:, 1]).astype(float) + 0.5 * (gained[:, 0] == gained[:, 1])
    return {"before": ([0.5] * len(wins), [1] * len(wins)), "after": (wins.tolist(), [1] * len(wins))}


def _reward_model(examples: Examples, seed: int, folder: Path) -> dict[str, Values]:
    config = RewardModelConfig(learning_rate=5e-4, **USUAL)
    engine = DeepSpeedEngine(load_reward_model(MODEL, precision="float32", head_seed=seed), config)
    pairs = examples.held_out_pairs

    def right() -> Values:
        scores = np.zeros((len(pairs), 2))
        for batch, members in plan_pair_step(pairs, config, engine.policy).batches():
            scores[members] = engine.evaluate_scores(batch, batch.last_index).reshape(-1, 2).numpy()
        return (scores[:, 0] > scores[:, 1]).astype(float).tolist(), [1] * len(pairs)

    before = right()
    reward = PairReward(
        engine=engine, config=config, pairs=examples.pairs, total_steps=STEPS["reward_model"],
        rows=_rows(len(examples.pairs), seed), on_progress=lambda phase: None,
    )  # fmt: skip
    _take_steps(reward, "reward_model")
    return {"before": before, "after": right()}


def main(folder: Path, seeds: Sequence[int]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    with single_rank():
        (folder / "learned.json").write_text(json.dumps(learn(seeds, folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(seed) for seed in sys.argv[2:]])
