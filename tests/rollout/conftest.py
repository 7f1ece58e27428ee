from collections.abc import Iterator
from pathlib import Path

import pytest

from scoring_pools import HOSTILE, LIMIT_S, NUM_WORKERS, rewards
from towline.rollout.scoring import ScoringPool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "hostile.py").write_text(HOSTILE)
    return folder


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ScoringPool]:
    with ScoringPool(rewards("hostile.py:grade"), NUM_WORKERS, LIMIT_S, folder) as pool:
        yield pool
