"""Completions that no engine of ours wrote, as a grader takes them."""

from collections.abc import Sequence

import numpy as np

from towline.storage.records import Completion, FinishReason, Prompt, RolloutGroup


def text_group(row: int, gold: str, texts: Sequence[str], num_tokens: Sequence[int] | None = None) -> RolloutGroup:
    """
    Args:
        num_tokens: of each text; default: none. They are all 0, and take no memory however many there are.
    """
    counts = [0] * len(texts) if num_tokens is None else num_tokens
    return RolloutGroup(
        prompt=Prompt(row=row, text="", answer=gold),
        prompt_token_ids=np.zeros(0, np.int32),
        completions=tuple(_completion(text, count) for text, count in zip(texts, counts, strict=True)),
    )


def _completion(text: str, num_tokens: int) -> Completion:
    return Completion(
        token_ids=np.broadcast_to(np.int32(0), num_tokens),
        logprobs=np.broadcast_to(np.float32(0), num_tokens),
        versions=np.broadcast_to(np.uint32(0), num_tokens),
        finish_reason=FinishReason.STOP,
        seed=0,
        text=text,
    )
