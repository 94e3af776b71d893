"""`steelyard check`: is this run file legal, and what does it come to?"""

from typing import TYPE_CHECKING

from steelyard.cli.arguments import Json, Overrides, RunFile, World

if TYPE_CHECKING:
    from steelyard.spec import Run

HELP = "Check a run file and print every value of the run with where it came from."


def check(run_file: RunFile, overrides: Overrides = None, world: World = None, json: Json = False) -> None:
    from steelyard.hardware import find
    from steelyard.spec import load, write

    loaded = load(run_file, overrides or (), world)
    find(loaded.run.hardware.chip)
    if json:
        from json import dumps

        config = write.as_config(loaded.run)
        origins = {key: str(origin) for key, origin in loaded.origins.items()}
        notes = [{"key": note.key, "text": note.text} for note in loaded.notes]
        print(dumps({"config": config, "origins": origins, "notes": notes, "ramp": _ramp(loaded.run)}, indent=2))
        return
    print(write.dumps(loaded.run, lambda key: str(loaded.origin(key))))
    for row in _ramp(loaded.run):
        print(
            "# ramp: global batch {global_batch_size:>6,}: {steps:,} steps from sample {first_sample:,}".format(**row)
        )
    for note in loaded.notes:
        print(f"# note: {note.key}: {note.text}")


def _ramp(run: "Run") -> list[dict[str, int]]:
    """The levels of the batch ramp, none without one."""
    from dataclasses import asdict

    from steelyard.spec import progress

    if run.batch.ramp is None:
        return []
    total = progress.total_samples(run.length, run.batch, run.model.seq_length)
    return [asdict(level) for level in progress.levels(run.batch, total)]
