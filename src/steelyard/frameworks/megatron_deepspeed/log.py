"""Logs of Megatron-DeepSpeed, spring 2021 to 2023: Megatron's lines with DeepSpeed's between them.

Eras of the training line: milliseconds without samples (spring 2021), with samples (2021), with tokens and samples per
*millisecond* (December 2021), seconds (from 2022-01-28).
"""

import re

from steelyard.frameworks.deepspeed import log as deepspeed
from steelyard.frameworks.lines import number
from steelyard.frameworks.megatron import dump
from steelyard.frameworks.megatron import log as megatron

NAME = "Megatron-DeepSpeed"
KEY = "megatron_deepspeed"

MARKS = (
    *megatron.MARKS,
    re.compile(r"^\s*(?:\[\w+\]:)?\s*deepspeed(?:_config|_mpi|_activation_checkpointing)? \.*"),
    re.compile(r"STAGE_PARAMS=\d+"),
    re.compile(r"DeepSpeed info: version|DeepSpeedEngine configuration"),
    re.compile(r"elapsed time per iteration \(s\)|consumed tokens:|lm-loss:|estimated model parameters"),
    re.compile(r"Effective Tera Flops per GPU"),
)
ESTIMATED = re.compile(r"estimated model parameters( without embeddings)?: ([\d.]{1,24})")
EFFECTIVE = re.compile(r"Effective Tera Flops per GPU: ([\d.]{1,12})")


class Reader(megatron.Reader):
    name = NAME
    key = KEY

    def other(self, line: int, text: str) -> None:
        if deepspeed.feed(self.reading, line, text):
            return
        if "estimated model" in text and (found := ESTIMATED.search(text)):
            name = "estimated_without_embeddings" if found.group(1) else "estimated"
            self.reading.print(name, number(found.group(2)), line)
        elif "Effective Tera" in text and (found := EFFECTIVE.search(text)):
            self.reading.print("tflops", number(found.group(1)), line)

    def _close_block(self) -> None:
        entries = self.block or {}
        said = self.reading.attempts[-1].sources.get("parallel.zero")
        super()._close_block()
        self._zero(entries, said)
        if entries.get("deepspeed", ("", 0))[0] == "True":
            self.reading.set("engine.framework", KEY, entries["deepspeed"][1])

    def _zero(self, entries: dump.Entries, said: str | None) -> None:
        """Without the DeepSpeed engine nothing is sharded, whatever `zero_stage` says; with it the engine's own
        configuration, printed later, has the last word."""
        engine, line = entries.get("deepspeed", ("", 0))
        stage, stage_line = entries.get("zero_stage", ("", 0))
        if said is not None:
            return
        if engine == "False":
            self.reading.set("parallel.zero", 0, line)
            if stage not in ("", "0", "0.0"):
                self.reading.note(f"zero_stage = {stage} has no effect: deepspeed = False")
        elif stage.removesuffix(".0") in ("0", "1", "2", "3"):
            self.reading.set("parallel.zero", int(stage.removesuffix(".0")), stage_line)
