from collections.abc import Iterator

import pytest

from towline.rollout.sandbox.sandbox import sandbox


@pytest.fixture(scope="package", autouse=True)
def end_of_the_sandbox() -> Iterator[None]:
    """Of this process's own: otherwise it ends with the process, and says so in a warning."""
    yield
    sandbox().close()
