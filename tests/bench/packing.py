"""What packing saves: completions of 200 to 8,000 tokens (log-normal), in micro-batches of several kinds.

    python tests/bench/packing.py [--check] [--repeats N]

Forward and backward in float32 on one thread, in CPU seconds. SmolLM2 is cut to so many layers and tokens that layers
and head have the shares of the work that they have in the whole; lengths are divided by `SCALE`. All contestants
compute the head at completion tokens only. "packed, prompts shared" is what the trainer does. The plan is judged at
full size: a step of 4,096 completions on 8 ranks. --check exits 1 below the bars.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bench import workload
from towline.trainer.attention import register_varlen_attention
from towline.trainer.packing import PackedBatch, TokenSequence
from towline.trainer.packing_plan import PackingPlan
from towline.trainer.packing_rows import lay_out, pad_rows
from towline.trainer.packing_step import plan_step
from towline.trainer.packing_work import WorkModel, work_model
from towline.trainer.policy import Policy

SCALE = 16
CUT = 6
"""Of 30 layers and 49,152 tokens of the vocabulary, what is kept."""
GROUPS, GROUP_SIZE = 6, 8
PROMPT_TOKENS = 400 // SCALE
RANKS = 8
BARS = {"packing_vs_padded": 2.5, "packing_vs_sorted": 1.1, "packing_fill": 0.97, "packing_balance": 1 / 1.02}


def long_tailed(count: int, scale: int = 1) -> list[int]:
    """The quantiles of a log-normal distribution, shuffled: so few drawn at random would lack the tail."""
    quantiles = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count).numpy()
    lengths = np.exp(np.log(1000) + 0.9 * quantiles).clip(200, 8000)
    return np.random.default_rng(0).permutation(lengths / scale).astype(int).tolist()


def random_sequences(vocabulary: int) -> tuple[list[TokenSequence], list[int]]:
    """Groups of completions, and the group of each."""
    rng = np.random.default_rng(1)
    sequences: list[TokenSequence] = []
    groups: list[int] = []
    lengths = iter(long_tailed(GROUPS * GROUP_SIZE, SCALE))
    for group in range(GROUPS):
        prompt = rng.integers(0, vocabulary, PROMPT_TOKENS)
        for _ in range(GROUP_SIZE):
            token_ids = np.concatenate([prompt, rng.integers(0, vocabulary, next(lengths))])
            sequences.append(TokenSequence(token_ids=token_ids, num_prompt_tokens=PROMPT_TOKENS))
            groups.append(group)
    return sequences, groups


def cut_model(attention: str) -> Policy:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(workload.MODEL)
    config.num_hidden_layers //= CUT
    config.vocab_size //= CUT
    config.pad_token_id = None
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return Policy(model.train(), temperature=1.0)


def planned(
    sequences: Sequence[TokenSequence],
    groups: Sequence[int],
    work: WorkModel,
    *,
    packing: Literal["packed", "buckets"],
    shares_prompts: bool,
    max_tokens: int,
) -> tuple[list[PackedBatch], PackingPlan]:
    pieces, plan = plan_step(
        [sequence.num_prompt_tokens for sequence in sequences],
        [len(sequence.token_ids) - sequence.num_prompt_tokens for sequence in sequences],
        groups,
        num_ranks=1,
        max_tokens=max_tokens,
        packing=packing,
        shares_prompts=shares_prompts,
        work=work,
    )
    batches = [
        lay_out(
            [[sequences[index] for index in pieces[number].members] for number in numbers], is_padded=plan.is_padded
        )
        for numbers in plan.micro_batches[0]
    ]
    return batches, plan


def padded(sequences: Sequence[TokenSequence], *, max_tokens: int | None) -> list[PackedBatch]:
    """One batch of all, or what everyone does: sorted by length, as many as the budget holds when padded."""
    if max_tokens is None:
        return [pad_rows(sequences)]
    rest = sorted(sequences, key=lambda sequence: len(sequence.token_ids), reverse=True)
    batches: list[PackedBatch] = []
    while rest:
        count = max(1, max_tokens // len(rest[0].token_ids))
        batches.append(pad_rows(rest[:count]))
        rest = rest[count:]
    return batches


def cpu_seconds(policy: Policy, batches: Sequence[PackedBatch]) -> tuple[float, Tensor]:
    """Of forward and backward of all micro-batches, and the gradient."""
    policy.zero_grad()
    began = time.process_time()
    for batch in batches:
        policy(batch)[0].sum().backward()
    took = time.process_time() - began
    return took, torch.cat(
        [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
    )


def full_size_plan() -> PackingPlan:
    """Of 512 groups of 8 on 8 ranks, for the whole model: 135 million parameters, 30 layers, 9 heads of 64."""
    work = WorkModel(per_token=6 * 106_000_000, per_pair=12 * 30 * 9 * 64, per_target=8 * 28_000_000)
    prompts = np.repeat(np.random.default_rng(2).integers(50, 500, 512), 8).tolist()
    return plan_step(
        prompts, long_tailed(4096), np.repeat(np.arange(512), 8).tolist(), num_ranks=RANKS, max_tokens=8704,
        packing="packed", shares_prompts=True, work=work,
    )[1]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 below a bar")
    parser.add_argument("--repeats", type=int, default=2, help="of which the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)

    packed_policy, padded_policy = cut_model(register_varlen_attention()), cut_model("sdpa")
    sequences, groups = random_sequences(packed_policy.model.config.vocab_size)
    work = work_model(packed_policy.model)
    longest = max(len(sequence.token_ids) for sequence in sequences)
    budget = 2 * longest
    plan_of: dict[str, PackingPlan] = {}

    def packed(name: str, *, shares_prompts: bool, packing: Literal["packed", "buckets"] = "packed"):
        batches, plan_of[name] = planned(
            sequences, groups, work, packing=packing, shares_prompts=shares_prompts, max_tokens=budget
        )
        return batches

    contestants: dict[str, tuple[Policy, list[PackedBatch]]] = {
        "packed, prompts shared": (packed_policy, packed("packed, prompts shared", shares_prompts=True)),
        "packed": (packed_policy, packed("packed", shares_prompts=False)),
        "buckets": (padded_policy, packed("buckets", shares_prompts=False, packing="buckets")),
        "padded, sorted": (padded_policy, padded(sequences, max_tokens=budget)),
        "padded, one batch": (padded_policy, padded(sequences, max_tokens=None)),
    }
    best, gradients = dict.fromkeys(contestants, float("inf")), {}
    for _ in range(options.repeats):
        # In turns, so that what else the machine does hits all alike.
        for name, (policy, batches) in contestants.items():
            took, gradients[name] = cpu_seconds(policy, batches)
            best[name] = min(best[name], took)

    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    print(
        f"{len(sequences)} sequences of {min(len(s.token_ids) for s in sequences)} to {longest} tokens, {tokens} in all"
    )
    print(f"{'':24}{'micro-batches':>14}{'tokens':>8}{'CPU s':>9}{'tokens/s':>10}{'fill':>6}{'gradient':>10}")
    wanted = gradients["padded, one batch"]
    for name, (_, batches) in contestants.items():
        computed = sum(len(batch.token_ids) for batch in batches)
        fill = f"{plan_of[name].fill:6.2f}" if name in plan_of else f"{'':6}"
        off = float((gradients[name] - wanted).norm() / wanted.norm())
        print(f"{name:24}{len(batches):14}{computed:8}{best[name]:9.2f}{tokens / best[name]:10.0f}{fill}{off:10.1e}")
    plan = full_size_plan()
    print(
        f"plan of 4,096 completions on {RANKS} ranks: {len(plan.work[0])} micro-batches each, fill {plan.fill:.3f}, "
        f"padding saved {plan.padding_saved:.1%}, imbalance {plan.rank_imbalance:.2%} of ranks and "
        f"{plan.moment_imbalance:.2%} of moments"
    )
    ratios = {
        "packing_balance": 1 / (1 + plan.rank_imbalance),
        "packing_fill": plan.fill,
        "packing_vs_sorted": best["padded, sorted"] / best["packed, prompts shared"],
        "packing_vs_padded": best["padded, one batch"] / best["packed, prompts shared"],
    }
    for name, ratio in ratios.items():
        print(f"{name} ratio {ratio:.2f} bar {BARS[name]:.2f}")
    return int(options.check and any(ratio < BARS[name] for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
