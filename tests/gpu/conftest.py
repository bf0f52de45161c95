"""Fixtures that GPU tests share with the end-to-end tests."""

from tests.e2e.conftest import conversions

__all__ = ["conversions"]
