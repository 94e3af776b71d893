"""What the ranks of a run send each other in a step, as a part of its plan."""

from typing import Any

from steelyard.predict import traffic
from steelyard.spec.run import Run


def as_json(run: Run) -> dict[str, Any] | None:
    """The transfers of one rank of each pipeline rank, equal neighbours once. None for another framework's engine."""
    if run.engine.framework != "steelyard":
        return None
    ranks: list[dict[str, Any]] = []
    for pipeline_rank in range(run.parallel.pipeline):
        transfers = [dict(vars(entry)) for entry in traffic.on_rank(run, pipeline_rank)]
        if ranks and ranks[-1]["transfers"] == transfers:
            ranks[-1]["stages"].append(pipeline_rank)
        else:
            ranks.append({"stages": [pipeline_rank], "transfers": transfers})
    return {"ranks": ranks, "says": SAYS}


SAYS = {
    "transfers": "Collectives and messages of one rank in one step at the full global batch, from the batch's count to "
    "the update: `calls` of a kind over a mesh axis and the `bytes` of their whole tensors. A run counts its own.",
    "stages": "The pipeline ranks that are alike in this.",
}
