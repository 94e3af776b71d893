"""Every reader on lines as its framework prints them: no value is wrong, none is invented, each has its line.

Iteration lines with a source in the comments were printed by real runs; the others follow the frameworks' templates.
"""

# ruff: noqa: E501  (log lines are as long as they are)
import pytest

from steelyard.frameworks import detect
from steelyard.record.schema import Step
from steelyard.record.writer import RunFolder
from steelyard.spec import UserError


@pytest.fixture
def read(tmp_path):
    def reading(text, name="run.log"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return detect.read(path)

    return reading


def row(record, place=0):
    """The known amounts of a step."""
    step = record.steps[place]
    names = ("samples", "tokens", "loss", "grad_norm", "learning_rate", "loss_scale", "batch_size")
    known = {name: getattr(step, name) for name in names if getattr(step, name) is not None}
    if step.seconds is not None:
        known["seconds"] = round(step.seconds, 6)
    return {"step": step.step, **known}


# BigScience Megatron-DeepSpeed experiments and the BLOOM log; Megatron-LM v1.0, v2.5, 2023-11, 2024-07, 2026-01
MEGATRON = {
    "2020": (
        " iteration      100/  500000 | elapsed time per iteration (ms): 521.3 | learning rate: 1.406E-06 | "
        "lm loss: 9.701E+00 | loss scale: 65536.0 |",
        {"step": 100, "loss": 9.701, "learning_rate": 1.406e-06, "loss_scale": 65536.0, "seconds": 0.5213},
    ),
    "2021": (
        " iteration        2/    1000 | consumed samples:         2048 | elapsed time per iteration (ms): 125536.8 | "
        "learning rate: 3.750E-05 | global batch size:  1024 | lm loss: 1.244502E+01 | loss scale: 12.0 | "
        "grad norm: 68.180 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        {"step": 2, "samples": 2048, "loss": 12.44502, "grad_norm": 68.18, "learning_rate": 3.75e-05,
         "loss_scale": 12.0, "batch_size": 1024, "seconds": 125.5368},
    ),
    "placeholders": (
        " iteration        1/    1000 | consumed samples:         1024 | elapsed time per iteration (ms): 159778.9 | "
        "learning rate: 1.875E-05 | global batch size:  1024 | lm-loss: 1.244238E+01 | loss scale: -1.0 | "
        "grad norm: 0.000 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        {"step": 1, "samples": 1024, "loss": 12.44238, "learning_rate": 1.875e-05, "batch_size": 1024,
         "seconds": 159.7789},
    ),
    "tokens and ms": (
        " iteration    16800/  159576 | consumed samples:      7594208 | consumed tokens:  15552937984 | elapsed time "
        "per iteration (ms): 384505.8 | learning rate: 5.955E-05 | global batch size:  2048 | lm loss: 2.682074E+00 | "
        "loss scale: 524288.0 | grad norm: 180376.315 | num zeros: 0.0 | number of skipped iterations:   0 | number of "
        "nan iterations:   0 | samples per second: 0.005 | TFLOPs: 35.24 |",
        {"step": 16800, "samples": 7594208, "tokens": 15552937984, "loss": 2.682074, "grad_norm": 180376.315,
         "learning_rate": 5.955e-05, "loss_scale": 524288.0, "batch_size": 2048, "seconds": 384.5058},
    ),
    "seconds and tee": (
        "[default7]: iteration    12695/  115311 | consumed samples:      9841584 | consumed tokens:  20155564032 | "
        "elapsed time per iteration (s): 105.22 | learning rate: 5.969E-05 | global batch size:  2048 | lm loss: "
        "2.463556E+00 | grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan "
        "iterations:   0 | samples per second: 19.463 | TFLOPs: 149.02 |",
        {"step": 12695, "samples": 9841584, "tokens": 20155564032, "loss": 2.463556, "grad_norm": 0.174,
         "learning_rate": 5.969e-05, "batch_size": 2048, "seconds": 105.22},
    ),
    "2026": (
        " [2026-11-30 10:58:59.560210] iteration        1/       4 | consumed samples:            8 | elapsed time per "
        "iteration (ms): 198.7 | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: 1.000000E-03 | global batch "
        "size:     8 | lm loss: 6.250893E+00 | mtp_1 loss: 7.1E+00 | loss scale: 1.0 | grad norm: 1.392 | num zeros: "
        "0.0 | params norm: 25.308 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        {"step": 1, "samples": 8, "loss": 6.250893, "grad_norm": 1.392, "learning_rate": 1e-3, "loss_scale": 1.0,
         "batch_size": 8, "seconds": 0.1987},
    ),
}  # fmt: skip


