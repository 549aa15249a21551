"""A checkpoint of the gateway's tests."""

from tests.unit.gateway.conftest import checkpoint

__all__ = ["checkpoint"]
