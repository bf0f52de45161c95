"""Options of tests that may take as long as one likes."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=300, help="how long the soak lasts")
    parser.addoption("--soak-seed", type=int, default=1, help="what happens in the soak")
