"""Parts of the reward that are the score of a reward model, and how they join those that judge the text."""

import hashlib
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.total import Term
from towline.rollout.rewards.verdict import Verdict
from towline.storage.checkpoints import model_identity
from towline.storage.errors import ConfigError
from towline.storage.records import Score, ScoreStatus

_MODULE = "towline.rollout.reward_model"
"""By name: who has no such part needs no torch."""


class TokenScorer(Protocol):
    """What a part asks of a reward model."""

    def score(
        self, texts: Sequence[NDArray[np.int32]], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Verdict]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScore:
    term: Term
    identity: str
    """`model_identity` of the folder, as it was loaded."""
    model: TokenScorer

    @classmethod
    def load(cls, part: RewardConfig, num_threads: int) -> Self | None:
        """None if the part is no reward model.

        Raises:
            InputError: the folder holds none, or there is no torch here.
        """
        if part.model is None:
            return None
        try:
            module = importlib.import_module(_MODULE)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f'rewards: {part.part_name}: use = "{part.use}" needs torch and transformers ({error}): bash '
                "env/setup.sh"
            ) from error
        identity = model_identity(part.model)
        return cls(term=part.term, identity=identity, model=module.RewardModel(part.model, num_threads=num_threads))

    def added_to_hash(self, code_hash: str) -> str:
        """Fingerprint of the weights and the code of this part and of those that `code_hash` is of."""
        code = b"".join(path.read_bytes() for path in (Path(__file__), Path(__file__).parents[1] / "reward_model.py"))
        what = f"{code_hash} {self.term.rule} {self.identity}\n".encode()
        return hashlib.blake2b(what + code, digest_size=16).hexdigest()


def with_model_scores(score: Score, terms: Sequence[Term], verdicts: Sequence[Verdict]) -> Score:
    """The score with these parts and their contributions, as `mixture.score` would have joined them.

    Args:
        verdicts: of each term.
    """
    said = {term.name: verdict for term, verdict in zip(terms, verdicts, strict=True)}
    parts = score.parts | {name: math.nan if one.value is None else one.value for name, one in said.items()}
    is_failed = any(one.status is ScoreStatus.FAILED for one in said.values())
    return replace(
        score,
        parts=parts,
        part_status=score.part_status | {name: one.status for name, one in said.items()},
        part_seconds=score.part_seconds | {name: one.seconds for name, one in said.items()},
        total=score.total + sum(term.contribution(parts) for term in terms),
        status=ScoreStatus.FAILED if is_failed else score.status,
        seconds=score.seconds + sum(one.seconds for one in said.values()),
        detail="; ".join(
            filter(None, [score.detail, *(f"{name}: {one.detail}" for name, one in said.items() if one.detail)])
        ),
    )
