"""The cpu backend, with the rows of a test in front of its own where a test wants that."""

from tests.unit.dispatch.tables import cpu, install, rms_norm

__all__ = ["cpu", "install", "rms_norm"]
