"""Contestants of train_throughput.py: Towline's steps, a bare PyTorch loop, TRL's trainers.

    train_peers.py CONTESTANT MODEL DATA STEPS

All train the same tokens with AdamW (fused), a constant learning rate and a clipped gradient, so their losses agree.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
}
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import train_workload as workload

# --- Towline -----------------------------------------------------------------------------------------------------


def towline_engine(model: Path, config):
    from towline.trainer.deepspeed_engine import DeepSpeedEngine
    from towline.trainer.policy import load_policy

    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = load_policy(model, temperature=1.0, precision=config.precision, packing=config.packing)
    return DeepSpeedEngine(policy, config)


def towline_settings(precision: str, batch_size: int) -> dict:
    return {
        "batch_size": batch_size,
        "precision": precision,
        "learning_rate": workload.LEARNING_RATE,
        "schedule": "constant",
        "adam_betas": workload.ADAM_BETAS,
        "max_grad_norm": workload.MAX_GRADIENT_NORM,
        "max_tokens_per_microbatch": workload.MAX_TOKENS,
        "zero_stage": 0,
    }


def towline_sft(model: Path, data: Path, steps: int, precision: str) -> None:
    from towline.trainer.sft import Sft
    from towline.trainer.supervised_config import SftConfig

    examples = workload.demonstrations(model, data)
    config = SftConfig(**towline_settings(precision, len(examples)))
    sft = Sft(
        engine=towline_engine(model, config),
        config=config,
        examples=examples,
        rows=lambda step: range(len(examples)),
        total_steps=steps,
        on_progress=lambda phase: None,
    )
    workload.take_turns(steps, lambda step: sft.take_step(step)["loss/nll"])


def towline_dpo(model: Path, data: Path, steps: int, precision: str) -> None:
    from towline.trainer.completion_logprobs import completion_logprobs
    from towline.trainer.dpo import Dpo
    from towline.trainer.supervised_config import DpoConfig

    pairs = workload.preferences(model, data)
    config = DpoConfig(**towline_settings(precision, len(pairs)), beta=workload.BETA)
    engine, sequences = towline_engine(model, config), workload.both(pairs)
    reference = completion_logprobs(
        engine,
        config,
        sequences,
        trained=[workload.all_trained(sequence) for sequence in sequences],
        groups=[number // 2 for number in range(len(sequences))],
        on_progress=lambda: None,
    )
    dpo = Dpo(
        engine=engine,
        config=config,
        pairs=pairs,
        reference=reference.reshape(-1, 2),
        rows=lambda step: range(len(pairs)),
        total_steps=steps,
        on_progress=lambda phase: None,
    )
    workload.take_turns(steps, lambda step: dpo.take_step(step)["loss/preference"])


# --- bare PyTorch ------------------------------------------------------------------------------------------------


class MasterAdam:
    """AdamW on float32 copies of bfloat16 weights, as DeepSpeed has them; on the weights themselves in float32."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = list(model.parameters())
        is_float32 = self._weights[0].dtype == torch.float32
        self._masters = self._weights if is_float32 else [weight.detach().float() for weight in self._weights]
        self._adam = torch.optim.AdamW(
            self._masters, lr=workload.LEARNING_RATE, betas=workload.ADAM_BETAS, weight_decay=0.0, fused=True
        )

    def step(self) -> None:
        if self._masters is not self._weights:
            for master, weight in zip(self._masters, self._weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        nn.utils.clip_grad_norm_(self._masters, workload.MAX_GRADIENT_NORM)
        self._adam.step()
        self._adam.zero_grad()
        if self._masters is not self._weights:
            with torch.no_grad():
                for master, weight in zip(self._masters, self._weights, strict=True):
                    weight.copy_(master)


def bare_sft(model: Path, data: Path, steps: int, precision: str) -> None:
    """Rows sorted by length and padded on the right, as many as the budget holds; the head at trained tokens only."""
    from transformers import AutoModelForCausalLM

    examples = workload.demonstrations(model, data)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, precision)).train()
    adam = MasterAdam(policy)
    num_trained = sum(int(example.trained.sum()) for example in examples)

    def take_step(step: int) -> float:
        total = 0.0
        for ids_RL, labels_RL in padded_rows(examples):
            # Padding comes last, where a causal model never looks: no mask.
            hidden_RLD = policy.model(input_ids=ids_RL, use_cache=False).last_hidden_state
            is_trained_RL = labels_RL[:, 1:] != -100
            logits_NV = policy.lm_head(hidden_RLD[:, :-1][is_trained_RL]).float()
            loss = nn.functional.cross_entropy(logits_NV, labels_RL[:, 1:][is_trained_RL], reduction="sum")
            loss = loss / num_trained
            loss.backward()
            total += loss.item()
        adam.step()
        return total

    workload.take_turns(steps, take_step)


