from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.slurm import Slurm, cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real Slurm of four nodes."""
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found
