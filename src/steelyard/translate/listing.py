"""The table of a framework's flags as text, for the documentation and for `steelyard translate --flags`."""

from collections.abc import Iterable, Iterator, Mapping

from steelyard.frameworks.deepspeed import config as deepspeed
from steelyard.frameworks.gpt_neox import script as gpt_neox
from steelyard.frameworks.huggingface import script as huggingface
from steelyard.frameworks.libai import flags as libai
from steelyard.frameworks.megatron import flags as megatron
from steelyard.frameworks.megatron_deepspeed import flags as fork
from steelyard.frameworks.nanotron import script as nanotron
from steelyard.frameworks.torchtitan import script as torchtitan
from steelyard.spec.errors import did_you_mean, error

FILES = {
    "gpt-neox": gpt_neox.TABLE,
    "torchtitan": torchtitan.TABLE,
    "nanotron": nanotron.TABLE,
    "huggingface": huggingface.TABLE,
}
TABLES = ("megatron", "megatron-deepspeed", "deepspeed", "libai", *FILES)


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
    elif framework in FILES:
        table = FILES[framework]
        yield from _keys(table.translated, table.irrelevant, table.refused.items())
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


def _keys(
    translated: Mapping[str, str], irrelevant: Mapping[str, str], refused: Iterable[tuple[str, str]]
) -> Iterator[str]:
    yield f"translated: {len(translated)}"
    yield from (f"  {name}  {key}" for name, key in sorted(translated.items()))
    names = sorted((name, why) for why, some in irrelevant.items() for name in some.split())
    yield f"irrelevant: {len(names)}"
    yield from (f"  {name}  {why}" for name, why in names)
    told = sorted(refused)
    yield f"refused: {len(told)}"
    yield from (f"  {name}  {why}" for name, why in told)
