"""Two halves of a dataset of pairs that share no prompt: what one reward model learns from, the other has not seen."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from towline.storage.example_config import Half
from towline.storage.records import Preference, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfCount:
    half: Half
    num_pairs: int
    num_prompts: int
    """Different ones."""


def half_of(prompt: Sequence[Turn], seed: int) -> Half:
    """Which half all pairs of a prompt belong to, each with a chance of 1/2.

    It follows from the prompt's text and the seed alone: neither the order of the rows nor what else is in the dataset
    matters, so that rows which are added later move no pair from one half to the other.
    """
    text = json.dumps([seed, [(turn.role, turn.content) for turn in prompt]])
    first_byte, *_ = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "first" if first_byte < 128 else "second"


def count_halves(pairs: Iterable[Preference], seed: int) -> list[HalfCount]:
    """The first half, then the second; one that has nothing is counted too."""
    prompts: dict[Half, list[tuple[Turn, ...]]] = {half: [] for half in get_args(Half)}
    for pair in pairs:
        prompts[half_of(pair.prompt, seed)].append(pair.prompt)
    return [HalfCount(half=half, num_pairs=len(found), num_prompts=len(set(found))) for half, found in prompts.items()]
