"""The router over fake workers that the router's own tests use."""

from tests.unit.router.conftest import harness, make_harness

__all__ = ["harness", "make_harness"]
