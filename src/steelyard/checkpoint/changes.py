"""What a run that goes on from a checkpoint does otherwise than the run that saved it, and what of that needs a word.

The layout, the rates and the length may change freely. What the network computes, or which tokens come next, changes
only when `checkpoint.accept` names the key.
"""

from dataclasses import dataclass
from typing import Any

from steelyard.spec import Run, write
from steelyard.spec.errors import Problem, UserError, problem

# Sizes: no word helps, the tensors are others. The vocabulary's padding is made to fit on load.
SIZES = (
    "num_layers", "hidden_size", "num_attention_heads", "head_dim", "num_query_groups", "ffn_hidden_size",
    "vocab_size", "max_position_embeddings", "position", "norm", "bias", "qkv_bias", "tied_embeddings",
    "embedding_norm", "qk_norm",
)  # fmt: skip
# Not asked about: what only the first weights followed from, and what leaves the network the same.
FREE_MODEL = ("kind", "init_std", "vocab_multiple")
WORDED = ("seed", "data.mask_loss_at_eod", "data.reset_positions", "data.reset_attention")
ORDER = "data.train"  # the key that stands for "other tokens follow"


@dataclass(frozen=True)
class Change:
    """One key with another value: `there` in the checkpoint, `here` in this run (None: not set)."""

    key: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.there)} -> {_shown(self.here)}"


def _shown(value: Any) -> str:
    return "unset" if value is None else repr(value) if isinstance(value, str) else str(value)


def changes(saved: Run, run: Run) -> list[Change]:
    """Every key of the two runs that differs, but for where they record and when they stop."""
    there, here = _flat(write.as_config(saved)), _flat(write.as_config(run))
    keys = [key for key in (*there, *here) if key.partition(".")[0] not in ("record", "stop", "checkpoint", "name")]
    return [
        Change(key, there.get(key), here.get(key)) for key in dict.fromkeys(keys) if there.get(key) != here.get(key)
    ]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def judge(saved: Run, run: Run, step: int, same_order: bool, path: object) -> list[Change]:
    """Every change; refuses what cannot be, and what needs a word and has none.

    `step`: of the checkpoint; before the first, no order has begun. `same_order`: the samples consumed last, read again
    under this run, are those that were trained on. Raises UserError C003 for another network, C007 for each change that
    `checkpoint.accept` does not name.
    """
    found = changes(saved, run)
    by_key = {change.key: change for change in found}
    sizes = [by_key[f"model.{name}"] for name in SIZES if f"model.{name}" in by_key]
    if sizes:
        raise UserError([_of_size(change, path) for change in sizes])
    worded = [change for change in found if _needs_word(change.key, step)]
    rows = Change("model.vocab_multiple", f"{saved.padded_vocab_size} rows", f"{run.padded_vocab_size} rows")
    if run.model.padding_in_softmax and rows.there != rows.here:  # rows of the softmax come or go
        worded.append(rows)
    if not same_order and not any(change.key in ("seed", "model.seq_length") for change in worded):
        worded.append(by_key.get(ORDER, Change(ORDER, "the samples trained on last", "others in their place")))
    missing = [change for change in worded if change.key not in run.checkpoint.accept]
    if missing:
        accepted = [*run.checkpoint.accept, *(change.key for change in missing)]
        raise UserError(
            [
                problem("C007", change.key, path=path, there=_shown(change.there), here=_shown(change.here),
                        name=change.key, accept=str(accepted).replace("'", '"'))
                for change in missing
            ]
        )  # fmt: skip
    return found


def _needs_word(key: str, step: int) -> bool:
    section, _, name = key.partition(".")
    if section == "model":
        return name not in FREE_MODEL
    return step > 0 and key in WORDED


def _of_size(change: Change, path: object) -> Problem:
    detail = f"{change.key} is {_shown(change.there)} there, {_shown(change.here)} here"
    if change.key == "model.vocab_size":
        detail += " (real rows, before padding)"
    return problem("C003", change.key, path=path, detail=detail)
