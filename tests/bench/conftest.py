from tests.train.conftest import corpus, t1

__all__ = ["corpus", "t1"]