def padded_rows(examples) -> list[tuple[Tensor, Tensor]]:
    rest = sorted(examples, key=lambda example: len(example.tokens.token_ids), reverse=True)
    batches: list[tuple[Tensor, Tensor]] = []
    while rest:
        longest = len(rest[0].tokens.token_ids)
        count = max(1, workload.MAX_TOKENS // longest)
        ids_RL = torch.zeros((len(rest[:count]), longest), dtype=torch.int64)
        labels_RL = torch.full_like(ids_RL, -100)
        for row, example in enumerate(rest[:count]):
            length = len(example.tokens.token_ids)
            ids_RL[row, :length] = torch.from_numpy(example.tokens.token_ids)
            labels_RL[row, :length] = torch.tensor(workload.labels(example))
        batches.append((ids_RL, labels_RL))
        rest = rest[count:]
    return batches


# --- TRL ---------------------------------------------------------------------------------------------------------


def trl_settings(steps: int, micro_batches: int) -> dict:
    return {
        "max_steps": steps,
        "gradient_accumulation_steps": micro_batches,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "learning_rate": workload.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": workload.ADAM_BETAS[1],
        "max_grad_norm": workload.MAX_GRADIENT_NORM,
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
    }


def taking_turns(trainer_class: type) -> type:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        def __init__(self, trainer) -> None:
            self._trainer, self._turns = trainer, workload.Turns()

        def on_step_begin(self, args, state, control, **kwargs) -> None:
            self._trainer.step_loss = 0.0
            self._turns.wait()

        def on_step_end(self, args, state, control, **kwargs) -> None:
            self._turns.ended(self._trainer.step_loss)

    class TakingTurns(trainer_class):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.step_loss += loss.item()
            return loss

        def take_turns(self) -> None:
            self.add_callback(Callback(self))
            self.train()

    return TakingTurns


def trl_sft(model: Path, data: Path, steps: int, precision: str) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl.data_utils import pack_dataset

    examples = workload.demonstrations(model, data)
    rows = Dataset.from_list(
        [{"input_ids": each.tokens.token_ids.tolist(), "labels": workload.labels(each)} for each in examples]
    )
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            packing=True,
            max_length=workload.MAX_TOKENS,
            per_device_train_batch_size=1,
            **trl_settings(steps, len(pack_dataset(rows, workload.MAX_TOKENS, "bfd"))),
        )
        taking_turns(SFTTrainer)(model=str(model), args=config, train_dataset=rows).take_turns()


PAIRS_TOGETHER = 2
"""In TRL's forward."""


def trl_dpo(model: Path, data: Path, steps: int, precision: str) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = workload.preferences(model, data)
    rows = Dataset.from_list(
        [
            {
                "prompt_ids": pair.chosen.token_ids[: pair.chosen.num_prompt_tokens].tolist(),
                "chosen_ids": pair.chosen.token_ids[pair.chosen.num_prompt_tokens :].tolist(),
                "rejected_ids": pair.rejected.token_ids[pair.rejected.num_prompt_tokens :].tolist(),
            }
            for pair in pairs
        ]
    )

    class OfTokens(taking_turns(DPOTrainer)):
        """Takes the token ids that the others get, where TRL would make its own."""

        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder,
            beta=workload.BETA,
            max_length=None,
            precompute_ref_log_probs=True,
            per_device_train_batch_size=PAIRS_TOGETHER,
            **trl_settings(steps, len(pairs) // PAIRS_TOGETHER),
        )
        OfTokens(model=str(model), args=config, train_dataset=rows).take_turns()


CONTESTANTS: dict[str, Callable[[Path, Path, int, str], None]] = {
    "towline_sft": towline_sft,
    "bare_sft": bare_sft,
    "trl_sft": trl_sft,
    "towline_dpo": towline_dpo,
    "trl_dpo": trl_dpo,
}


def main(contestant: str, model: str, data: str, steps: str, precision: str) -> None:
    torch.set_num_threads(workload.THREADS)
    torch.manual_seed(0)
    CONTESTANTS[contestant](Path(model), Path(data), int(steps), precision)


if __name__ == "__main__":
    main(*sys.argv[1:])
