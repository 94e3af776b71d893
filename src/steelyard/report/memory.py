"""The memory of a plan as lines of text."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Sheet = dict[str, Any]
INDENT = " " * 13

# letter of the bar, words, and the terms it stands for
BAR = (
    ("w", "weights"), ("g", "gradients"), ("m", "master"), ("o", "optimizer"), ("a", "activations"),
    ("r", "recomputed"), ("l", "logits"), ("b", "boundary"), ("c", "communication"), ("x", "other"),
)  # fmt: skip
BAR_WIDTH = 64
MIB, GIB = 2**20, 2**30


def scaled(size: int) -> tuple[float, str]:
    """Bytes in the unit that gives them a figure before the point."""
    return (size / GIB, "GiB") if size >= GIB else (size / MIB, "MiB")


def lines(sheet: Sheet) -> Iterator[str]:
    """The classes of equal ranks, the largest first, a bar of the largest, and whether it fits."""
    memory = sheet["memory"]
    if memory is None:
        yield "not modelled for this framework"
        return
    classes = _classes(memory["ranks"])
    shown = classes if len(classes) <= 4 else [*classes[:2], classes[-1]]
    largest = classes[0][0]
    one, unit = (GIB, "GiB") if largest["peak"] >= GIB else (MIB, "MiB")
    some = f"{len(shown)} of {len(classes)} classes of ranks" if len(shown) < len(classes) else ""
    yield f"{unit:>10}  {'steady':>7} {'reserved':>8} {'device':>7}  {some}".rstrip()
    for entry, where, count in shown:
        device = "?" if entry["device"] is None else f"{entry['device'] / one:.2f}"
        yield (
            f"{entry['peak'] / one:>10.2f}  {entry['steady'] / one:>7.2f} {entry['reserved'] / one:>8.2f} "
            f"{device:>7}  peak of {where} ({_ranks(count)}), in {entry['moment']}"
        )
    of_largest = parts(largest)
    yield f"[{_bar(of_largest, max(memory['capacity'] or 0, largest['peak']))}]"
    yield " ".join(f"{letter} {name} {of_largest[name] / one:.2f}" for letter, name in BAR if of_largest[name])
    yield f"{_fits(memory, largest)}; not counted: {', '.join(memory['not_counted'])}"
    yield from memory["assumed"]


def _ranks(count: int) -> str:
    return f"{count:,} ranks" if count > 1 else "1 rank"


def _classes(ranks: Sequence[Sheet]) -> list[tuple[Sheet, str, int]]:
    """(its memory, which stages, how many ranks) of each class, the largest first. Tensor ranks are alike."""
    by_size: dict[tuple[int, int], list[Sheet]] = {}
    for rank in ranks:
        by_size.setdefault((rank["peak"], rank["steady"]), []).append(rank)
    found = []
    for _, group in sorted(by_size.items(), reverse=True):
        stages = sorted({rank["stage"] for rank in group})
        numbers = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages[:6]))}"
        found.append((group[0], numbers + (", ..." if len(stages) > 6 else ""), sum(rank["count"] for rank in group)))
    return found


def parts(rank: Sheet) -> dict[str, int]:
    """The peak of a rank in the parts of the bar."""
    terms = rank["terms"]
    found = dict(rank["states"])
    found["activations"] = sum(value for name, value in terms.items() if name.startswith("activations"))
    found |= {name: terms.get(name, 0) for name in ("logits", "recomputed", "boundary", "communication")}
    return {**found, "other": rank["peak"] - sum(found.values())}


def _bar(parts: Sheet, whole: int) -> str:
    """One letter per part of the whole; dots are free."""
    text, so_far = "", 0
    for letter, name in BAR:
        so_far += parts[name]
        text += letter * (round(BAR_WIDTH * so_far / whole) - len(text))
    return text.ljust(BAR_WIDTH, ".")


def _fits(memory: Sheet, largest: Sheet) -> str:
    need = largest["device"] or largest["reserved"]
    kind = "device" if largest["device"] else "reserved"
    if memory["fits"] is None:
        number, unit = scaled(need)
        return f"chip unknown: the largest rank needs {number:.2f} {unit} ({kind})"
    capacity = memory["capacity"]
    room = (capacity - need) / GIB
    if memory["fits"]:
        return f"fits on {memory['chip']}: {kind} {need / GIB:.2f} of {capacity / GIB:.2f} GiB, {room:.2f} free"
    return f"does NOT fit on {memory['chip']}: {kind} {need / GIB:.2f} of {capacity / GIB:.2f} GiB, {-room:.2f} short"


def explained(sheet: Sheet) -> Iterator[str]:
    """Every state and term of the largest rank's peak, and what stands on top of it."""
    memory = sheet["memory"]
    if memory is None:
        return
    rank, where, _ = _classes(memory["ranks"])[0]
    yield f"{'memory at the peak of ' + where:<36} {'bytes':>20}  in {rank['moment']}"
    for name, size in sorted({**rank["states"], **rank["terms"]}.items(), key=lambda item: -item[1]):
        yield f"{name:<36} {size:>20,}"
    for name in ("peak", "peak_first_step", "steady", "reserved", "device"):
        shown = "?" if rank[name] is None else f"{rank[name]:,}"
        yield f"{name:<36} {shown:>20}  {memory['says'][name]}"


def block(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Lines of a plan under a title in the margin."""
    for number, line in enumerate(lines):
        yield f"{title:<{len(INDENT)}}{line}" if number == 0 else f"{INDENT}{line}"


def rehearsed(found: Sheet) -> str:
    """A rehearsal beside the closed form."""
    lines = [f"rank {found['rank']} of {found['world']:,}: one step on fake tensors beside the closed form, MiB"]
    for name, row in found["bytes"].items():
        lines.append(
            f"{name:<16} {row['rehearsed'] / MIB:>12,.2f} rehearsed {row['predicted'] / MIB:>12,.2f} predicted "
            f"{row['error']:>+8.2%}"
        )
    traffic = found["traffic"]
    for what, (predicted, counted) in traffic["wrong"].items():
        lines.append(f"traffic, {what}: (calls, bytes) {counted} counted, {predicted} predicted")
    if not traffic["wrong"]:
        size = traffic["bytes"] / MIB
        lines.append(f"traffic: {traffic['calls']:,} calls of {size:,.2f} MiB, equal to the prediction")
    return "\n".join(lines)


def changes(found: Sequence[Sheet]) -> str:
    """Single changes that would make a run fit."""
    if not found:
        return f"{INDENT}no single change of zero, recompute, micro-batch, tensor or pipeline makes it fit"
    # of each key the smallest change that is enough; the others are in the same order
    first = {change["set"].partition("=")[0]: change for change in reversed(found)}
    shown = [change for change in found if change in first.values()]
    lines = [f"{c['set']:<28} {c['need'] / GIB:>8.2f} GiB, {c['more_flops']:+.1%} FLOPs" for c in shown]
    return "\n".join(block("would fit", lines))
