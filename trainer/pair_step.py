"""The micro-batches of one optimiser step on pairs; both completions of a pair are in one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor

from towline.trainer.config import EngineConfig
from towline.trainer.packed_model import PackedModel
from towline.trainer.packing import PackedBatch
from towline.trainer.packing_pairs import lay_out_pairs, plan_pairs
from towline.trainer.packing_plan import PackingPlan
from towline.trainer.token_examples import TokenPair


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStep:
    pairs: Sequence[TokenPair]
    plan: PackingPlan
    shares_prompts: bool

    def batches(self) -> Iterator[tuple[PackedBatch, list[int]]]:
        """Micro-batches of this rank, each with the indices of its pairs; the same number on every rank."""
        for numbers in self.plan.micro_batches[dist.get_rank()]:
            pairs = [self.pairs[number] for number in numbers]
            batch = lay_out_pairs(pairs, is_padded=self.plan.is_padded, shares_prompts=self.shares_prompts)
            yield batch, list(numbers)

    @property
    def num_micro_batches(self) -> int:
        return len(self.plan.micro_batches[0])

    def metrics(self) -> dict[str, float]:
        return {
            "tokens/trained": self.plan.num_tokens,
            "tokens/fill": self.plan.fill,
            "tokens/padding_saved": self.plan.padding_saved,
            "tokens/imbalance": self.plan.rank_imbalance,
        }


def plan_pair_step(pairs: Sequence[TokenPair], config: EngineConfig, model: PackedModel) -> PairStep:
    plan = plan_pairs(
        [pair.chosen.num_prompt_tokens for pair in pairs],
        [num_completion_tokens(pair)[0] for pair in pairs],
        [num_completion_tokens(pair)[1] for pair in pairs],
        num_ranks=dist.get_world_size(),
        max_tokens=config.max_tokens_per_microbatch,
        packing=config.packing,
        shares_prompts=model.shares_prompts,
        work=model.work,
    )
    return PairStep(pairs=pairs, plan=plan, shares_prompts=model.shares_prompts)


def of_pairs(
    pair_loss: Callable[[Sequence[int], Tensor], Tensor], members: Sequence[int], sizes: Sequence[int]
) -> Callable[[Tensor, slice], Tensor]:
    """A loss of some pairs, given their numbers and log-probs, as a loss of a stretch of tokens that holds whole pairs.

    Args:
        members: the numbers of a micro-batch's pairs, in order.
        sizes: completion tokens of each, >= 1.
    """
    bounds = [0, *accumulate(sizes)]

    def loss(logprobs_C: Tensor, tokens: slice) -> Tensor:
        return pair_loss(members[bounds.index(tokens.start) : bounds.index(tokens.stop)], logprobs_C)

    return loss


def num_completion_tokens(pair: TokenPair) -> tuple[int, int]:
    """Of chosen and rejected."""
    prompt = pair.chosen.num_prompt_tokens
    return len(pair.chosen.token_ids) - prompt, len(pair.rejected.token_ids) - prompt
