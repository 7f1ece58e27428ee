"""The trainer's ranks wait together: rank 0 looks at the control store and decides, the others are told.

While they wait every rank stands ready to publish the present weights again: an engine that was started anew has
those of the model folder, and when it is the only one left, nobody could go on before it has better ones.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from towline.jobs.role import Role

_PUBLISH = "publish"
_POLL_S = 0.02


@dataclass(slots=True)
class Agreement:
    """
    Args:
        has_lost_every_engine: asked on rank 0.
        publish_again: called on every rank.
    """

    role: Role
    has_lost_every_engine: Callable[[], bool]
    publish_again: Callable[[], object]
    _count: int = 0

    def wait(self, phase: str, decide: Callable[[], str | None]) -> str:
        """What `decide` answers on rank 0 once it is not None."""
        while True:
            self._count += 1
            name = f"decision/{self._count}"
            if dist.get_rank() == 0:
                self.role.store.set(name, self._decide(phase, decide))
            decision = self.role.store.wait(name, math.inf, lambda: self.role.heartbeat.beat(phase))
            if decision != _PUBLISH:
                return decision
            self.publish_again()

    def _decide(self, phase: str, decide: Callable[[], str | None]) -> str:
        while (decision := decide()) is None:
            if self.has_lost_every_engine():
                return _PUBLISH
            self.role.heartbeat.beat(phase)
            time.sleep(_POLL_S)
        return decision
