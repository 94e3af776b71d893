"""What another framework's training says, whatever it is written in: the one way in for every verb."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.frameworks.fates import Told, Translation, named, told
from steelyard.frameworks.huggingface import script as huggingface
from steelyard.frameworks.libai import script as libai
from steelyard.frameworks.megatron import script as megatron
from steelyard.spec.errors import Problem, error, problem
from steelyard.translate import arguments as megatron_arguments
from steelyard.translate import configured, files, launch, shell
from steelyard.translate.launch import Launch
from steelyard.translate.shell import Script
from steelyard.translate.text import Word

SHELL = (".sh", ".bash", ".slurm", ".sbatch", ".sub", ".job", ".pbs", ".lsf", ".cmd")
SBATCH = re.compile(r"^#SBATCH +(.*)$", re.MULTILINE)
OPTION = re.compile(r"(?:^|\s)--?([A-Za-z][\w-]*)(?:=| +)([^\s#-][^\s#]*)")


# the first line of a command that stands alone in a text file
COMMAND = re.compile(r"(?:#[^\n]*\n|\s)*(?:[A-Z_]+=\S*\s+)*(?:python[\d.]*|torchrun|deepspeed|srun|mpirun)\s[^\n]*")


def is_script(path: Path, head: str) -> bool:
    """Whether a file is a launch script, by its name or its first characters."""
    first = head.lstrip("\ufeff \t\n")
    if path.suffix in ("", ".txt") and COMMAND.match(first) and ".py" in first and " --" in first:
        return True
    shebang = first.startswith("#!") and "sh" in first.partition("\n")[0] and path.suffix != ".py"
    return path.suffix in SHELL or shebang


def is_foreign(path: Path) -> bool:
    """Whether a file is a launch script or an argument list."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).decode("utf-8", errors="replace")
    except OSError:
        return False
    if path.suffix in (".jsonl", ".log", ".out"):
        return False
    if path.suffix == ".toml":
        return configured.is_job(path, head)
    if path.suffix in (".py", ".yml", ".yaml"):
        return True
    return is_script(path, head) or megatron.is_list(head)


def read(
    path: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, choice: int | None = None
) -> Translation:
    """A launch script or an argument list. `arguments` are the script's own; `environment` gives variables that it does
    not set itself; `choice` is the number of the training where it starts several.

    Raises UserError F011 to F018. What forbids a run but not the reading of the flags stands in `problems`.
    """
    if path.is_file() and path.stat().st_size > files.MOST_BYTES:
        raise error("F011", place=str(path), detail=f"it has {path.stat().st_size:,} bytes")
    return of_text(files.read(path), path, arguments, environment, choice)


def of_text(
    text: str, path: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None,
    choice: int | None = None,
) -> Translation:  # fmt: skip
    """The same from text that stands, or would stand, at `path`."""
    if path.suffix in (".yml", ".yaml", ".toml"):
        return configured.of_file(text, path)
    if path.suffix == ".py":
        settings = libai.read(text, path.name, configured.beside(path.parent))
        if not settings.keys:
            detail = f"it sets nothing of {', '.join(libai.ROOTS)}"
            raise error("F018", place=str(path), path=path, detail=detail, advice="give a LiBai configuration")
        return configured.of_libai(settings, libai.override(settings, told(arguments, "command line")), str(path))
    if not is_script(path, text[:200]) and megatron.is_list(text):
        return megatron_arguments.of_words(_listed(text, path), str(path))
    script = shell.follow(text, path.name, arguments, {**_batch_system(text), **(environment or {})})
    return of_launch(_chosen(script, choice, path, len(arguments)), script, path)


def of_log(path: Path) -> Translation:
    """The configuration that a log prints: Megatron's argument dump and the like. Raises UserError K001 to K003."""
    from steelyard.frameworks import detect

    record = detect.read(path)
    parallel = record.config.get("parallel", {})
    sizes = [parallel.get(axis, 1) for axis in ("data", "tensor", "pipeline", "context")]
    world = sizes[0] * sizes[1] * sizes[2] * sizes[3] if "data" in parallel else None
    notes = ["what the log does not print has the default of a run file", *record.notes]
    return Translation(
        record.framework, str(path), named(record.config, str(path)), record.sources, (), world, tuple(notes)
    )


