"""The whole run: every section, and what follows from them together."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from steelyard.spec.batch import Batch, complete
from steelyard.spec.bench import Bench
from steelyard.spec.data import Data, Evaluation
from steelyard.spec.model import Model
from steelyard.spec.optimizer import LearningRate, Optimizer
from steelyard.spec.parallel import Parallel
from steelyard.spec.precision import Precision, Recompute
from steelyard.spec.section import Section

DEFAULT_GLOBAL_BATCH = 64
Amount = Annotated[int, Field(ge=0)]


class Length(Section):
    """How long the run is: exactly one of the three is set."""

    steps: Annotated[int, Field(ge=1)] | None = None
    samples: Annotated[int, Field(ge=1)] | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _default(cls, given: Any) -> Any:
        return {"steps": 100} if given == {} else given


class Checkpoint(Section):
    """A checkpoint is also written at the end and on a stop signal. 0 switches an interval off.

    A run goes on from its own newest checkpoint; `load` (a run folder or one checkpoint) is where a run that has none
    begins, or the checkpoint of its own that it goes back to. `accept` names the keys that may differ from the run that
    saved although they change what the network computes or which tokens come next.

    While an asynchronous save is written, `overlap_steps` steps are computed; the last of them counts only once the
    save is sealed. So a kill loses at most `every_steps` + `overlap_steps` - 1 steps, as long as saves succeed.
    """

    every_steps: Amount = 1000
    every_minutes: float = Field(0.0, ge=0)
    keep: int = Field(3, ge=1)
    asynchronous: bool = True
    overlap_steps: int = Field(1, ge=1)
    load: str = ""
    accept: Annotated[tuple[str, ...], Field(strict=False)] = ()


class Record(Section):
    folder: str
    every_steps: int = Field(1, ge=1)
    tensorboard: bool = True


class Stop(Section):
    """Reasons to stop before the end; 0 or "" switches one off.

    A step with a non-finite loss or gradient norm is always shown and counted and never updates the weights; `on_nan`
    says whether the run goes on after it, and `nan_limit` how many in a row it survives. A rank that waits longer than
    `hang_seconds` for another ends the run.
    """

    minutes: float = Field(0.0, ge=0)
    step_multiple: Amount = 0
    file: str = ""
    on_nan: Literal["skip", "stop"] = "skip"
    nan_limit: int = Field(10, ge=1)
    hang_seconds: float = Field(600.0, gt=0)


class Hardware(Section):
    """`chip` is a name in hardware/chips.toml; "" means unknown, and unknown stays unknown. `peak_flops` is
    the dense FLOP/s of one device in the compute dtype, for a device that is not listed."""

    chip: str = ""
    devices_per_node: int = Field(8, ge=1)
    peak_flops: float | None = Field(None, gt=0)


Stored = Literal["fp32", "bf16", "fp16", "fp8"]


class Engine(Section):
    """The framework a plan is made for, and what only that framework knows. None: not said, so the framework's own
    default or choice.

    attention: the kernel asked for. implementation: of Megatron's layers. optimizer_instances: copies of the sharded
    optimizer within the data ranks. microbatch_group: Megatron's `--microbatch-group-size-per-virtual-pipeline-stage`.
    mask_in_loader: whether the loader makes a [sequence, sequence] mask per sample. reduce_bucket, allgather_bucket:
    DeepSpeed's, in elements. inputs_on_device: LiBai's `input_placement_device`. overlap_buffers: Transformer Engine's
    for tensor-parallel communication.
    """

    framework: str = "steelyard"
    version: str = ""
    attention: Literal["flash", "fused", "unfused"] | None = None
    implementation: Literal["transformer_engine", "local"] | None = None
    optimizer_instances: int | None = Field(None, ge=1)
    microbatch_group: int | None = Field(None, ge=1)
    mask_in_loader: bool | None = None
    deterministic: bool | None = None
    fp32_residual: bool | None = None
    cross_entropy: Literal["unfused", "native", "transformer_engine"] | None = None
    master_dtype: Stored | None = None
    moment_dtypes: Annotated[tuple[Stored, Stored], Field(strict=False)] | None = None
    fp8: Literal["e4m3", "hybrid"] | None = None
    fp8_parameters: bool | None = None
    reduce_bucket: int | None = Field(None, ge=1)
    allgather_bucket: int | None = Field(None, ge=1)
    offload: Literal["optimizer", "optimizer+parameters"] | None = None
    inputs_on_device: bool | None = None
    overlap_buffers: bool | None = None


class Identity(Section):
    """The keys that stand before the first section."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(1234, ge=0, lt=2**32)


class Run(Identity):
    """A legal run. Building one checks every rule that spans sections.

    Raises `errors.UserError` with all broken rules at once.
    """

    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    parallel: Parallel = Parallel()
    batch: Batch
    precision: Precision = Field(default_factory=lambda: Precision.model_validate({}))
    recompute: Recompute = Recompute()
    optimizer: Optimizer = Optimizer()
    learning_rate: LearningRate = LearningRate()
    length: Length = Length(steps=100)
    data: Data = Data()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    record: Record
    stop: Stop = Stop()
    hardware: Hardware = Hardware()
    engine: Engine = Engine()
    bench: Bench = Bench()

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {**given, "batch": complete_batch(given), "record": complete_record(given)}

    @model_validator(mode="after")
    def _legal(self) -> "Run":
        from steelyard.spec.check import problems
        from steelyard.spec.errors import UserError

        if found := problems({name: getattr(self, name) for name in type(self).model_fields}):
            raise UserError(found)
        return self

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the weights."""
        return self.parallel.sharded(self.precision)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one full global batch (after any ramp)."""
        return self.batch.global_batch_size * self.model.seq_length

    @property
    def padded_vocab_size(self) -> int:
        return self.model.padded_vocab_size(self.parallel.tensor)


def complete_batch(given: dict[str, Any]) -> Any:
    """`[batch]` with the missing of global, micro and accumulation derived; wrong types are left to the fields."""
    batch, parallel = given.get("batch", {}), given.get("parallel", {})
    if isinstance(parallel, Parallel):
        parallel = parallel.model_dump()
    if not isinstance(batch, dict) or not isinstance(parallel, dict):
        return batch
    keys = ("global_batch_size", "micro_batch_size", "accumulation")
    sizes = {**{key: batch.get(key) for key in keys}, "data": parallel.get("data", 1)}
    sizes["pipeline"] = parallel.get("pipeline", 1)
    given_or_size = {key: n for key, n in sizes.items() if n is not None or key not in keys}
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in given_or_size.values()):
        return {**dict.fromkeys(keys, 1), **batch}
    if not any(batch.get(key) for key in keys):
        sizes["global_batch_size"] = DEFAULT_GLOBAL_BATCH
    return {**batch, **dict(zip(keys, complete(**sizes), strict=True))}


def complete_record(given: dict[str, Any]) -> Any:
    record = given.get("record", {})
    if isinstance(record, dict):
        return {"folder": f"runs/{given.get('name', 'run')}", **record}
    return record
