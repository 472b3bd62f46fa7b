from __future__ import annotations

from collections.abc import Iterator

import pytest

from trigrid.check.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight worker processes for all tests."""
    with Pool(8) as workers:
        yield workers
