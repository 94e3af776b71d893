"""The base of every section of a run file: frozen, strict, no unknown key."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One table of the run file. Values never change after validation and are never coerced from another type
    (TOML's own int -> float apart)."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
