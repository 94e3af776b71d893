"""`[data]` and `[evaluation]`: which tokens, in which order."""

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from steelyard.spec.section import Section

# A prefix of a .bin/.idx pair, or [weight, prefix].
Source = str | Annotated[tuple[float, str], Field(strict=False)]
Sources = Annotated[tuple[Source, ...], Field(strict=False)]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
# One validation set, or a table of named ones.
Validation = Annotated[
    Annotated[Sources, Tag("list")] | Annotated[dict[SetName, Sources], Tag("table")],
    Discriminator(lambda value: "table" if isinstance(value, dict) else "list"),
]


class Data(Section):
    """`train` alone is divided by `split`; with `validation` or `test` given, each file is used whole.

    `validation` may be a table of named sets, which are evaluated one by one.
    """

    train: Sources = ()
    validation: Validation = ()
    test: Sources = ()
    split: str = "949,50,1"
    tokenizer: str = "byte"
    mask_loss_at_eod: bool = False
    reset_positions: bool = False
    reset_attention: bool = False
    cache: str = "data/cache"


class Evaluation(Section):
    """Every `every_steps` steps (0: only where `steps` > 0, at the end), over `steps` global batches."""

    every_steps: int = Field(0, ge=0)
    steps: int = Field(10, ge=0)
