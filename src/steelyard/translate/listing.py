"""The table of a framework's flags as text, for the documentation and for `steelyard translate --flags`."""

from collections.abc import Iterable, Iterator

from steelyard.frameworks.deepspeed import config as deepspeed
from steelyard.frameworks.libai import flags as libai
from steelyard.frameworks.megatron import flags as megatron
from steelyard.frameworks.megatron_deepspeed import flags as fork
from steelyard.spec.errors import did_you_mean, error

TABLES = ("megatron", "megatron-deepspeed", "deepspeed", "libai")


def table(framework: str) -> str:
    """Raises UserError P002."""
    plain = framework.lower().replace("_", "-")
    if plain not in TABLES:
        raise error("P002", place="--flags", name=framework, suggestion=did_you_mean(plain, list(TABLES)))
    return "\n".join(_lines(plain))


def _lines(framework: str) -> Iterator[str]:
    if framework == "megatron":
        yield from _flags(megatron.table())
        yield "irrelevant whatever follows these first words:"
        yield from (
            f"  {', '.join(f'--{start}*' for start in starts.split())}  ({why})"
            for why, starts in megatron.FAMILIES.items()
        )
    elif framework == "megatron-deepspeed":
        yield from _flags({name: row for name, row in fork.table().items() if fork.added(name)})
    elif framework == "deepspeed":
        yield from _keys(deepspeed.TRANSLATED, deepspeed.IRRELEVANT, deepspeed.REFUSED.items())
    else:
        yield from _keys(
            libai.TRANSLATED,
            libai.IRRELEVANT,
            [(key, f"unless it is {value}: {why}") for key, (value, why) in libai.CONDITIONS.items()],
        )


def _flags(rows: dict[str, megatron.Flag]) -> Iterator[str]:
    """One line a flag, its other names behind it."""
    own = {row.name: row for row in rows.values()}
    for meaning in ("translated", "irrelevant", "refused"):
        chosen = sorted((row for row in own.values() if row.meaning == meaning), key=lambda row: row.name.lower())
        yield f"{meaning}: {len(chosen)}"
        for row in chosen:
            older = f" (also {', '.join(f'--{name}' for name in row.older)})" if row.older else ""
            harmless = f"; harmless with {', '.join(row.harmless)}" if row.harmless else ""
            yield f"  --{row.name}{older}  {row.key or row.why}{harmless}" + (f". {row.trap}" if row.trap else "")


def _keys(translated: dict[str, str], irrelevant: dict[str, str], refused: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"translated: {len(translated)}"
    yield from (f"  {name}  {key}" for name, key in sorted(translated.items()))
    names = sorted((name, why) for why, some in irrelevant.items() for name in some.split())
    yield f"irrelevant: {len(names)}"
    yield from (f"  {name}  {why}" for name, why in names)
    told = sorted(refused)
    yield f"refused: {len(told)}"
    yield from (f"  {name}  {why}" for name, why in told)
