"""What the plan of a step asks of a model."""

from typing import Protocol

from towline.trainer.packing_work import WorkModel


class PackedModel(Protocol):
    """A policy or a reward model."""

    @property
    def shares_prompts(self) -> bool:
        """Whether completions of one prompt may be computed after one copy of it."""
        ...

    @property
    def work(self) -> WorkModel:
        """What a step's balance goes by."""
        ...
