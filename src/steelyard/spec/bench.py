"""`[bench]`: how `steelyard bench` measures, and the arms it sets beside each other."""

from typing import Annotated

from pydantic import Field

from steelyard.spec.section import Section

Values = Annotated[tuple[str, ...], Field(strict=False)]


class Bench(Section):
    """`warmup` steps are run and not counted, then `steps` are. Arms take turns, `rounds` times each.

    arms: name -> the values that make it, as on the command line (`["parallel.tensor=2"]`); without any the run as
    written is the one arm. commands: name -> another program's command, whose log is read. `world`: ranks of our arms;
    0: as many as their layout needs. An arm that takes longer than `timeout_minutes` is ended.
    """

    warmup: int = Field(5, ge=0)
    steps: int = Field(20, ge=1)
    rounds: int = Field(3, ge=1)
    timeout_minutes: float = Field(30.0, gt=0)
    world: int = Field(0, ge=0)
    arms: dict[str, Values] = Field(default_factory=dict)
    commands: dict[str, str] = Field(default_factory=dict)

    @property
    def excluded(self) -> int:
        """Steps before the timed window. The first two never count: the first makes connections, memory and kernels,
        and in the second a run of ours counts its traffic."""
        return max(2, self.warmup)
