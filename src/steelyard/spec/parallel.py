"""`[parallel]`: how the ranks share the work."""

from typing import Annotated, Literal

from pydantic import Field

from steelyard.spec.precision import Precision
from steelyard.spec.section import Section

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
Size = Annotated[int, Field(ge=1)]


class Parallel(Section):
    """The mesh. World size = data x context x tensor x pipeline; the loader replaces `data = "auto"` by a number."""

    tensor: Size = 1
    sequence: bool = False
    context: Size = 1
    pipeline: Size = 1
    stages: Literal["balanced"] | Annotated[tuple[Size, ...], Field(strict=False)] = "balanced"
    pipeline_schedule: Schedule = "1f1b"
    virtual: Size = 1
    data: Size = 1
    replicate: Size = 1
    zero: Literal[0, 1, 2, 3] = 1
    compile: bool = False

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.tensor * self.context * self.pipeline

    @property
    def world_size(self) -> int:
        return self.model_ranks * self.data

    @property
    def num_stages(self) -> int:
        """Pipeline stages in all: ranks along the pipeline x model chunks on each."""
        return self.pipeline * self.virtual

    @property
    def shard(self) -> int:
        """Data ranks that share one set of ZeRO shards."""
        return self.data // self.replicate

    @property
    def shards(self) -> int:
        """Parts that a parameter is cut into over the data ranks: one at ZeRO 0."""
        return self.shard if self.zero else 1

    @property
    def puts_off_weights(self) -> bool:
        """Whether the schedule computes the gradients of weights apart from those of inputs."""
        return self.pipeline > 1 and self.pipeline_schedule in ("zero_bubble", "zbv")

    def sharded(self, precision: Precision) -> bool:
        """Whether FSDP holds the weights: not where one data rank computes in its master dtype throughout."""
        return self.data > 1 or not precision.compute == precision.gradients == precision.master
