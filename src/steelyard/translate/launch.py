"""The training that a script starts: its program, its arguments, and how many ranks its launcher makes of it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.frameworks.fates import Row, Told
from steelyard.translate.shell import Script
from steelyard.translate.state import Command
from steelyard.translate.text import Value, Word, known, words

PYTHON = re.compile(r"(?:.*/)?python[\d.]*$|(?:.*/)?pypy3?$")
LAUNCHERS = {"torchrun", "deepspeed", "accelerate", "horovodrun"}
MODULES = {
    "torch.distributed.launch",
    "torch.distributed.run",
    "oneflow.distributed.launch",
    "torch.distributed.elastic",
}
# launcher options that stand alone
ALONE = {
    "standalone", "use-env", "no-python", "module", "m", "run-path", "no-local-rank", "force-multi",
    "enable-each-rank-log", "no-ssh", "no-ssh-check", "multi-gpu", "use-deepspeed", "use-fsdp",
}  # fmt: skip
PROCESSES = ("nproc-per-node", "num-gpus", "gpus-per-node")
NODES = ("nnodes", "num-nodes", "num-machines")
TRAINING = re.compile(r"(?:^|/)(?:pretrain|train|finetune|run_|deepy)[\w-]*\.py$|(?:^|[/.])(?:train|pretrain)[\w.-]*$")
TASKS = {"ntasks": r"(?:--ntasks[= ]|-np? ?)(\d+)", "nodes": r"(?:--nodes[= ]|-N ?)(\d+)",
         "per_node": r"--(?:ntasks|tasks)-per-node[= ](\d+)"}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """`arguments` are those of the program. `world` is None where the launcher does not say it."""

    program: str
    arguments: tuple[Told, ...]
    rows: tuple[Row, ...]
    world: int | None
    line: int
    notes: tuple[str, ...] = ()


def find(script: Script, place: str) -> list[Launch]:
    """Every training that a script starts, in order. The same training twice (an `echo` of it is none) counts once."""
    found: list[Launch] = []
    for command in script.commands:
        launch = read(command, place)
        if launch is not None and all(launch.arguments != other.arguments for other in found):
            found.append(launch)
    named = [launch for launch in found if TRAINING.search(launch.program)]
    return named or found


def read(command: Command, place: str) -> Launch | None:
    """The training of one command; None where it starts none."""
    given = [word for word in command.words if word.text]
    if not given or given[0].text.rsplit("/", 1)[-1] in (
        "echo",
        "printf",
        "tee",
        "pip",
        "cat",
        "ls",
        "cp",
        "mv",
        "grep",
    ):
        return None
    start = next((n for n, word in enumerate(given) if _starts(word)), None)
    if start is None:
        # the launcher may itself be unknown; what is a program by its name starts the arguments
        start = next((n for n, word in enumerate(given) if word.text.endswith(".py")), None)
        if start is None:
            return None
        return _launch(command, given, [], start, place)
    options, at = _options(given, start)
    if at is None:
        return None
    return _launch(command, given, options, at, place)


def _starts(word: Word) -> bool:
    text = word.text
    return word.unknown is None and (PYTHON.match(text) is not None or text.rsplit("/", 1)[-1] in LAUNCHERS)


def _options(given: Sequence[Word], start: int) -> tuple[list[tuple[Word, Word | None]], int | None]:
    """The launcher's options as (name, value), and where the program stands."""
    name = given[start].text.rsplit("/", 1)[-1]
    options: list[tuple[Word, Word | None]] = []
    at = start + 1
    launcher = name in LAUNCHERS
    while at < len(given):
        word, text = given[at], given[at].text
        after = given[at + 1] if at + 1 < len(given) else None
        if not launcher and text == "-m" and after is not None:
            if after.text in MODULES:
                launcher, at = True, at + 2
                continue
            return options, at + 1
        if not launcher and text == "-c":
            return options, None
        if text == "--" or (launcher and text == "launch" and name == "accelerate"):
            at += 1
        elif launcher and text.startswith("-"):
            plain = text.lstrip("-").replace("_", "-")
            if plain in ("m", "module") and after is not None and not after.text.startswith("-"):
                options.append((word, None))
                return options, at + 1
            alone = "=" in text or plain in ALONE or after is None or after.text.startswith("--")
            options.append((word, None if alone else after))
            at += 1 if alone else 2
        elif text.startswith("-") and not launcher:
            at += 2 if text in ("-W", "-X") else 1
        elif word.unknown and not text.endswith(".py") and not re.search(r"\.py$", text):
            options.append((word, None))
            at += 1
        else:
            return options, at
    return options, None