@pytest.mark.parametrize("era", MEGATRON)
def test_megatron_lines(read, era):
    text, expected = MEGATRON[era]
    record = read(text + "\n")
    assert row(record) == expected
    assert record.lines == [1]


def test_the_same_line_twice_is_one_step(read):
    record = read(LINE + "\n[default3]:" + LINE)
    assert len(record.steps) == 1 and not record.events


LINE = MEGATRON["seconds and tee"][0].removeprefix("[default7]:")


@pytest.mark.parametrize("width", [70, 80, 97, 120])
def test_a_wrapped_line_is_whole_again(read, width):
    wrapped = "\n".join(LINE[i : i + width] for i in range(0, len(LINE), width))
    record = read(f"{wrapped}\ntime (ms) | forward: 3.1\n")
    assert row(record) == MEGATRON["seconds and tee"][1]


def test_a_cut_line_gives_what_is_whole(read):
    cut = LINE[: LINE.index("2.463556") + 4]
    record = read(f"{cut}\n[default3]:time (ms) | forward: 9.99 |\n{LINE}\n".replace("12695", "12694", 1))
    assert [s.step for s in record.steps] == [12694, 12695]
    assert record.steps[0].loss is None  # 2.46 is a part of a number
    assert record.steps[0].seconds == 105.22


def test_every_cut_of_a_line_is_right_or_absent(read):
    """No prefix of the line gives a value that the whole line does not have."""
    whole = MEGATRON["seconds and tee"][1]
    for end in range(LINE.index("elapsed") + 60, len(LINE), 3):
        record = read(
            LINE[:end] + "\n| 0  Tesla V100-SXM2...  On | 00000000:1A:00.0 Off |\n" + LINE.replace("12695", "12696")
        )
        if record.steps[0].step == 12695:
            assert row(record).items() <= whole.items()


def test_two_ranks_in_one_line(read):
    report = "[Rank {}] (after 20 iterations) memory (MB) | allocated: {}.5 | max allocated: 3.0 | reserved: 4.0 | max reserved: 5.0"
    text = report.format(7, 1) + report.format(6, 2) + "\n\n" + LINE + report.format(5, 9) + "\n"
    record = read(text)
    assert {rank: kinds["allocated"] for rank, kinds in record.ranks.items()} == {
        7: 1.5 * 2**20,
        6: 2.5 * 2**20,
        5: 9.5 * 2**20,
    }
    assert record.memory["reserved_peak"] == 5 * 2**20
    assert record.sources["memory.allocated"].endswith(":1")
    assert row(record) == MEGATRON["seconds and tee"][1]


def test_a_restart_is_one_run_with_a_seam(read):
    def line(iteration, loss):
        return LINE.replace("12695", f"{iteration}").replace("2.463556E+00", f"{loss:.6E}")

    first = [line(n, 3 - n / 100) for n in (1, 2, 3, 4)]
    second = [line(n, 3.5 - n / 100) for n in (3, 4, 5)]
    record = read(
        "\n".join(
            [
                "using world size: 8, data-parallel-size: 8, tensor-model-parallel size: 1, pipeline-model-parallel size: 1",
                *first,
                "using world size: 16, data-parallel-size: 16, tensor-model-parallel size: 1, pipeline-model-parallel size: 1",
                *second,
            ]
        )
    )
    assert [s.step for s in record.steps] == [1, 2, 3, 4, 5]
    assert record.steps[2].loss == 3.47 and record.lines[2] == 7
    seam = next(e for e in record.events if e.what == "restart")
    assert (seam.step, seam.detail["abandoned"], seam.detail["loss_before"], seam.detail["loss_after"]) == (
        3,
        2,
        2.97,
        3.47,
    )
    assert record.config["parallel"]["data"] == 16


