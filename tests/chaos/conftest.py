from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills", type=int, default=5, help="How often the run is killed (pytest tests/chaos --kills 50)."
    )
    parser.addoption("--chaos-seed", type=int, default=1, help="What decides when, and who.")
