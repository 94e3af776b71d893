"""Logs of MaxText. Steps count from 0. The time is that between two dispatches: step 0 holds the compilation, the next
ones may measure only that work was handed over, so the first three are never taken for speed. Source: MaxText
`metric_logger.py`, `max_utils.py`.
"""

import re

from steelyard.frameworks.lines import number, whole
from steelyard.frameworks.reading import GIB, Reading
from steelyard.record.schema import Validation

NAME = "MaxText"
KEY = "maxtext"

MARKS = (
    re.compile(r"completed step: \d+, seconds: [\d.]+"),
    re.compile(r"Config param [a-z_]+: "),
    re.compile(r"Memstats: After params initialized"),
    re.compile(r"number parameters: [\d.]+ billion"),
)
STEP = re.compile(
    r"completed step: (\d{1,12}), seconds: ([\d.]{1,14})(?:, TFLOP/s/device: ([\d.]{1,14}))?"
    r"(?:, Tokens/s/device: ([\d.]{1,16}))?(?:, total_weights: (\d{1,16}))?, loss: ([\d.]{1,14}|nan|inf)(?=[,\s]|$)"
)
EVALUATION = re.compile(r"eval metrics after step: (\d{1,12}), loss=([\d.]{1,14}|nan)")
SETTING = re.compile(r"Config param ([a-z_A-Z0-9]{1,80}): (.{0,2000})$")
DEVICES = re.compile(r"Num_devices: (\d{1,8}), shape")
PARAMETERS = re.compile(r"number parameters: ([\d.]{1,14}) billion")
USED = re.compile(r"Using \(GB\) ([\d.]{1,12}) / ([\d.]{1,12}) \(")
WHOLE = {
    "emb_dim": "model.hidden_size", "mlp_dim": "model.ffn_hidden_size", "num_decoder_layers": "model.num_layers",
    "num_query_heads": "model.num_attention_heads", "num_kv_heads": "model.num_query_groups",
    "head_dim": "model.head_dim", "max_target_length": "model.seq_length", "vocab_size": "model.vocab_size",
    "global_batch_size_to_train_on": "batch.global_batch_size", "steps": "length.steps",
    "gradient_accumulation_steps": "batch.accumulation", "ici_tensor_parallelism": "parallel.tensor",
}  # fmt: skip
REAL = {
    "adam_eps": "optimizer.eps", "adam_weight_decay": "optimizer.weight_decay", "learning_rate": "learning_rate.peak",
    "gradient_clipping_threshold": "optimizer.clip_grad", "normalization_layer_epsilon": "model.norm_eps",
}  # fmt: skip
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
STEADY = 3


class Reader:
    def __init__(self, source: str):
        self.reading = Reading(NAME, source)
        self.reading.zero_based = True
        self.reading.conventions = {
            "loss": "this step, all devices",
            "seconds": "between two dispatches",
            "memory": "after the parameters were made, GB = 2^30, largest device",
        }
        self.betas: dict[str, float] = {}
        self.devices: int | None = None
        self.used = 0.0
        self.reading.default("engine.framework", KEY, "the log's format")

    def feed(self, line: int, text: str) -> None:
        if "completed step" in text and (found := STEP.search(text)):
            self._step(line, found)
        elif "Config param" in text and (setting := SETTING.search(text)):
            self._setting(line, setting.group(1), setting.group(2).strip())
        elif "Num_devices" in text and (count := DEVICES.search(text)):
            self.devices = int(count.group(1))
            self.reading.environment["world_size"] = self.devices
        elif "number parameters" in text and (parameters := PARAMETERS.search(text)):
            self.reading.print("parameters_billions", number(parameters.group(1)), line)
        elif "Using (GB)" in text and (used := USED.search(text)):
            self.used = max(self.used, number(used.group(1)) or 0.0)
            self.reading.print("after_initialisation_bytes", round(self.used * GIB), line)
        elif "eval metrics" in text and (evaluation := EVALUATION.search(text)):
            loss = number(evaluation.group(2))
            self.reading.validations.append(Validation(int(evaluation.group(1)), 0, "validation", loss, 0, 0.0))

    def _step(self, line: int, found: re.Match[str]) -> None:
        step, rate = int(found.group(1)), number(found.group(4)) if found.group(4) else None
        if found.group(3):
            self.reading.print("tflops", number(found.group(3)), line)
        if rate is not None:
            self.reading.print("tokens_per_second_per_device", rate, line)
        self.reading.step(
            line,
            step,
            loss=number(found.group(6)),
            seconds=number(found.group(2)),
            tokens_per_second=rate * self.devices if rate and self.devices else None,
            steady=step >= STEADY,
        )

    def _setting(self, line: int, name: str, text: str) -> None:
        reading = self.reading
        if name in WHOLE:
            reading.set(WHOLE[name], whole(text), line)
        elif name in REAL:
            reading.set(REAL[name], number(text), line)
        elif name in ("adam_b1", "adam_b2") and (beta := number(text)) is not None:
            self.betas[name] = beta
            if len(self.betas) == 2:
                reading.set("optimizer.betas", [self.betas["adam_b1"], self.betas["adam_b2"]], line)
        elif name == "dtype":
            reading.set("precision.compute", DTYPES.get(text), line)
        elif name == "grad_dtype":
            reading.set("precision.gradients", DTYPES.get(text), line)
        elif name == "logits_via_embedding":
            reading.set("model.tied_embeddings", {"True": True, "False": False}.get(text), line)
        elif name == "mlp_activations" and text == "['silu', 'linear']":
            reading.set("model.activation", "swiglu", line)
        elif name == "remat_policy" and text in ("full", "none"):
            reading.set("recompute.mode", text, line)
        elif name == "opt_type" and text == "adamw":
            reading.set("optimizer.name", "adamw", line)
        elif name == "per_device_batch_size" and (size := number(text)) and size >= 1 and size.is_integer():
            reading.set("batch.micro_batch_size", int(size), line)
        elif name == "ici_fsdp_parallelism" and text not in ("1", "0"):
            reading.set("parallel.zero", 3, line)
        elif name in ("learning_rate_final_fraction", "warmup_steps_fraction", "cosine_learning_rate_final_fraction"):
            reading.print(name, number(text), line)

    def finish(self) -> None:
        reading, tensor = self.reading, self.reading.config.get("parallel.tensor", 1)
        if self.devices and tensor and not self.devices % tensor:
            reading.default("parallel.data", self.devices // tensor, "devices / tensor")
        peak = reading.config.get("learning_rate.peak")
        for name in ("learning_rate_final_fraction", "cosine_learning_rate_final_fraction"):
            if peak is not None and (fraction := reading.printed.get(name)) is not None:
                reading.default("learning_rate.minimum", peak * fraction, name)
        steps, fraction = reading.config.get("length.steps"), reading.printed.get("warmup_steps_fraction")
        if steps and fraction is not None and 0 <= fraction <= 1:
            reading.default("learning_rate.warmup_steps", int(fraction * steps), "warmup_steps_fraction x steps")