def test_a_loss_that_is_not_a_number(read):
    record = read(LINE.replace("2.463556E+00", "nan"))
    assert record.steps[0].loss is None and record.steps[0].nan == 1


def test_megatron_argument_block(read):
    text = """using world size: 32, data-parallel-size: 2, tensor-model-parallel size: 4, pipeline-model-parallel size: 4
------------------------ arguments ------------------------
  activations_checkpoint_method ................... uniform
  activations_checkpoint_num_layers ............... 2
  attention_dropout ............................... 0.1
  bf16 ............................................ True
  embed_layernorm ................................. True
  ffn_hidden_size ................................. 4096
  global_batch_size ............................... 64
  hidden_size ..................................... 1024
  lr .............................................. 0.00015
  micro_batch_size ................................ 4
  num_attention_heads ............................. 16
  num_layers ...................................... 24
  position_embedding_type ......................... PositionEmbeddingType.alibi
  seq_length ...................................... 2048
  use_distributed_optimizer ....................... True
-------------------- end of arguments ---------------------
 > padded vocab (size: 250680) with 200 dummy tokens (new size: 250880)
"""
    record = read(text + LINE)
    config = record.config
    assert config["recompute"] == {"mode": "full", "every": 2, "shard": False}
    assert config["model"]["position"] == "alibi" and config["model"]["embedding_norm"] is True
    assert config["parallel"]["zero"] == 1 and config["parallel"]["data"] == 2
    assert (config["model"]["vocab_size"], config["precision"]["compute"]) == (250680, "bf16")
    assert record.sources["model.num_layers"].endswith("run.log:14")
    assert record.sources["model.hidden_dropout"] == "default of Megatron-LM"


