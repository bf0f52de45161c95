"""What GPU tests share with the end-to-end tests, and the choice of decode workers."""

import pytest

from tests.e2e.conftest import conversions

__all__ = ["conversions", "pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--decodes``, where ``tests/gpu`` is named on the command line."""
    parser.addoption(
        "--decodes",
        default="",
        help="parts of names, comma-separated: which decode workers test_serving.py runs",
    )
