from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from trigrid.check.pool import Pool

# torch remembers the last collectives of a process; its ring would fill for hundreds of steps, and look like a leak.
os.environ["TORCH_FR_BUFFER_SIZE"] = "200"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight worker processes for all tests."""
    with Pool(8) as workers:
        yield workers