def _launch(
    command: Command, given: Sequence[Word], options: Sequence[tuple[Word, Word | None]], at: int, place: str
) -> Launch:
    rows, sizes, notes = [], {}, []
    for name, value in options:
        plain, equals, inline = name.text.lstrip("-").replace("_", "-").partition("=")
        text = inline if equals else value.text if value else ""
        unknown = value.unknown if value is not None else name.unknown
        kind = "processes" if plain in PROCESSES else "nodes" if plain in NODES else plain
        if kind in ("processes", "nodes", "num-processes", "include"):
            sizes[kind] = None if unknown else _number(kind, text)
            rows.append(Row(name.text, text, "translated", "world", "", f"{place}:{name.line}"))
        else:
            rows.append(
                Row(
                    name.text,
                    text,
                    "irrelevant",
                    "",
                    "of the launcher: where and how ranks start",
                    f"{place}:{name.line}",
                )
            )
    tasks = _tasks([*command.outer, *given[:at]])
    world = _world(sizes, tasks, command.variables, [name.text for name, _ in options])
    if world is None:
        launched = {word.text.rsplit("/", 1)[-1] for word in given[:at]} & {*LAUNCHERS, *MODULES}
        alone = not launched and not tasks
        notes.append(
            "the program is started once: --world gives its ranks where more are started from outside"
            if alone
            else "the launcher does not say how many ranks there are: give --world"
        )
    if command.uncertain:
        notes.append(f"line {command.line} is reached only where {command.uncertain}")
    arguments = tuple(_told(word, place) for word in given[at + 1 :])
    return Launch(given[at].text, arguments, tuple(rows), world, command.line, tuple(notes))


def _number(kind: str, text: str) -> int | None:
    if kind == "include":  # deepspeed's host:0,1,2@host:0,1
        hosts = text.split("@")
        return sum(len(host.partition(":")[2].split(",")) for host in hosts) if all(":" in h for h in hosts) else None
    first = text.partition(":")[2] or text  # torchrun's 1:4
    return int(first) if first.isascii() and first.isdigit() and 0 < len(first) < 8 else None


def _tasks(before: Sequence[Word]) -> dict[str, int]:
    """srun's numbers, where it starts one process per rank."""
    text = " ".join(word.text for word in before)
    if not re.search(r"(?:^|/|\s)(?:srun|mpirun|mpiexec)\b", text):
        return {}
    found = {name: re.search(pattern, text) for name, pattern in TASKS.items()}
    return {
        "srun": 1,
        **{name: int(match.group(1)) for name, match in found.items() if match and len(match.group(1)) < 8},
    }


def _world(
    sizes: Mapping[str, int | None], tasks: Mapping[str, int], variables: Mapping[str, Value], options: Sequence[str]
) -> int | None:
    processes = sizes.get("processes", sizes.get("include"))
    if "processes" in sizes or "include" in sizes:
        if "include" in sizes:
            return sizes["include"]
        nodes = sizes.get("nodes", 1)
        hosts = any(option.lstrip("-").replace("_", "-").startswith("hostfile") for option in options)
        if nodes is None or (hosts and "nodes" not in sizes):
            nodes = None
        if processes and nodes:
            return processes * nodes
    elif sizes.get("num-processes"):
        return sizes["num-processes"]
    elif "ntasks" in tasks:
        return tasks["ntasks"]
    elif "per_node" in tasks and "nodes" in tasks:
        return tasks["per_node"] * tasks["nodes"]
    elif "srun" in tasks and "SLURM_NTASKS" in variables and not options:
        return _whole(known(variables["SLURM_NTASKS"]))
    return _whole(known(variables.get("WORLD_SIZE", ())))


def _whole(text: str | None) -> int | None:
    """A positive number of ranks."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 8 and int(text) else None


def _told(word: Word, place: str) -> Told:
    where = f"{place}:{word.line}" if word.line else "command line"
    if word.unknown is None:
        return Told(word.text, where)
    choices = tuple(tuple(w.text for w in words(choice)) for choice in word.unknown.choices if len(word.pieces) == 1)
    return Told(word.text, where, word.unknown.why, word.unknown.name, choices)
