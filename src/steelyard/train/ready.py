"""What can be said about a run before torch is loaded: who starts its ranks, and whether it can be run at all."""

import os

from steelyard.data.store import Dataset
from steelyard.hardware import find
from steelyard.spec import Loaded, error


def outer_world() -> int | None:
    """Number of ranks of the launcher that started this process (torchrun, srun); None without one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if "SLURM_PROCID" in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        return int(os.environ["SLURM_STEP_NUM_TASKS"])
    return None


def check(loaded: Loaded) -> None:
    """Raises UserError for what the spec can say and `train` cannot run (T002, T003), an unknown chip (H001), or
    training data that is not there or not whole (D codes)."""
    run = loaded.run
    find(run.hardware.chip)
    for name, value, runnable, advice in (
        ("parallel.context", run.parallel.context, 1, "set it to 1"),
        ("engine.framework", run.engine.framework, "steelyard", "leave [engine] out; it is for plans of other systems"),
    ):
        if value != runnable:
            raise error("T003", name, name=name, value=value, advice=advice)
    if not run.data.train:
        raise error("T002", "data.train")
    for source in run.data.train:
        Dataset(source if isinstance(source, str) else source[1])
