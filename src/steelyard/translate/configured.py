"""Runs that are written as one configuration file: LiBai (Python, read as text), GPT-NeoX and nanotron (YAML),
TorchTitan (TOML); and Hugging Face's arguments, whose model stands in a config.json."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from steelyard.frameworks import settings as reading
from steelyard.frameworks.fates import Row, Told, Translation, named, origins
from steelyard.frameworks.gpt_neox import script as gpt_neox
from steelyard.frameworks.huggingface import config as huggingface_model
from steelyard.frameworks.huggingface import script as huggingface
from steelyard.frameworks.libai import script as libai
from steelyard.frameworks.nanotron import script as nanotron
from steelyard.frameworks.settings import Settings
from steelyard.frameworks.torchtitan import script as torchtitan
from steelyard.spec.errors import UserError, error
from steelyard.translate import files
from steelyard.translate.launch import Launch
from steelyard.translate.shell import Script

YAML = (gpt_neox, nanotron)


def is_job(path: Path, head: str) -> bool:
    """Whether a TOML file is a TorchTitan job: a run file has no flavour."""
    return path.suffix == ".toml" and "flavor" in head and "[training]" in head


def of_file(text: str, path: Path, started: Launch | None = None) -> Translation:
    """One configuration file. Raises UserError F015, F018."""
    if path.suffix == ".toml":
        return _translated(torchtitan, reading.toml(text, path.name), path, started)
    given = reading.yaml(text, path.name)
    for module in YAML:
        settings = gpt_neox.named(given) if module is gpt_neox else given
        if module.is_mine(settings):
            return _translated(module, settings, path, started)
    raise error("F015", place=str(path), path=path, detail=" (nor is it GPT-NeoX's or nanotron's)")


def _translated(module: ModuleType, given: Settings, path: Path, started: Launch | None) -> Translation:
    world = started.world if started else None
    rows = [*(started.rows if started else ()), *module.table(given).rows(given)]
    try:
        world = world or module.world(given)
        values, problems = module.values(given, world), []
    except UserError as failure:
        values, problems = {}, failure.problems
    except (ArithmeticError, TypeError, ValueError) as failure:
        raise error("F018", place=given.place, path=given.place, detail=f"a value has the wrong kind: {failure}",
                    advice="numbers stand without quotes") from None  # fmt: skip
    values = named(values, str(path))
    notes = list(started.notes) if started else []
    if world is None:
        notes.append("the number of ranks is not in the file: give --world")
    return Translation(module.NAME, str(path), values, origins(values, rows, f"default of {module.NAME}"), tuple(rows),
                       world, tuple(notes), tuple(problems))  # fmt: skip


def of_trainer(words: Sequence[Told], folder: Path, source: str, started: Launch | None) -> Translation:
    """Hugging Face's arguments. The model's config.json has to be at hand."""
    given = huggingface.arguments(list(words))
    rows: list[Row] = [*(started.rows if started else ()), *huggingface.rows(list(words), given)]
    name = str(given.get("config_name", given.get("model_name_or_path", "")))
    places = [base / name / "config.json" for base in (folder, Path())] + [base / name for base in (folder, Path())]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise error("F018", place=source, path=name or "the model's config.json", detail="there is no config.json of "
        "it here",
                    advice="put it beside the script, or give config_name a path")  # fmt: skip
    world = started.world if started else None
    model = huggingface_model.read(found)["model"]
    problems = huggingface.problems(list(words))
    try:
        values = {} if problems else named(huggingface.values(given, model, None, world), source)
    except ValueError as failure:
        raise error("F018", place=source, path=source, detail=f"a value has the wrong kind: {failure}",
                    advice="correct the value") from None  # fmt: skip
    notes = [
        f"the weights that {name} may hold are not loaded: training starts anew",
        *(started.notes if started else ()),
    ]
    if given.get("deepspeed"):
        notes.append("DeepSpeed's JSON is not read for this trainer: its ZeRO stage is given as parallel.zero")
    return Translation(huggingface.NAME, source, values, origins(values, rows, f"default of {huggingface.NAME}"),
                       tuple(rows), world, tuple(notes), tuple(problems))  # fmt: skip


def of_libai_launch(started: Launch, script: Script | None, path: Path, at: int) -> Translation:
    """LiBai's program: a configuration file and overrides behind it."""
    words = list(started.arguments)
    name, equals, value = words[at].text.partition("=")
    given = value if equals else words[at + 1].text if at + 1 < len(words) else ""
    rest = words[:at] + words[at + (1 if equals else 2) :]
    text = files.named(given, script, path.parent)
    if text is None:
        raise error("F018", place=words[at].place, path=given, detail="there is no such file beside the script",
                    advice="give the configuration itself to translate, with the overrides behind --")  # fmt: skip
    settings = libai.read(text.text, Path(text.place).name, beside(Path(text.place).parent))
    row = Row(name, given, "irrelevant", "", "where files are", words[at].place)
    rows = [*started.rows, row, *libai.override(settings, rest)]
    return of_libai(settings, rows, str(path), started, script)


def beside(folder: Path) -> libai.Load:
    def load(name: str) -> tuple[str, str] | None:
        path = folder / name
        return (files.read(path), path.name) if path.is_file() else None

    return load


def of_libai(
    settings: libai.Settings,
    rows: Sequence[Row],
    source: str,
    started: Launch | None = None,
    script: Script | None = None,
) -> Translation:
    """A LiBai configuration with its overrides."""
    world = started.world if started else libai.world(settings)
    other = libai.other_model(settings)
    problems = [*libai.problems(settings), *([other] if other else [])]
    every = [*rows, *libai.rows(settings)]
    try:
        values = named({} if problems else libai.values(settings, world), source)
    except (TypeError, ValueError) as failure:
        raise error("F018", place=source, path=source, detail=f"a value has the wrong kind: {failure}",
                    advice="numbers stand without quotes") from None  # fmt: skip
    notes = [*libai.notes(settings), *(started.notes if started else ()), *(script.notes if script else ())]
    launched = {"program": started.program, "line": str(started.line)} if started else {}
    return Translation(libai.NAME, source, values, origins(values, every, "default of LiBai"), tuple(every), world,
                       tuple(notes), tuple(problems), launched)  # fmt: skip
