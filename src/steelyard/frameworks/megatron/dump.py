"""The argument block of a Megatron log -> run-file keys, each with the line it stands on.

The block lists every argument after parsing, defaults included, under the name Python has for it. Names and meanings
are those of flags.py; what a version does not print has that version's default.
"""

import re
from typing import Any

from steelyard.frameworks.lines import literal
from steelyard.frameworks.megatron import flags, script
from steelyard.frameworks.reading import Reading
from steelyard.spec.errors import UserError

BEGIN = re.compile(r"-{4,}\s?(?:updated )?arguments\s?-{4,}")
END = re.compile(r"-{4,} end of arguments -{4,}")
ENTRY = re.compile(r"(?:^|[\s:\]])([A-Za-z_][A-Za-z_0-9]{0,80}) (?:\.{2,60} ?| )(?=\S|$)")
ENTRY_WIDTH = 240  # characters in which the name and the dots of an entry end
ENUM = re.compile(r"[A-Z][A-Za-z]+\.([a-z_]+)")
# names that state the opposite of their flag
OPPOSITE = {
    "add_bias_linear": "disable-bias-linear",
    "create_attention_mask_in_dataloader": "no-create-attention-mask-in-dataloader",
}
POSITIONS = {"absolute": "learned_absolute", "rotary": "rope"}
SET_ASIDE = 8  # rounds of taking flags out before the whole block is given up
MOST_RANKS = 10**6  # of any axis: no cluster has more

Entries = dict[str, tuple[str, int]]  # name -> (text, line)


def apply(reading: Reading, entries: Entries) -> None:
    """Set everything the block says. A flag that a run file has no word for is set aside, with a note."""
    given = _arguments(entries)
    found = _values(reading, given)
    for section, values in found.items():
        if not isinstance(values, dict):
            _set(reading, entries, section, values)
            continue
        for name, value in values.items():
            _set(reading, entries, f"{section}.{name}", value)
    for name in ("data_parallel_size", "world_size"):
        if name in entries:
            reading.environment[name] = entries[name][0]
    _beside(reading, entries)
    _data(reading, entries)


def entry(text: str) -> tuple[str, str] | None:
    """(name, value) of a line of the block."""
    found = ENTRY.search(text, 0, ENTRY_WIDTH)
    return (found.group(1), text[found.end() :].strip()) if found else None


def _set(reading: Reading, entries: Entries, key: str, value: Any) -> None:
    line = _line(entries, key)
    reading.set(key, value, line, "" if line else "default of Megatron-LM")


def _line(entries: Entries, key: str) -> int | None:
    """The line of the first argument that decides a key."""
    for name, (text, line) in entries.items():
        flag = flags.find(OPPOSITE.get(name, name))
        if flag is not None and flag.key == key and text not in ("None", "False"):
            return line
    for name, (_, line) in entries.items():
        flag = flags.find(OPPOSITE.get(name, name))
        if flag is not None and flag.key == key:
            return line
    return None


def _arguments(entries: Entries) -> script.Arguments:
    given: dict[str, Any] = {}
    dated = False
    for name, (text, _) in entries.items():
        flag = flags.find(OPPOSITE.get(name, name))
        value = _value(text)
        if flag is None or (flag.meaning != "translated" and value in (None, False)):
            continue
        dated = dated or bool(flag.until)
        value = (not value) if name in OPPOSITE else value
        if name == "position_embedding_type":
            value = POSITIONS.get(str(value), value)
        if value is None or value is False or flag.meaning == "irrelevant":
            continue
        try:
            typed = script.typed(flag, value, "")
        except UserError:
            continue
        if flag.key.startswith("parallel.") and isinstance(typed, int) and typed > MOST_RANKS:
            continue  # digits that are mixed up: lists as long would be made of it
        given[flag.name] = typed
    return script.Arguments(given, dated=dated)


def _value(text: str) -> Any:
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    if found := ENUM.fullmatch(text):
        return found.group(1)
    if text[:1] == "[" and len(text) < 20000:
        found = literal(text)
        return text if found is None else found
    return text


def _values(reading: Reading, given: script.Arguments) -> dict[str, Any]:
    """What the arguments say in run-file terms. Flags it cannot say are taken out one by one."""
    known = dict(given.given)
    for _ in range(SET_ASIDE):
        try:
            return script.values(script.Arguments(known, dated=given.dated))
        except UserError as failure:
            refused = [p.key.lstrip("-") for p in failure.problems if p.key.lstrip("-") in known]
            if not refused:
                break
            for name in refused:
                reading.note(f"{name} = {known.pop(name)} has no word in a run file")
        except (ValueError, TypeError, KeyError, ZeroDivisionError):
            break
    return _plain(known)


def _plain(known: dict[str, Any]) -> dict[str, Any]:
    """Of a block that is cut: the numbers that stand for themselves."""
    found: dict[str, Any] = {}
    for name, value in known.items():
        flag = flags.find(name)
        if (
            flag is not None
            and flag.kind in ("int", "float")
            and flag.key.startswith(("model.", "parallel.", "batch."))
        ):
            section, _, key = flag.key.partition(".")
            found.setdefault(section, {})[key] = value
    found.get("parallel", {}).pop("virtual", None)
    found.get("parallel", {}).pop("stages", None)
    found.get("model", {}).pop("vocab_multiple", None)
    return found


def _beside(reading: Reading, entries: Entries) -> None:
    """Arguments of Megatron-DeepSpeed that Megatron-LM does not have."""
    gate = entries.get("glu_activation", ("None", 0))
    if gate[0] in ("swiglu", "geglu"):
        reading.set("model.activation", gate[0], gate[1])
    text, line = entries.get("embed_layernorm", ("False", 0))
    if text == "True":
        reading.set("model.embedding_norm", True, line)
    text, line = entries.get("position_embedding_type", ("", 0))
    if text.endswith("alibi"):
        reading.set("model.position", "alibi", line)
    text, line = entries.get("partition_activations", ("False", 0))
    if text == "True" and reading.config.get("recompute.mode") == "full":
        reading.set("recompute.shard", True, line)
    text, line = entries.get("curriculum_learning", ("", 0))
    if text not in ("", "None", "False"):
        reading.note("curriculum learning is on: the sequence length grows, tokens are not samples x sequence length")


def _data(reading: Reading, entries: Entries) -> None:
    """The number of data ranks, and the global batch where an old version has only the micro-batch."""
    sizes = {
        name: int(text) for name, (text, _) in entries.items() if text.isascii() and text.isdigit() and len(text) < 10
    }
    world, data = sizes.get("world_size"), sizes.get("data_parallel_size")
    axes = [reading.config.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline", "context")]
    if data is None and world and all(isinstance(n, int) and n > 0 for n in axes):
        data = world // (axes[0] * axes[1] * axes[2])
    if data:
        line = entries["data_parallel_size" if "data_parallel_size" in sizes else "world_size"][1]
        reading.set("parallel.data", data, line)
    micro = reading.config.get("batch.micro_batch_size")
    if "batch_size" in entries and micro and data and "batch.global_batch_size" not in reading.config:
        reading.set("batch.global_batch_size", micro * data, entries["batch_size"][1])
