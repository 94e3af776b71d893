"""The tiny run T1, shared with the tests of training."""

from tests.train.conftest import corpus, t1  # noqa: F401  # fixtures
