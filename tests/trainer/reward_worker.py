"""One rank of a reward model's trainer, for test_reward_engine.py.

    mpirun -n 2 python reward_worker.py FOLDER HOST:PORT

FOLDER/start is a causal language model. What a rank found goes to FOLDER/found-RANKS/NAME.json, checkpoints to
FOLDER/checkpoints-RANKS/NAME, token ids of all completions to FOLDER/texts.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from worker_rank import end_process, worker_rank

from towline.storage.checkpoints import TrainingState
from towline.trainer.checkpoint import load_checkpoint, save_checkpoint
from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.packing import TokenSequence
from towline.trainer.packing_pairs import lay_out_pairs, plan_pairs
from towline.trainer.reward_losses import pair_reward_loss
from towline.trainer.sequence_head import RewardModel, load_reward_model
from towline.trainer.token_examples import TokenPair

CASES = [(stage, "float32") for stage in (0, 1, 2, 3)] + [(3, "bfloat16")]
SIZES = [(3, 6, 2), (5, 1, 9), (2, 4, 4)]
"""Tokens of prompt, chosen and rejected completion: three pairs, so that of two ranks one has an empty micro-batch."""
STEPS = 4
RATE = 1e-3


def pairs() -> list[TokenPair]:
    rng = np.random.default_rng(0)

    def sequence(prompt: np.ndarray, length: int) -> TokenSequence:
        token_ids = np.concatenate([prompt, rng.integers(3, 1600, length - 1), [1]])
        return TokenSequence(token_ids=token_ids, num_prompt_tokens=len(prompt))

    made: list[TokenPair] = []
    for num_prompt_tokens, *lengths in SIZES:
        prompt = rng.integers(3, 1600, num_prompt_tokens)
        chosen, rejected = (sequence(prompt, length) for length in lengths)
        made.append(TokenPair(row=0, margin=None, chosen=chosen, rejected=rejected))
    return made


class Trainer:
    def __init__(self, folder: Path, stage: int, precision: Any, *, head_seed: int = 0) -> None:
        model = load_reward_model(folder, precision=precision, head_seed=head_seed)
        config = TrainerConfig(learning_rate=RATE, zero_stage=stage, precision=precision, weight_decay=0.1)
        self.engine: DeepSpeedEngine[RewardModel] = DeepSpeedEngine(model, config)
        prompts, chosen, rejected = zip(*SIZES, strict=True)
        self.plan = plan_pairs(
            prompts, chosen, rejected, num_ranks=dist.get_world_size(), max_tokens=16, packing="packed",
            shares_prompts=model.shares_prompts, work=model.work,
        )  # fmt: skip

    def step(self) -> tuple[float, float]:
        """Loss of all ranks before it, and the gradient's norm."""
        total = torch.zeros((), dtype=torch.float64)
        mine = self.plan.micro_batches[dist.get_rank()]
        for place, numbers in enumerate(mine):
            batch = lay_out_pairs([pairs()[number] for number in numbers], is_padded=False, shares_prompts=True)
            chosen_P, rejected_P = self.engine.scores(batch, batch.last_index).view(-1, 2).unbind(1)
            loss = pair_reward_loss(chosen_P, rejected_P, centring=0.01).sum() / len(SIZES)
            self.engine.backward(loss, is_last=place == len(mine) - 1)
            total += loss.detach().double()
        dist.all_reduce(total)
        return total.item(), self.engine.step(RATE)

    def scores(self) -> list[float]:
        batch = lay_out_pairs(pairs(), is_padded=False, shares_prompts=True)
        return self.engine.evaluate_scores(batch, batch.last_index).tolist()


def run(folder: Path) -> None:
    ranks = dist.get_world_size()
    for stage, precision in CASES:
        name = f"zero{stage}-{precision}"
        trainer = Trainer(folder / "start", stage, precision)
        losses, norms = zip(*[trainer.step() for _ in range(STEPS)], strict=True)
        state = TrainingState(
            step=STEPS, wave=0, branch=1, version=STEPS, stream_digest="ab12", seed=7, data="pairs-1", reference="",
            kl_beta=0.0, ranks=ranks, zero_stage=stage, precision=precision, optimizer={},
        )  # fmt: skip
        checkpoints = folder / f"checkpoints-{ranks}" / name
        save_checkpoint(
            trainer.engine, checkpoints, state, model_folder=folder / "start", keep=1, on_progress=lambda: None
        )
        # Another head, which the checkpoint's takes the place of.
        again = Trainer(folder / "start", stage, precision, head_seed=1)
        differing = again.scores()
        load_checkpoint(again.engine, checkpoints, STEPS, state)
        found = {
            "losses": losses, "norms": norms, "scores": trainer.scores(), "loaded": again.scores(), "other": differing,
            "next": [trainer.step(), again.step()],
        }  # fmt: skip
        if dist.get_rank() == 0:
            place = folder / f"found-{ranks}"
            place.mkdir(exist_ok=True)
            (place / f"{name}.json").write_text(json.dumps(found))
            texts = [sequence.token_ids.tolist() for pair in pairs() for sequence in (pair.chosen, pair.rejected)]
            (folder / "texts.json").write_text(json.dumps(texts))


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]
    with worker_rank(address, "reward"):
        run(folder)


if __name__ == "__main__":
    main()
    end_process()