def _listed(text: str, path: Path) -> list[Told]:
    """An argument list in any of its forms as words."""
    import json
    import shlex

    try:
        given: Any = json.loads(text) if text.lstrip()[:1] in "[{" else shlex.split(text, comments=True)
    except (ValueError, RecursionError) as failure:
        raise error("F003", place=str(path), detail=f"it is neither JSON nor an argument list: {failure}") from None
    if isinstance(given, Mapping):
        pairs = [(str(n), v) for n, v in given.items() if v is not False and v is not None]
        given = [
            word for n, v in pairs for word in (n, *([] if v is True else v if isinstance(v, list) else str(v).split()))
        ]
    words = [str(word) for word in given]
    first = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    return told(words[first:], path.name)


def _batch_system(text: str) -> dict[str, str]:
    """What Slurm will set, as far as the script's own #SBATCH lines say it."""
    given = {name: value for line in SBATCH.findall(text) for name, value in OPTION.findall(line)}
    nodes = given.get("nodes", given.get("N", ""))
    found = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    per_node = given.get("ntasks-per-node", given.get("tasks-per-node", ""))
    gpus = re.search(
        r"(\d+)$", given.get("gpus-per-node", "") or (given.get("gres", "") if "gpu" in given.get("gres", "") else "")
    )
    found |= {"SLURM_NTASKS_PER_NODE": per_node, "SLURM_TASKS_PER_NODE": per_node}
    if gpus:
        found |= {"SLURM_GPUS_ON_NODE": gpus.group(1), "SLURM_GPUS_PER_NODE": gpus.group(1)}
    if nodes.isdigit() and per_node.isdigit():
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(int(nodes) * int(per_node))
    return {name: value for name, value in found.items() if value.isdigit()}


def _chosen(script: Script, choice: int | None, path: Path, given: int) -> Launch:
    """The training that is meant. `given` is the number of arguments that the script has."""
    found, source = launch.find(script, script.source), str(path)
    if not found:
        others = [f"line {c.line} starts {c.words[0].text}" for c in script.commands if _calls(c.words)]
        if script.left and not others:
            raise error("F013", place=f"{script.source}:{script.left}", count=given)
        said = "; ".join([*script.notes[:3], *others[:3]])
        raise error("F015", place=source, path=source, detail=f" ({said})" if said else "")
    if choice is not None and 1 <= choice <= len(found):
        return found[choice - 1]
    if len(found) > 1:
        lines = ", ".join(str(each.line) for each in found[:12])
        raise error("F016", place=source, count=len(found), lines=lines)
    return found[0]


def _calls(words: Sequence[Word]) -> bool:
    """Whether a program is another script."""
    return any(word.text.endswith(SHELL) for word in words[:3])


def of_launch(started: Launch, script: Script | None, path: Path) -> Translation:
    """One training of a script, by the framework that its arguments are of."""
    names = [word.text.partition("=")[0] for word in started.arguments]
    if "--config-file" in names:
        return configured.of_libai_launch(started, script, path, names.index("--config-file"))
    words = list(started.arguments)
    config = next((w.text for w in words if w.text.endswith((".yml", ".yaml", ".toml"))), None)
    if config is not None and not any(name.startswith("--num-layers") for name in names):
        text = files.named(config, script, path.parent)
        if text is None:
            raise error("F018", place=str(path), path=config, detail="there is no such file beside the script",
                        advice="give the configuration itself to translate") from None  # fmt: skip
        return configured.of_file(text.text, Path(text.place), started)
    if huggingface.is_mine(words):
        return configured.of_trainer(words, path.parent, str(path), started)
    return megatron_arguments.of_words(started.arguments, str(path), started, script)


def needs_vocabulary(found: Translation, overrides: Sequence[str]) -> Problem | None:
    """F006 where neither the framework's arguments nor the overrides say how large the vocabulary is."""
    model = found.values.get("model", {})
    if not found.values or "vocab_size" in model or any(text.startswith("model.vocab_size=") for text in overrides):
        return None
    return problem("F006", "model.vocab_size", found.source)
