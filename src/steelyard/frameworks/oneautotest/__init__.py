"""OneAutoTest: the benchmark scripts of OneFlow."""
