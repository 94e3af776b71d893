"""Arguments of Megatron-LM and Megatron-DeepSpeed, with DeepSpeed's JSON, as a translation."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.frameworks.deepspeed import config as deepspeed
from steelyard.frameworks.fates import Row, Told, Translation, named, origins
from steelyard.frameworks.megatron import flags as megatron_flags
from steelyard.frameworks.megatron import given as megatron_given
from steelyard.frameworks.megatron import script as megatron
from steelyard.frameworks.megatron_deepspeed import flags as fork_flags
from steelyard.frameworks.megatron_deepspeed import script as fork
from steelyard.spec.errors import UserError, problem
from steelyard.translate import files
from steelyard.translate.launch import Launch
from steelyard.translate.shell import Script

# programs of Megatron's that train something else
OTHERS = re.compile(
    r"(?:^|_)(bert|t5|ict|vision|vit|swin|retro|mamba|vlm|mimo|realm|prefix_lm|dino|hybrid|t0|rl)(?:_|$)"
)
# what Megatron-LM does not start without, and the keys that have a default in a run file
NEEDED = {("lr",): "learning_rate.peak", ("micro-batch-size",): "batch.micro_batch_size",
          ("train-iters", "train-samples", "train-tokens"): "length"}  # fmt: skip


def of_words(
    words: Sequence[Told], source: str, started: Launch | None = None, script: Script | None = None
) -> Translation:
    """Arguments of Megatron-LM or Megatron-DeepSpeed."""
    is_fork = any(_of_fork(word.text) for word in words)
    weighed = megatron_given.weigh(words, fork_flags.find if is_fork else megatron_flags.find, source)
    rows = [*(started.rows if started else ()), *weighed.rows, *_cut_off(script, source)]
    values: dict[str, Any] = {}
    if started is not None and (other := OTHERS.search(Path(started.program).stem)):
        advice = f"only GPT pretraining is known here, not {other.group(1)}"
        place = f"{Path(source).name}:{started.line}"
        weighed.problems.append(problem("F005", started.program, place, flag=started.program, advice=advice))
    if not weighed.problems:  # what is missing for want of a value is no news
        try:
            values = _fork(weighed, rows, source, script) if is_fork else megatron.values(weighed.arguments)
            values = named(megatron.trained(values, weighed.arguments), source)
        except UserError as failure:
            weighed.problems += failure.problems
        except (ArithmeticError, KeyError, TypeError, ValueError) as failure:
            detail = f"a value is none that the framework has: {failure}"
            weighed.problems.append(problem("F018", place=source, path=source, detail=detail, advice="correct it"))
    world, said = _ranks(started, values)
    notes = [
        *weighed.notes,
        *_silent(weighed),
        *(started.notes if started else ()),
        *(script.notes if script else ()),
        *said,
    ]
    framework = fork.NAME if is_fork else "Megatron-LM"
    launched = {"program": started.program, "line": str(started.line)} if started else {}
    return Translation(framework, source, values, origins(values, rows, f"default of {framework}"), tuple(rows), world,
                       tuple(dict.fromkeys(notes)), tuple(weighed.problems), launched)  # fmt: skip


def _silent(weighed: megatron_given.Weighed) -> Iterator[str]:
    """What the script leaves out, and the weights that it would begin from."""
    for flags, key in NEEDED.items():
        if not any(weighed.arguments.has(flag) for flag in flags):
            yield f"no --{' or --'.join(flags)} is given: {key} has the run file's own default"
    texts = {megatron_flags.plain(row.flag): row.value for row in weighed.rows}
    if texts.get("load") and texts["load"] != texts.get("save", texts["load"]):
        yield f"it starts from a checkpoint in {texts['load']} if there is one, which a run here does not: see " \
              "steelyard checkpoint convert and checkpoint.load"  # fmt: skip


def _fork(weighed: megatron_given.Weighed, rows: list[Row], source: str, script: Script | None) -> dict[str, Any]:
    """Values of Megatron-DeepSpeed with its JSON, whose keys become rows too."""
    config = _json(weighed, source, script)
    if config is not None:
        rows += deepspeed.rows(config)
    if weighed.arguments.has("deepspeed"):
        weighed.notes += fork.notes(weighed.arguments, config)
    return fork.values(weighed.arguments, config)


def _ranks(started: Launch | None, values: Mapping[str, Any]) -> tuple[int | None, list[str]]:
    """The launcher's number of ranks, unless the layout cannot be laid over it: examples leave that to their reader."""
    world, parallel = started.world if started else None, values.get("parallel", {})
    need = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1)
    if world is None or need < 1 or world % need == 0:
        return world, []
    return None, [f"the launcher starts {world} ranks and the layout takes {need}: give --world, a multiple of {need}"]


def _of_fork(text: str) -> bool:
    name = megatron_flags.plain(text.partition("=")[0])
    return text.startswith("--") and (name in ("deepspeed", "deepspeed-config") or fork_flags.added(name))


def _json(weighed: megatron_given.Weighed, source: str, script: Script | None) -> deepspeed.Config | None:
    """DeepSpeed's JSON, which the script writes or which stands beside it; None where it is not at hand."""
    row = next((row for row in weighed.rows if megatron_flags.plain(row.flag) == "deepspeed-config"), None)
    text = files.named(row.value, script, Path(source).parent) if row is not None and row.value else None
    return None if text is None else deepspeed.parse(text.text, text.place, text.lines)


def _cut_off(script: Script | None, source: str) -> list[Row]:
    """Flags on lines that belong to no command: a comment between continued lines ends the command before it."""
    why = "it is no part of the command: a comment or an empty line between continued lines ends it"
    return [
        Row(word.text, "", "refused", "", why, f"{Path(source).name}:{word.line}")
        for command in (script.commands if script else ())
        if command.words and command.words[0].text.startswith("--")
        for word in command.words
        if word.text.startswith("--")
    ]