# Lines of issue texts and pull requests: TorchTitan #533, #950, #2389; nanotron #390; nanoGPT #178, #215; llm.c #796;
# MaxText #761 and documentation; litgpt #1607; lingua and nanochat runs
OTHERS = {
    "TorchTitan 2024": (
        "[rank0]:2024-08-19 11:10:33,811 - root - INFO - step:  1  loss: 12.2365  memory: 81.67GiB(85.93%)  wps: 5,380  mfu: 1.09%",
        "TorchTitan", {"step": 1, "loss": 12.2365},
    ),
    "TorchTitan 2025": (
        "\x1b[31mstep: 22  \x1b[32mloss:  6.2250  \x1b[33mmemory:  1.41GiB(1.79%)  \x1b[34mtps: 193,831  tflops: 18.36  mfu: 1.86%\x1b[39m",
        "TorchTitan", {"step": 22, "loss": 6.225},
    ),
    "TorchTitan 2026": (
        "step:  4  loss:  7.62585  grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: N/A",
        "TorchTitan", {"step": 4, "loss": 7.62585, "grad_norm": 26.625},
    ),
    "nanotron 2024": (
        "10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 327281 / 378950 | consumed_tokens: 85.8G | "
        "elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K | tokens_per_sec_per_gpu: 11.4K | "
        "global_batch_size: 64 | lm_loss: 2.38 | lr: 1e-05 | model_tflops_per_gpu: 38.3 | hardware_tflops_per_gpu: 38.3 "
        "| grad_norm: 1.25",
        "nanotron", {"step": 327281, "loss": 2.38, "grad_norm": 1.25, "learning_rate": 1e-5, "seconds": 11.5},
    ),
    "GPT-NeoX": (
        " samples/sec: 124.923 | iteration       10/      60 | elapsed time per iteration (ms): 2049.3 | learning rate: "
        "5.796E-04 | approx flops per GPU: 38.8TFLOPS | MFU: 9.33% | HFU: 12.44% | lm_loss: 9.934210E+00 | loss scale: "
        "1024.0 | number of skipped iterations:   2 | number of nan iterations:   0 |\n"
        "steps: 10 loss: 9.4053 iter time (s): 2.051 samples/sec: 124.801",
        "GPT-NeoX",
        {"step": 10, "loss": 9.93421, "learning_rate": 5.796e-4, "loss_scale": 1024.0, "seconds": 2.0493},
    ),
    "nanoGPT": (
        "iter 2990: loss 3.8853, time 1096.65ms, mfu 15.34%", "nanoGPT",
        {"step": 2990, "loss": 3.8853, "seconds": 1.09665},
    ),
    "nanoGPT 2023-01": ("iter 1631: loss 4.0863, time 561.94ms", "nanoGPT", {"step": 1631, "loss": 4.0863, "seconds": 0.56194}),
    "llm.c": (
        "step   61/74 | loss 3.208939 (+nanz)| norm 1.4800 (+nanz)| lr 3.00e-04 | 44.57 ms | -100.0% bf16 MFU | 91886 tok/s",
        "llm.c",
        {"step": 61, "loss": 3.208939, "grad_norm": 1.48, "learning_rate": 3e-4, "seconds": 0.04457},
    ),
    "Lingua": (
        "0: INFO    24-10-19 18:47:38.013923 - 0:00:49 - step: 1  acc: 0  loss: 12.2087  grad: 1.06e+01  flops: 4.25e+12  "
        "wps: 3.95e+02  iter:  8.2273  data: 33.1016  lr: 0.00e+00  mem: 51%  pow: 96.192 W",
        "Lingua", {"step": 1, "loss": 12.2087, "grad_norm": 10.6, "learning_rate": 0.0},
    ),
    "MaxText": (
        "completed step: 2, seconds: 5.658, TFLOP/s/device: 135.158, Tokens/s/device: 8687.815, total_weights: 196608, loss: 11.689",
        "MaxText", {"step": 2, "loss": 11.689, "seconds": 5.658},
    ),
    "Hugging Face v4": (
        "  1%|          | 10/1000 [00:01<03:45,  1.50s/it]\r{'loss': 1.5214, 'grad_norm': 82.93941089686794, "
        "'learning_rate': 1.4285714285714286e-06, 'epoch': 0.01}",
        "Hugging Face Trainer",
        {"step": 1, "loss": 1.5214, "grad_norm": 82.93941089686794, "learning_rate": 1.4285714285714286e-06},
    ),
    "Hugging Face v5": (
        "{'loss': '2.103', 'grad_norm': '1.23', 'learning_rate': '4.98e-05', 'epoch': '0.01'}",
        "Hugging Face Trainer", {"step": 1, "loss": 2.103, "grad_norm": 1.23, "learning_rate": 4.98e-5},
    ),
    "LitGPT": (
        "Epoch 34 | iter 3050700 step 610140 | loss train: 2.846, val: 2.861 | iter time: 112.20 ms (step) remaining time: 0:01:54",
        "LitGPT", {"step": 610140, "loss": 2.846},
    ),
    "nanochat": (
        "step 00499/182414 (0.27%) | loss: 6.397844 | lrm: 1.00 | dt: 3830.24ms | tok/sec: 8,555 | bf16_mfu: 4.03 | "
        "epoch: 1 pq: 0 rg: 33 | total time: 63.01m | eta: 23441.6m",
        "nanochat", {"step": 499, "loss": 6.397844, "seconds": 3.83024},
    ),
    "OLMo-core": (
        "2025-08-06 10:00:05.520\thost:0\tolmo_core.train\tINFO\t[step=2/739328,epoch=0,eta=1:02]\n    train/CE loss=11.43\n"
        "    optim/total grad norm=3.210\n    optim/LR (group 0)=2.00E-06\n    throughput/device/TPS=26,668\n    throughput/device/BPS=0.5000",
        "OLMo-core", {"step": 2, "loss": 11.43, "grad_norm": 3.21, "learning_rate": 2e-6, "seconds": 2.0},
    ),
    "DeepSpeed pipeline": (
        "[2021-06-10 20:47:52,226] [INFO] [engine.py:134:__init__] RANK=0 STAGE=0 LAYERS=7 [0, 7) STAGE_PARAMS=917757952 (917.758M) TOTAL_PARAMS=52453507072 (52453.507M) UNIQUE_PARAMS=52004716544 (52004.717M)\n"
        "steps: 1 loss: 12.7902 iter time (s): 150.471 samples/sec: 6.805",
        "DeepSpeed", {"step": 1, "samples": 1024, "loss": 12.7902, "batch_size": 1024, "seconds": 150.471},
    ),
    "DeepSpeed": (
        "[2024-12-20 03:11:00,312] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[6e-05, 6e-05], mom=[(0.9, 0.95), (0.9, 0.95)]",
        "DeepSpeed", {"step": 10, "learning_rate": 6e-5},
    ),
    "LLM-Foundry": (
        "[batch=366/48000]:\n\t Train time/batch: 365\n\t Train time/sample: 93440\n\t Train time/token: 382730240\n"
        "\t Train memory/peak_allocated_mem: 44.6420\n\t Train loss/train/total: 10.3750\n",
        "Composer / LLM-Foundry", {"step": 366, "samples": 93696, "tokens": 383778816, "loss": 10.375},
    ),
    "LiBai": (
        "[08/10 11:20:31 lb.utils.events]:  eta: 0:02:00  iteration: 99/220  consumed_samples: 3200  total_loss: 9.712  "
        "time: 1.6886 s/iter  data_time: 0.0012 s/iter total_throughput: 18.95 samples/s lr: 1.50e-04  ",
        "LiBai",
        {"step": 100, "samples": 3200, "loss": 9.712, "learning_rate": 1.5e-4, "batch_size": 32, "seconds": 1.6886},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_lines_of_others(read, name):
    text, framework, expected = OTHERS[name]
    record = read(text + "\n")
    assert record.framework == framework
    assert row(record) == expected


def test_torchtitan_configuration_of_many_lines(read):
    text = """[rank0]:[titan] 2025-11-03 10:00:00,000 - root - INFO - Running with configs: {
[rank0]:  "model": {"name": "llama3", "flavor": "8B"},
[rank0]:  "optimizer": {"name": "AdamW", "lr": 0.0003, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1},
[rank0]:  "lr_scheduler": {"warmup_steps": 200, "decay_type": "cosine", "min_lr_factor": 0.1},
[rank0]:  "training": {"local_batch_size": 2, "seq_len": 8192, "max_norm": 1.0, "steps": 1000, "mixed_precision_param": "bfloat16"},
[rank0]:  "parallelism": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 1, "context_parallel_degree": 1},
[rank0]:  "activation_checkpoint": {"mode": "full"}
[rank0]:}
[rank0]:[titan] 2025-11-03 10:00:01,000 - root - INFO - Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=1
[rank0]:[titan] 2025-11-03 10:00:02,000 - root - INFO - Trainer is initialized with local batch size 2, global batch size 8, gradient accumulation steps 1, sequence length 8192, total steps 1000 (warmup 200)
[rank0]:[titan] 2025-11-03 10:01:00,000 - root - INFO - step: 10  loss:  9.12345  grad_norm:  1.2500  memory: 40.00GiB(50.00%)  tps: 4,096  tflops: 200.00  mfu: 20.00%
"""
    record = read(text)
    config = record.config
    assert (config["parallel"]["tensor"], config["parallel"]["data"], config["parallel"]["zero"]) == (2, 4, 3)
    assert config["recompute"] == {"mode": "full"} and config["learning_rate"]["minimum"] == pytest.approx(3e-5)
    assert config["batch"] == {"micro_batch_size": 2, "global_batch_size": 8, "accumulation": 1}
    assert record.steps[0].tokens_per_second == 4096 * 8
    assert record.steps[0].seconds == pytest.approx(8 * 8192 / (4096 * 8))
    assert record.sources["recompute.mode"].endswith(":1")


def test_libai_reads_the_configuration_beside_its_log(read, tmp_path):
    (tmp_path / "config.yaml").write_text("""train:
  train_micro_batch_size: 8
  zero_optimization:
    enabled: true
    stage: 2
  activation_checkpoint: {enabled: false}
  dist:
    tensor_parallel_size: 2
model:
  cfg:
    hidden_layers: 24
    hidden_size: 1024
""")
    record = read(OTHERS["LiBai"][0], "log.txt")
    assert record.config["parallel"]["zero"] == 2  # in no argument and no line of the log
    assert record.sources["parallel.zero"] == f"{tmp_path / 'config.yaml'}:5"
    assert (record.config["model"]["num_layers"], record.config["parallel"]["tensor"]) == (24, 2)


def test_placeholders_are_not_data(read):
    assert "mfu_percent" not in read("iter 0: loss 4.2648, time 9371.81ms, mfu -100.00%\n").printed
    assert "mfu_percent" not in read(OTHERS["llm.c"][0]).printed
    idle = OTHERS["TorchTitan 2026"][0].replace("7.62585", "-1.0000")
    with pytest.raises(UserError, match="K003"):
        read(idle.replace("grad_norm: 26.6250  ", ""))


def test_only_one_rank_speaks(read):
    lines = [
        f"[rank{r}]:step:  {n}  loss: {9 - n}.{r}000  memory: 1.00GiB(1.00%)  tps: 10  mfu: 1.00%"
        for n in (1, 2)
        for r in (3, 1, 2)
    ]
    assert [(s.step, s.loss) for s in read("\n".join(lines)).steps] == [(1, 8.3), (2, 7.3)]


def test_steady_speed_leaves_out_the_first_window(read):
    """Field report B06: a slow start is not part of the result."""
    text = "".join(
        f" iteration {n:8d}/      30 | consumed samples: {8 * n:12d} | elapsed time per iteration (ms): {90000.0 if n == 1 else 100 + n % 3:.1f} | "
        f"learning rate: 1.000E-04 | global batch size:     8 | lm loss: 9.0E+00 |\n" for n in range(1, 31)
    )  # fmt: skip
    speed = read(text).speed
    assert speed["seconds_per_step"] == pytest.approx(0.101)
    assert speed["samples_per_second"] == pytest.approx(8 / 0.101)
    assert speed["steps_counted"] == 27
    assert speed["seconds_per_step_p10"] == pytest.approx(0.1) and speed["seconds_per_step_p90"] == pytest.approx(0.102)


def test_what_is_no_log(read, tmp_path):
    with pytest.raises(UserError, match="K002"):
        read("Dear diary,\nthe iteration of seasons 1/4 continues.\n")
    with pytest.raises(UserError, match="K001"):
        detect.read(tmp_path / "missing.log")
    with pytest.raises(UserError, match="K001"):
        detect.read(tmp_path.parent)  # a folder without a log


def test_tensorboard_folder(tmp_path):
    """Our own writer's events, read without TensorBoard; a cut file gives what is whole."""
    folder = RunFolder(tmp_path / "run", tensorboard=True)
    for n in range(1, 6):
        folder.append(Step(n, 8 * n, 512 * n, 7 - n / 8, 1.5, 1e-3, None, 0, 0, 0.25, 2048.0, batch_size=8))
    folder.close()
    record = detect.read(tmp_path / "run" / "tensorboard")
    assert [(s.step, s.loss, s.seconds) for s in record.steps] == [(n, 7 - n / 8, 0.25) for n in range(1, 6)]
    assert record.steps[0].learning_rate == pytest.approx(1e-3) and record.speed["samples_per_second"] == 32.0
    path = next((tmp_path / "run" / "tensorboard").iterdir())
    path.write_bytes(path.read_bytes()[:-30])
    assert [s.step for s in detect.read(path.parent).steps][:4] == [1, 2, 3, 4]
