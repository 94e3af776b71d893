"""The words of a launch -> Megatron's arguments, with a row for every flag and word: nothing is dropped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.frameworks.fates import Row, Told
from steelyard.frameworks.megatron import flags, script
from steelyard.spec.errors import Problem, UserError, problem

Find = Callable[[str], flags.Flag | None]
# A value that is a path may stay as it is written: nothing is computed from it.
PATHS = ("data-path", "train-data-path", "valid-data-path", "test-data-path", "vocab-file", "merge-file",
         "tokenizer-model", "tokenizer-name-or-path", "kill-switch-path", "deepspeed-config")  # fmt: skip
UNLISTED = "no table here knows this flag"
SWITCHES = ("true", "false", "1", "0")


@dataclass
class Weighed:
    """`arguments` holds the translated and refused flags; `problems` what must be mended before there is a run."""

    arguments: script.Arguments
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Written:
    """A flag with the words behind it."""

    name: Told
    values: list[Told]


def weigh(words: Sequence[Told], find: Find = flags.find, source: str = "") -> Weighed:
    """Sort every flag of an argument list into what it means. The last of a flag that is given twice counts, as in
    Python's argparse."""
    found = Weighed(script.Arguments({}, source=source))
    written = _flags(words, find, found)
    last = {_key(flag, find): number for number, flag in enumerate(written)}
    given: dict[str, Any] = {}
    places: dict[str, str] = {}
    unlisted: list[str] = []
    dated = False
    for number, flag in enumerate(written):
        row = find(flag.name.text)
        shown = " ".join(word.text for word in flag.values)
        place = flag.name.place
        if row is None:
            unlisted.append(flag.name.text)
            found.rows.append(Row(flag.name.text, shown, "refused", "", UNLISTED, place))
            continue
        dated = dated or "" < row.until <= "2022"
        if row.trap:
            found.notes.append(f"{place}: {row.trap}")
        if last[_key(flag, find)] != number:
            why = f"given again at {written[last[_key(flag, find)]].name.place}, where the last one counts"
            found.rows.append(Row(flag.name.text, shown, "irrelevant", row.key, why, place))
            continue
        if row.meaning == "irrelevant":
            found.rows.append(Row(flag.name.text, shown, "irrelevant", "", row.why, place))
            continue
        if row.meaning == "refused" and shown in row.harmless:
            found.rows.append(Row(flag.name.text, shown, "irrelevant", "", f"with {shown} it changes nothing", place))
            continue
        places[row.name] = place
        found.rows.append(Row(flag.name.text, shown, row.meaning, row.key, row.why, place))
        if row.meaning == "refused":
            given[row.name] = shown or True
            continue
        _take(given, row, flag, found)
    found.arguments = script.Arguments(given, tuple(unlisted), source, dated, places)
    return found


def _key(flag: Written, find: Find) -> str:
    row = find(flag.name.text)
    return row.name if row is not None else flags.plain(flag.name.text)


def _flags(words: Sequence[Told], find: Find, found: Weighed) -> list[Written]:
    """Flags with their values. A word that can belong to no flag is a row of its own."""
    written: list[Written] = []
    for word in words:
        text = word.text
        if text.startswith("--") and len(text) > 2:
            name, equals, value = text.partition("=")
            rest = [Told(value, word.place, word.unknown, word.variable, word.choices)] if equals else []
            written.append(Written(Told(name, word.place, "" if equals else word.unknown), rest))
        elif text.startswith("-") and len(text) > 1 and text[1:2].isalpha() and not word.unknown:
            written.append(Written(Told(text, word.place), []))
        elif written and not _complete(written[-1], find, word):
            written[-1].values.append(word)
        else:
            written += _loose(word, find, found)
    return written


def _complete(flag: Written, find: Find, word: Told) -> bool:
    """Whether a flag takes no further word."""
    row = find(flag.name.text)
    if word.choices and any(choice[:1] and choice[0].startswith("--") for choice in word.choices):
        return True
    if row is not None and row.meaning == "translated" and row.kind == "list":
        return bool(word.variable) and bool(flag.values)
    if row is None or row.meaning != "translated":
        return bool(word.unknown) and bool(flag.values)
    if row.kind == "switch":
        return bool(flag.values) or word.text.lower() not in SWITCHES
    return bool(flag.values)


def _loose(word: Told, find: Find, found: Weighed) -> list[Written]:
    """A word that is no flag's value. What stands for nothing is nothing; what may stand for flags is weighed."""
    if not word.unknown:
        why = "a word that belongs to no flag; the program would stop at it"
        found.rows.append(Row(word.text, "", "refused", "", why, word.place))
        return []
    flat = [text for choice in word.choices for text in choice]
    if word.choices and all(_harmless(list(choice), find) for choice in word.choices):
        why = f"{word.unknown}; whichever it is, nothing here depends on it"
        found.rows += [Row(t, "", "irrelevant", "", why, word.place) for t in flat if t.startswith("--")]
        found.notes.append(f"{word.place}: {word.text}: {why}")
        return []
    if word.choices:
        advice = f"give what the test depends on behind -- or as --env NAME=value; it chooses between {_choices(word)}"
        found.problems.append(problem("F014", word.text, word.place, flag="a group of flags", value=word.text,
                                      why=word.unknown, advice=advice))  # fmt: skip
    elif word.variable:
        found.notes.append(f"{word.place}: {word.text} is not set in the script, so it stands for nothing here; "
                           f"--env {word.variable}=... sets it")  # fmt: skip
    else:
        why = f"it may stand for flags: {word.unknown}"
        found.rows.append(Row(word.text, "", "refused", "", why, word.place))
    return []


def _choices(word: Told) -> str:
    return " and ".join(f"`{' '.join(choice)}`" if choice else "nothing" for choice in word.choices[:4])


def _harmless(choice: list[str], find: Find) -> bool:
    names = [text.partition("=")[0] for text in choice if text.startswith("--")]
    rows = [find(name) for name in names]
    return not choice or (choice[0].startswith("--") and all(row and row.meaning == "irrelevant" for row in rows))


def _bare(text: str) -> str:
    """A value without the quotes that stay in it where a string of flags holds them."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _take(given: dict[str, Any], row: flags.Flag, flag: Written, found: Weighed) -> None:
    """The value of a translated flag in its kind."""
    place = flag.name.place
    unknown = next((word for word in flag.values if word.unknown), None)
    if unknown is not None:
        if row.name in PATHS:
            found.notes.append(f"{place}: {flag.name.text} is {unknown.text}, as the script has it: {unknown.unknown}")
        else:
            advice = (
                f"--env {unknown.variable}=..." if unknown.variable and not unknown.variable.isdigit() else "behind --"
            )
            advice = f"give its value ({advice}), or write it into the script"
            if unknown.choices:
                advice = f"it is {_choices(unknown)}: {advice}"
            found.problems.append(problem("F014", flag.name.text, unknown.place, flag=flag.name.text,
                                          value=unknown.text, why=unknown.unknown, advice=advice))  # fmt: skip
            return
    texts = [_bare(word.text) for word in flag.values]
    value: Any = texts if row.kind == "list" else texts[0] if texts else True
    try:
        given[row.name] = script.typed(row, value, place)
    except UserError as failure:
        found.problems += failure.problems
