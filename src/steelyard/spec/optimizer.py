"""`[optimizer]` and `[learning_rate]`. The schedule itself is a function of samples: `progress.py`."""

from typing import Annotated, Literal

from pydantic import Field

from steelyard.spec.section import Section

Fraction = Annotated[float, Field(ge=0, lt=1)]
Amount = Annotated[int, Field(ge=0)]


class Optimizer(Section):
    name: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    clip_grad: float = Field(1.0, ge=0)  # 0: no clipping


class LearningRate(Section):
    """Warm-up then decay. Amounts are steps, samples, or a fraction of the decay; unset ones are None."""

    peak: float = Field(1.5e-4, ge=0)
    minimum: float = Field(0.0, ge=0)
    decay: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    warmup_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    warmup_steps: Amount | None = None
    warmup_samples: Amount | None = None
    decay_steps: Amount | None = None
    decay_samples: Amount | None = None
    wsd_decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    first_update: Literal["warm", "zero"] = "warm"
