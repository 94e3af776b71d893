"""Token files out of token files: shards joined, and a file divided by a split."""

from collections.abc import Sequence
from pathlib import Path

from steelyard.data import manifest as manifests
from steelyard.data.manifest import MOST_EXAMPLES, Manifest
from steelyard.data.order import SPLITS, split_bounds
from steelyard.data.store import Dataset, Writer
from steelyard.spec.errors import error


def merge(prefixes: Sequence[str | Path], output_prefix: str | Path) -> Manifest | None:
    """Join token files, in the order given, into one; with manifests, when all of them have one.

    The shards of one prepare must all be there; they are joined in their own order, which is the order of the inputs.
    Raises UserError D001 to D003 (files), D020 (they do not belong together).
    """
    found = [(str(prefix), manifests.find(prefix)) for prefix in prefixes]
    if str(output_prefix) in (prefix for prefix, _ in found):
        _refuse(str(output_prefix), "the output is one of the files to merge", "choose another --output")
    if all(manifest and manifest.shard for _, manifest in found):
        found = _all_shards([(prefix, manifest) for prefix, manifest in found if manifest])
    datasets = [Dataset(prefix) for prefix, _ in found]
    for dataset in datasets[1:]:
        if dataset.dtype != datasets[0].dtype:
            rule = f"the dtypes differ: {datasets[0].dtype.name} and {dataset.dtype.name}"
            _refuse(dataset.prefix, rule, "prepare them with the same --dtype")
    joined = _joined([manifest for _, manifest in found if manifest]) if all(m for _, m in found) else None
    with Writer(output_prefix, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)
        manifests.conclude(writer, output_prefix, joined)
    return joined


def divide(prefix: str | Path, split: str, output: str | Path) -> list[tuple[str, int]]:
    """Write a file of its own for each part of a split: OUTPUT_train, OUTPUT_validation, OUTPUT_test.

    Parts are whole documents, cut where the split's boundaries (in sequences) fall. Returns (prefix, documents) of each
    part that is not empty.
    """
    dataset, source = Dataset(prefix), manifests.find(prefix)
    written = []
    for name, (first, end) in zip(SPLITS, split_bounds(split, len(dataset)), strict=True):
        begin, stop = (int(dataset.documents.searchsorted(n)) for n in (first, end))
        if begin == stop:
            continue
        target = f"{output}_{name}"
        with Writer(target, dataset.dtype) as writer:
            writer.add_dataset(dataset, begin, stop)
            manifests.conclude(writer, target, source and Manifest(**{**vars(source), "inputs": [str(prefix)]}))
        written.append((target, stop - begin))
    return written


def _all_shards(found: list[tuple[str, Manifest]]) -> list[tuple[str, Manifest | None]]:
    """The shards in order. Raises UserError D020 unless they are all shards of one prepare, each once."""
    counts = {manifest.shard[1] for _, manifest in found if manifest.shard}
    numbers = sorted(manifest.shard[0] for _, manifest in found if manifest.shard)
    count = max(counts)
    if len(counts) > 1:
        _refuse(found[0][0], f"they are shards of {' and of '.join(map(str, sorted(counts)))}", "give one set of them")
    if missing := sorted(set(range(count)) - set(numbers)):
        rule = f"shard {', '.join(map(str, missing))} of {count} is missing"
        _refuse(found[0][0], rule, "prepare it, or name it too")
    if len(numbers) > count:
        _refuse(found[0][0], "a shard is given twice", "give each shard once")
    return [(prefix, manifest) for prefix, manifest in sorted(found, key=lambda pair: pair[1].shard or (0, 0))]


def _joined(parts: list[Manifest]) -> Manifest:
    """One manifest for all; the counts that the file itself tells come later."""
    first = parts[0]
    for part in parts[1:]:
        if (part.tokenizer_hash, part.append_eod) != (first.tokenizer_hash, first.append_eod):
            rule = f"they were made differently: tokenizer {first.tokenizer} and {part.tokenizer}, or one without EOD"
            _refuse(part.tokenizer, rule, "prepare them with one tokenizer and the same --append-eod")
    reasons = sorted({reason for part in parts for reason in part.skipped})
    return Manifest(**{
        **vars(first), "read": sum(part.read for part in parts), "empty": sum(part.empty for part in parts),
        "skipped": {reason: sum(part.skipped.get(reason, 0) for part in parts) for reason in reasons},
        "examples": [example for part in parts for example in part.examples][:MOST_EXAMPLES],
        "inputs": list(dict.fromkeys(path for part in parts for path in part.inputs)), "shard": None,
    })  # fmt: skip


def _refuse(place: str, rule: str, advice: str) -> None:
    raise error("D020", place=place, rule=rule, advice=advice)
