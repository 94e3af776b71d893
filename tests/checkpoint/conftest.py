"""The tiny run of the field reports, as tests/train has it."""

from tests.train.conftest import corpus, t1  # noqa: F401  # fixtures
