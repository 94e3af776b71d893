"""The one place that words a user's error.

An error has a code, the rule that was broken, the place (a key of the run file, a file and line, a flag) and the way
out. Callers say which rule with which facts: `raise error("S104", "parallel.tensor", heads=4, tensor=3, legal="1, 2")`.
`steelyard explain S104` prints the last text of an entry.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Wording:
    """rule and hint are format strings over the caller's facts; why is for `steelyard explain`."""

    rule: str
    hint: str
    why: str


@dataclass(frozen=True)
class Problem:
    """One broken rule. `key` is the run-file key it is about; `place` where the value was written, once known."""

    code: str
    rule: str
    hint: str
    key: str = ""
    place: str = ""

    def at(self, place: str) -> "Problem":
        return replace(self, place=place)

    def render(self) -> str:
        lines = [f"error[{self.code}]: {self.rule}"]
        if where := self.place or self.key:
            lines.append(f"  --> {where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class UserError(Exception):
    """Something the user can mend. Printed as it is, without a traceback; the exit code is 2."""

    def __init__(self, problems: "list[Problem] | Problem"):
        self.problems = problems if isinstance(problems, list) else [problems]
        super().__init__("\n".join(p.render() for p in self.problems))


class Reported(UserError):
    """An error that another process has worded."""

    def __init__(self, text: str):
        super().__init__([])
        self.args = (text,)


def problem(code: str, key: str = "", place: str = "", **facts: object) -> Problem:
    wording = CATALOGUE[code]
    return Problem(code, wording.rule.format(**facts), wording.hint.format(**facts), key, place)


def error(code: str, key: str = "", place: str = "", **facts: object) -> UserError:
    return UserError(problem(code, key, place, **facts))


def explain(code: str) -> str:
    """The long text of a code. Raises UserError E001 for a code that does not exist."""
    wording = CATALOGUE.get(code.upper())
    if wording is None:
        raise error("E001", asked=code, codes=", ".join(sorted(CATALOGUE)))
    return wording.why


def did_you_mean(word: str, known: list[str]) -> str:
    """' Did you mean ...?' when one is close, else nothing."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(known))}"


def limited(values: list[int], most: int = 12) -> str:
    """A list of legal values as text, cut where it would not be read."""
    text = ", ".join(str(v) for v in values[:most])
    return text + (", ..." if len(values) > most else "")


def divisors(number: int) -> list[int]:
    """Every divisor in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


CATALOGUE: dict[str, Wording] = {
    # --- E: the command line -----------------------------------------------------------------------------------------
    "E001": Wording(
        "there is no error code {asked}",
        "the codes are {codes}",
        "`steelyard explain CODE` knows the codes that stand in brackets after `error`, such as S104.",
    ),
    "E002": Wording(
        "{count} ranks are asked for; a run needs at least one",
        "give --world 1 or more, or leave it out",
        "--world N is the number of ranks (processes, one per device) of the run.",
    ),
    "E003": Wording(
        "cannot use {path}: {detail}",
        "give a path that can be read or written",
        "A file or folder named on the command line cannot be opened or made.",
    ),
    # --- S0: reading a run file --------------------------------------------------------------------------------------
    "S001": Wording(
        "the run file is not valid TOML: {detail}",
        "{advice}",
        "Run files are TOML 1.0 (toml.io). Strings need quotes, true and false are lower case, and every table is "
        "written once.",
    ),
    "S002": Wording(
        "cannot read the run file: {detail}",
        "check the path; `steelyard check recipes/gpt-345m.toml` shows one that works",
        "The run file is read once, at the start. The path is taken relative to the current folder.",
    ),
    "S003": Wording(
        "unknown key {name}",
        "{suggestion}",
        "Run files are strict: a key that no part of the system reads is an error, because a misspelt key that is "
        "silently ignored trains the wrong model.",
    ),
    "S004": Wording(
        "{name} must be {expected}, not {found}",
        "{advice}",
        'Values are never converted from another type: "8" is a string, 8 an integer, 8.0 a float, 1e-4 a float.',
    ),
    "S005": Wording(
        "{name} must be {expected}, not {found}",
        "{advice}",
        "The value has the right type but is outside what the key can mean.",
    ),
    "S006": Wording(
        "cannot read the override {text!r}",
        "write key=value with a dotted key, for example parallel.tensor=2 or 'data.train=[\"corpus\"]'",
        "Overrides on the command line have the form section.key=value. The value is read as TOML; what is not TOML is "
        "taken as a string.",
    ),
    "S007": Wording(
        "{section} must be a table of keys, not {found}",
        "write it as [{section}] on a line of its own, with its keys below",
        "Apart from name and seed every key of a run file belongs to a section.",
    ),
    # --- S1: shapes and layout ---------------------------------------------------------------------------------------
    "S101": Wording(
        "hidden_size {hidden} does not divide over {heads} attention heads",
        "num_attention_heads may be {legal}; or set model.head_dim to choose the width of a head yourself",
        "Without head_dim each attention head is hidden_size / num_attention_heads wide, which must be a whole number.",
    ),
    "S102": Wording(
        "{heads} attention heads do not divide over {groups} query groups",
        "num_query_groups may be {legal}",
        "In grouped-query attention every group of query heads shares one key and one value head, so all groups are of "
        "one size.",
    ),
    "S103": Wording(
        "rotary positions need an even number of rotated channels; head_dim {head_dim} x rotary_fraction {fraction} "
        "gives {channels}",
        "choose head_dim or rotary_fraction so that their product is even",
        "Rotary embedding turns channels in pairs.",
    ),
    "S104": Wording(
        "{heads} attention heads do not divide over tensor = {tensor}",
        "legal values here are {legal}",
        "Tensor parallelism gives every rank whole attention heads, so num_attention_heads must be a multiple of "
        "parallel.tensor.",
    ),
    "S105": Wording(
        "{groups} query groups do not divide over tensor = {tensor}",
        "legal values here are {legal}",
        "Tensor parallelism gives every rank whole query groups (their keys and values included). Replicating a group "
        "on several ranks is not done here.",
    ),
    "S106": Wording(
        "ffn_hidden_size {ffn} does not divide over tensor = {tensor}",
        "legal values here are {legal}",
        "Tensor parallelism cuts the MLP's hidden units evenly over the tensor ranks.",
    ),
    "S107": Wording(
        "seq_length {seq_length} does not divide over tensor = {tensor}, which sequence parallelism needs",
        "legal values here are {legal}; or set parallel.sequence = false",
        "With parallel.sequence the activations between the matrix products are cut along the sequence over the tensor "
        "ranks, in equal parts.",
    ),
    "S108": Wording(
        "the stages hold {given} layers together, the model has {layers}",
        "the list must have {stages} numbers (pipeline x virtual) that sum to {layers}, for example {example}",
        "parallel.stages lists the layers of every pipeline stage. Nothing is dropped: the sum must be num_layers.",
    ),
    "S109": Wording(
        "{layers} layers cannot fill {stages} pipeline stages (pipeline {pipeline} x virtual {virtual})",
        "every stage needs a layer: pipeline x virtual may be at most {layers}",
        "A pipeline stage without a transformer layer would only pass activations on.",
    ),
    "S110": Wording(
        "the vocabulary of {vocab} rows does not divide over tensor = {tensor}",
        "set model.vocab_multiple to a multiple of {tensor} (128 is usual); the rows added are never predicted",
        "The embedding table is cut over the tensor ranks by rows. Padding it is a property of the model "
        "(vocab_multiple), so that the layout never changes the model's size.",
    ),
    "S111": Wording(
        "this run needs tensor {tensor} x context {context} x pipeline {pipeline} = {need} ranks, or a multiple; "
        "{world} were given",
        "use --world {suggestion}",
        "Every copy of the model takes tensor x context x pipeline ranks; data parallelism multiplies the copies.",
    ),
    "S112": Wording(
        "seq_length {seq_length} is longer than the {positions} learned positions",
        "set model.max_position_embeddings = {seq_length} or a shorter model.seq_length",
        "A learned position table has a row for every position of a sequence.",
    ),
    "S113": Wording(
        "sequence parallelism needs tensor parallelism, and parallel.tensor is 1",
        "set parallel.tensor to 2 or more, or parallel.sequence = false",
        "Sequence parallelism shards, over the tensor ranks, what tensor parallelism would replicate.",
    ),
    "S114": Wording(
        "the {schedule} schedule {needs}, and parallel.virtual is {virtual}",
        "set {advice}",
        "interleaved and zero_bubble schedules run several model chunks per rank, zbv exactly two in a V; gpipe and "
        "1f1b run one.",
    ),
    "S115": Wording(
        "{data} data ranks do not divide into replicate = {replicate} groups",
        "legal values here are {legal}",
        "Hybrid sharding keeps `replicate` copies of the shards; each copy is spread over data / replicate ranks.",
    ),
    "S116": Wording(
        "data = {data} does not fit {world} ranks: tensor {tensor} x context {context} x pipeline {pipeline} x data "
        "{data} = {product}",
        "use --world {product}, or leave parallel.data out to have it follow from the world",
        "World size = data x context x tensor x pipeline.",
    ),
    "S117": Wording(
        "zero = 2 has no meaning in a pipeline",
        "use parallel.zero = 1 (the same memory here) or 3",
        "PyTorch's pipeline schedules reduce gradients once per step, after the last micro-batch, so gradients stay "
        "whole until then and stage 2 would save nothing over stage 1.",
    ),
    "S118": Wording(
        "the {schedule} schedule with full recompute would run every block's forward pass about four times",
        'use recompute.mode = "none" or "selective", or parallel.pipeline_schedule = "1f1b" or "interleaved"',
        "Zero-bubble schedules compute input gradients and weight gradients in two passes, and full recompute repeats "
        "the forward for each.",
    ),
    "S119": Wording(
        "recompute.shard keeps saved inputs sharded over the tensor ranks, and {why_not}",
        "{advice}",
        'Partitioned activations need parallel.tensor > 1 and recompute.mode = "full"; with sequence parallelism the '
        "saved inputs are sharded already.",
    ),
    "S120": Wording(
        "the {schedule} schedule with zero = 3 computes wrong gradients or hangs in PyTorch",
        'use parallel.zero = 1, or parallel.pipeline_schedule = "1f1b" or "interleaved"',
        "Zero-bubble schedules split the backward pass in two, and FSDP2 does not gather the parameters again for the "
        "second half. Seen with torch 2.13: losses off by 0.07 after 20 steps (zbv), a hang (zero_bubble).",
    ),
    "S121": Wording(
        'recompute.mode = "selective" with no recompute.modules recomputes nothing',
        'name at least one of "attention", "mlp", "norm", or set recompute.mode = "none"',
        "Selective recompute runs chosen parts of every block again in the backward pass, and keeps what the others "
        "save.",
    ),
    "S122": Wording(
        "seq_length {seq_length} does not divide over context = {context}",
        "legal values here are {legal}",
        "Context parallelism cuts every sequence into equal parts over its ranks.",
    ),
    # --- S2: batch ---------------------------------------------------------------------------------------------------
    "S201": Wording(
        "the batch does not add up: global = micro x accumulation x data, but {micro} x {accumulation} x {data} = "
        "{product}, not {global_batch}",
        "{advice}",
        "The global batch is the number of sequences of one optimizer step. Any two of global_batch_size, "
        "micro_batch_size and accumulation give the third; the data-parallel size comes from the layout.",
    ),
    "S202": Wording(
        "global_batch_size {global_batch} does not divide over {data} data-parallel ranks (world / (tensor x context x "
        "pipeline))",
        "global_batch_size may be {legal}",
        "Every data-parallel rank takes the same number of sequences of each step. Only data-parallel ranks count: "
        "tensor and pipeline ranks share theirs.",
    ),
    "S203": Wording(
        "the batch ramp from {start} to {global_batch} is not a whole number of increments of {increment}",
        "the increment may be {legal}",
        "A ramp [start, increment, samples] grows the global batch from start to global_batch_size in equal steps.",
    ),
    "S204": Wording(
        "the batch ramp has sizes that are not multiples of micro {micro} x data {data} = {unit}: {bad}",
        "choose start and increment as multiples of {unit}, or a smaller micro_batch_size",
        "Every level of the ramp must be made of whole micro-batches on every data-parallel rank. All levels are "
        "checked before launch.",
    ),
    "S205": Wording(
        "the batch ramp starts at {start}, not below global_batch_size {global_batch}",
        "start the ramp below the global batch, or leave it out",
        "A ramp only grows.",
    ),
    "S206": Wording(
        "the interleaved schedules need a number of micro-batches that {pipeline} ranks divide; accumulation is "
        "{accumulation}",
        "batch.accumulation may be {legal}",
        "Interleaved schedules hand model chunks round the pipeline in groups of as many micro-batches as ranks.",
    ),
    # --- S3: length, learning rate, the rest -------------------------------------------------------------------------
    "S301": Wording(
        "{count} lengths are given ({names}); a run has one",
        "keep one of length.steps, length.samples and length.tokens",
        "The run's length is stated once; the others follow from the batch.",
    ),
    "S302": Wording(
        "the warm-up is given {count} times ({names})",
        "keep one of warmup_fraction, warmup_steps and warmup_samples",
        "The warm-up is stated once.",
    ),
    "S303": Wording(
        "the decay is given twice (decay_steps and decay_samples)",
        "keep one of them",
        "The decay is stated once.",
    ),
    "S304": Wording(
        "the warm-up ends after {warmup:,} samples ({warmup_origin}), but the decay already ends after {decay:,} "
        "({decay_origin})",
        "shorten the warm-up below {decay:,} samples ({decay_steps:,} steps) or lengthen the decay",
        "The rate rises over the warm-up and then decays until the end of the decay, so the warm-up must be shorter. "
        "Amounts given in steps are converted through the batch sizes of the run.",
    ),
    "S305": Wording(
        "the minimum rate {minimum:g} is above the peak {peak:g}",
        "set learning_rate.minimum at most {peak:g}",
        "The rate decays from peak to minimum.",
    ),
    "S306": Wording(
        "cannot read the split {split!r}",
        'write up to three weights for training, validation and test, for example "949,50,1"',
        "The split divides the documents of data.train in proportion to its weights.",
    ),
    "S307": Wording(
        "length.tokens = {tokens:,} is less than one step of {per_step:,} tokens",
        "ask for at least one step, or a smaller batch",
        "A run takes whole steps: the number of tokens is divided by the tokens of a step, rounded up.",
    ),
    "S308": Wording(
        "{option} works on the query, key and value of one sequence in full, which {conflict} does not give",
        "{advice}",
        "Some options cannot be combined; the reason stands in the message.",
    ),
    # --- R: records --------------------------------------------------------------------------------------------------
    "R001": Wording(
        "{path} is not a run folder: {missing} is missing",
        "give a folder that `steelyard train` wrote",
        "A run folder holds run.toml, environment.json and metrics.jsonl.",
    ),
    "R002": Wording(
        "{path}:{line} is not a record line: {detail}",
        "remove the line, or take the folder's last complete copy",
        "metrics.jsonl holds one JSON object a line. A cut last line (a killed run) is accepted; any other bad line is "
        "an error, because what it held would be lost silently.",
    ),
    "R003": Wording(
        "{path} is a record of version {found}, this steelyard reads up to {known}",
        "upgrade steelyard",
        "Records carry the version of their schema. Older versions are read; newer ones may mean something else.",
    ),
    "R004": Wording(
        "another run is writing into {path}",
        "wait for it, stop it, or choose another record.folder",
        "A run folder belongs to one run at a time; it is locked while a run writes there.",
    ),
    "R005": Wording(
        "cannot write the run folder {path}: {detail}",
        "choose a record.folder on a disk that can be written",
        "The run folder is made before anything else, so that a run that cannot be recorded never starts.",
    ),
    # --- P: predictions and plans ------------------------------------------------------------------------------------
    "P001": Wording(
        "a plan set must be a list of key=value, not {text!r}",
        "for example --set parallel.tensor=2,parallel.pipeline=4",
        "Each --set is one layout that the plan lays beside the others: the run file with these values replaced. "
        "Commas separate the values; commas inside brackets or quotes do not.",
    ),
    "P002": Wording(
        "no framework called {name!r} is known",
        "{suggestion}",
        "`steelyard plan --as FRAMEWORK` prints what that framework would report for this run, and engine.framework is "
        "the one a plan is made for: steelyard, or one whose memory, scripts or logs are read here.",
    ),
    "P003": Wording(
        "{share:.0%} of the peak of {chip} ({peak:g} TFLOP/s in {dtype}) is impossible",
        "check hardware.chip, the seconds per step and the number of devices",
        "Utilization is FLOP/s per device over the chip's dense peak. Above 100 % one of three numbers is wrong: the "
        "chip is another one, the time leaves something out, or the FLOPs count work that is not done.",
    ),
    "P004": Wording(
        "{one} and {other} exclude each other",
        "leave one of them out",
        "`plan` shows one thing at a time: layouts side by side (--set), another framework's count (--as), one rank's "
        "rehearsal (--rehearse), or the plan itself, of one rank (--rank) or with every term (--explain).",
    ),
    # --- F: other frameworks -----------------------------------------------------------------------------------------
    "F001": Wording(
        "cannot read the Hugging Face configuration: {detail}",
        "give a model's config.json, or a framework's arguments as JSON with names such as --num-layers",
        "`steelyard plan` takes a run file, or the config.json of a GPT-2 or Llama model.",
    ),
    "F002": Wording(
        "{key_name} = {value} of a Hugging Face {kind} model cannot be said in a run file",
        "{advice}",
        "A value that changes the network and that a run file has no word for is refused, because leaving it out would "
        "count another model.",
    ),
    "F003": Wording(
        "cannot read an argument list: {detail}",
        "give the arguments as a shell passes them, a JSON list of them, or a JSON object of flags",
        "Everything from the first `--flag` on is read; true in JSON stands for a switch that is on.",
    ),
    "F004": Wording(
        "{flag} needs a value of the kind {kind}, not {value!r}",
        "correct the value, or leave the flag out",
        "The kind of every flag's value stands in the framework's table of flags.",
    ),
    "F005": Wording(
        "{flag} cannot be said in a run file",
        "{advice}",
        "A flag that changes the network, its layout or its memory and that a run file has no word for is refused: "
        "leaving it out would plan another run.",
    ),
    "F006": Wording(
        "the size of the vocabulary is in the tokenizer's files, not in the arguments",
        "add model.vocab_size=N",
        "Only a tokenizer whose size is fixed, an explicit --vocab-size or --padded-vocab-size tells how many rows the "
        "embedding has.",
    ),
    "F007": Wording(
        "{flag} is missing",
        "add it: the framework has no default for it",
        "The shape of the network has no default in Megatron-LM.",
    ),
    "F011": Wording(
        "cannot read this as a launch script: {detail}",
        "give a shell script that starts a training, or its arguments as one list",
        "Launch scripts are read with a grammar of bash. Text that is not shell, or far larger than a script that a "
        "person wrote, is refused.",
    ),
    "F012": Wording(
        "the script cannot be followed to its end: {detail}",
        "give the arguments of the training itself, as one list",
        "A script is followed without being run: loops, functions and values are worked out within fixed bounds, so "
        "that no script can hang or fill the memory.",
    ),
    "F013": Wording(
        "the script ends here before it starts a training; {count} arguments were given",
        "write the script's own arguments behind --, for example `steelyard translate pretrain.sh -- 8 1 1 8 64 100`, "
        "or --env NAME=value for a variable that it takes from the environment",
        "Scripts check their arguments and leave when one is missing.",
    ),
    "F014": Wording(
        "{flag} is {value}, and {why}",
        "{advice}",
        "A launch script is followed without being run. A value that only a run would tell is an error where the "
        "training depends on it; where it does not, it is left as it stands.",
    ),
    "F015": Wording(
        "{path} starts no training that is known here{detail}",
        "give a script that runs Megatron-LM's, Megatron-DeepSpeed's or LiBai's training program, or its arguments",
        "The training is found by its program (pretrain*.py, train*.py, run_*.py) behind python, torchrun, deepspeed, "
        "srun and the like.",
    ),
    "F016": Wording(
        "the script starts {count} different trainings, in the lines {lines}",
        "choose one with --launch N, from 1 to {count}",
        "Each translation is of one training.",
    ),
    "F017": Wording(
        "{first} and {second} contradict each other: {detail}",
        "make them equal; {advice}",
        "A DeepSpeed job has two sources of truth, the flags of the program and DeepSpeed's JSON. Where both speak "
        "they must agree: which of the two wins differs from value to value.",
    ),
    "F018": Wording(
        "cannot read {path}: {detail}",
        "{advice}",
        "A configuration is read as data and never executed.",
    ),
    "F019": Wording(
        "{count} flags of the script change the training in a way that a run file cannot say: {flags}",
        "take them out of the script, or train from the run file that `steelyard translate` writes, which states them",
        "Training something else than the script does would not be a translation.",
    ),
    "F020": Wording(
        "{target} cannot say {name} = {value}",
        "{advice}",
        "A run is written for another framework only where that framework can do the same.",
    ),
    "F021": Wording(
        "there is nothing to translate to {target!r}",
        "targets are {known}",
        "`steelyard translate` writes run files, scripts of other frameworks, and launch scripts for steelyard itself.",
    ),
    # --- M: memory ---------------------------------------------------------------------------------------------------
    "M001": Wording(
        "there is no rank {rank} in a world of {world}",
        "ranks count from 0 to {last}",
        "`plan --rank N` shows the memory of one rank. The tensor axis is the fastest, then context and data, then the "
        "pipeline.",
    ),
    "M002": Wording(
        "no model of memory for the framework {framework!r}",
        "{suggestion}",
        "`engine.framework` names the system a plan is made for; its memory is modelled where its folder has a "
        "memory.py.",
    ),
    "M003": Wording(
        "only steelyard's own engine can be rehearsed, not {framework}",
        "leave --rehearse out, or plan the run for steelyard",
        "A rehearsal runs a real training step of our own engine on tensors without memory.",
    ),
    "M004": Wording(
        "the memory of {framework} with {name} = {value} is not modelled",
        "set {name} = {legal}, or plan the run for another framework",
        "A framework's model of memory covers what that framework does. A plan that left a setting out would be wrong "
        "without saying so.",
    ),
    # --- D: data -----------------------------------------------------------------------------------------------------
    "D001": Wording(
        "there is no data set here: cannot find {missing}",
        "{advice}",
        "A data set is named by its prefix and consists of PREFIX.bin (token ids) and PREFIX.idx (where each sequence "
        "lies), as `steelyard data prepare` and Megatron-LM write them.",
    ),
    "D002": Wording(
        "this is not a usable token index: {detail}",
        "check that the file was copied whole, or prepare it again",
        "PREFIX.idx starts with the magic MMIDIDX, a version and a dtype code; its size follows from the number of "
        "sequences and documents it states. Anything else is refused before it is read as tokens.",
    ),
    "D003": Wording(
        "index and tokens do not belong together: the .bin file has {found:,} bytes, its .idx describes {expected:,}",
        "copy both files again from one place, or prepare the data again",
        "The last sequence of the index must end where the token file ends.",
    ),
    "D004": Wording(
        "the data hold token id {id}; the model has a vocabulary of {vocab_size:,}",
        "set model.vocab_size to the size of the data's tokenizer, or prepare the data with this model's tokenizer",
        "An id at or above vocab_size has no row in the embedding table. It is never wrapped or clipped, because that "
        "trains on other tokens than the text holds.",
    ),
    "D005": Wording(
        "document {document} holds token id {id}, which {dtype} cannot hold",
        "leave the dtype out (it then follows from the vocabulary) or take int32",
        "Token files have one dtype. uint16 holds ids up to 65,535; a larger id would come back as another token.",
    ),
    "D006": Wording(
        'the {name} part of the split "{split}" is empty: {part:,} of {sequences:,} documents, without a token',
        "choose a data.split that gives it at least one document, name files of its own in data.validation, or set "
        "evaluation.steps = 0",
        "The split divides documents in proportion and rounds its boundaries, so that a small share of few documents "
        "comes to none. `steelyard data split PREFIX WEIGHTS` shows what a split comes to.",
    ),
    "D007": Wording(
        "cannot use the tokenizer {name!r}: {detail}",
        'give "byte", a tokenizer.json, a folder with vocab.json and merges.txt, or "ids:EOD" for lists of token ids',
        "A tokenizer is named as in a run file's data.tokenizer.",
    ),
    "D008": Wording(
        "mask_loss_at_eod, reset_positions and reset_attention need the id that ends a document, and neither the "
        "tokenizer {name!r} nor a manifest beside the data tells it",
        'set data.tokenizer to the tokenizer of the data, or to "ids:EOD" (for example "ids:50256")',
        "The id comes from the tokenizer of data.tokenizer, else from the PREFIX.json that `steelyard data prepare` "
        "writes. It is not needed without these options.",
    ),
    "D009": Wording(
        "appending the end of document needs a token for it, and the tokenizer {name!r} has none",
        "add a special token such as <|endoftext|> to the tokenizer, or use --no-append-eod",
        "Between documents stands the id that ends one. It is known before any text is read.",
    ),
    "D010": Wording(
        "this input cannot be used: {reason}",
        "mend the line, or leave bad ones out (and counted) with --on-bad skip",
        "Inputs are checked when they are prepared, so that training never meets a bad one.",
    ),
    "D011": Wording(
        "the weights of a mixture must all be given and above 0: {weights}",
        "write data as [weight, prefix] pairs with positive weights, leave a data set with weight 0 out, and use at "
        "most {most:,} data sets",
        "Either every data set has a weight, or none has; then each is used once.",
    ),
    "D012": Wording(
        "{asked:,} samples are asked for, the data hold {held:,}",
        'shorten the run, or give the data sets weights ([1.0, "prefix"]): they are then repeated as often as needed',
        "Several data sets without weights are used for one epoch, as in Megatron.",
    ),
    "D013": Wording(
        "there is nothing to prepare here",
        "give JSON-lines files (.jsonl, .json, also .gz or .zst), text files, folders that hold some, or - for "
        "standard input",
        "Every input named must exist, and a folder or pattern must match at least one file.",
    ),
    "D014": Wording(
        "{samples:,} samples from {tokens:,} tokens are {epochs:,} epochs; their order takes {need:,.1f} GiB, this "
        "machine has {memory:,.1f}",
        "shorten the run or use more data; check length and model.seq_length for a mistyped number",
        "The order of all documents of all epochs is shuffled in memory, once. Numbers that do not fit in 32 bits are "
        "kept in 64; nothing wraps.",
    ),
    "D015": Wording(
        "the order of the samples is not built yet",
        "the first rank builds it before the others read it; is data.cache on a file system that all ranks see?",
        "The indices are built once and read by every rank from data.cache.",
    ),
    "D016": Wording(
        "cannot write here: {detail}",
        "choose a folder that can be written and has room",
        "Indices and token files are written to a temporary name first and renamed when they are whole.",
    ),
    "D017": Wording(
        "the run names no training data",
        'set data.train = ["prefix"], made with `steelyard data prepare`',
        "Every run trains on at least one data set.",
    ),
    "D018": Wording(
        "document {document} has {tokens:,} tokens; a sequence of a token file holds at most 2,147,483,647",
        "divide the document",
        "Lengths are 32-bit numbers in the file format.",
    ),
    "D019": Wording(
        "cannot use the manifest: {detail}",
        "prepare the data with `steelyard data prepare`, which writes it; a run works without one",
        "PREFIX.json says from which inputs, with which tokenizer and with which losses a token file was made.",
    ),
    "D020": Wording(
        "{rule}",
        "{advice}",
        "The parts of a data set that was prepared in shards must be complete, disjoint and made in one way.",
    ),
    "D021": Wording(
        "another process is preparing this output",
        "wait for it, or choose another --output",
        "Two writers of one file would destroy each other's work.",
    ),
    "D022": Wording(
        "a vocabulary of {vocab_size:,} ids does not fit the dtype {dtype}",
        "leave --dtype out (it follows from the vocabulary), or take int32",
        "uint16 holds ids up to 65,535. A larger id would wrap to another token.",
    ),
    "D023": Wording(
        "cannot read this input: {detail}",
        "check the file; one that was cut while it was copied or compressed has to be made again",
        "A file that ends in the middle of its compressed stream would silently lose documents.",
    ),
    "D024": Wording(
        "a worker process was ended from outside, most likely for memory",
        "run the same command again to go on from where it was, with fewer --workers",
        "Tokenizing runs in several processes. What was written so far is kept.",
    ),
    # --- C: checkpoints ----------------------------------------------------------------------------------------------
    "C001": Wording(
        "{path} is not a complete checkpoint: {detail}",
        "give another checkpoint, or a run folder to take its newest complete one",
        "A checkpoint is complete when its complete.json, written last, lists files that are all there, at full size "
        "and with the content that was saved. What a killed save left behind is never loaded.",
    ),
    "C002": Wording(
        "there is no complete checkpoint in {path}",
        "train first, or give the folder of a run that has saved one",
        "checkpoint.load takes a run folder, its checkpoints folder, or one checkpoint.",
    ),
    "C003": Wording(
        "the checkpoint {path} is of another model: {detail}",
        "make [model] equal to the checkpoint's run.toml, or start anew with another record.folder",
        "A checkpoint continues only the model it was saved from.",
    ),
    "C004": Wording(
        "cannot write the checkpoint {path}: {detail}",
        "free {bytes:,} bytes there or choose another record.folder; earlier checkpoints are untouched",
        "A checkpoint is written beside the others and renamed when it is whole, so a failed save loses nothing that "
        "was complete.",
    ),
    "D025": Wording(
        "this data set is already there",
        "choose another --output, or replace it with --overwrite",
        "Preparing data can take days; nothing that is finished is replaced without being asked.",
    ),
    "D026": Wording(
        "there is no {what}; there are {count:,} {unit}",
        "numbers count from 0",
        "Documents, samples and splits are named as `steelyard data inspect` lists them.",
    ),
    "C005": Wording(
        "the checkpoint has a tensor that is not understood: {name}",
        "only dense GPT models with Megatron core's names are read; remove what does not belong to the model",
        "Every tensor of a foreign checkpoint must be placed; none is dropped silently.",
    ),
    "C006": Wording(
        "cannot convert a checkpoint {way} {framework}",
        "--from may be megatron or huggingface; --to may be huggingface; one of the two is given",
        "`steelyard checkpoint convert` reads Megatron-LM's and Hugging Face's weights and writes Hugging Face's.",
    ),
    "C007": Wording(
        "{name} is another than in the checkpoint {path}: {there} there, {here} here",
        "set it back, or say that it is meant: 'checkpoint.accept={accept}'",
        "A run goes on with the same network and the same tokens in the same order. Rates, length and layout may "
        "change freely; what changes the network's function or the data order needs its key in checkpoint.accept.",
    ),
    "C008": Wording(
        "Hugging Face's {kind} cannot say {name} = {value}",
        "{legal}",
        "A converted model must compute the same logits, so what the other side has no word for is refused. GPT-2 has "
        "learned positions, LayerNorm, biases and one key per head; Llama has rotary positions, RMSNorm and a gate.",
    ),
    "C009": Wording(
        "{name} differs between {first} and {second}, although both hold copies of one tensor",
        "the ranks of that training diverged: take an earlier checkpoint; copies are never averaged",
        "What is replicated over tensor-parallel ranks is bit-equal in a healthy run. A difference means that they "
        "trained different models, and no merge of them is the model that was trained.",
    ),
    "C010": Wording(
        "the converted model computes other logits: {difference:.3g} apart, {limit:.3g} allowed",
        "do not use what was written for {path}; please report the run file",
        "Every conversion is checked on the spot: random tokens go through both models, whose logits must agree.",
    ),
    "C011": Wording(
        "cannot read the checkpoint {path}: {detail}",
        "{advice}",
        "Foreign checkpoints are read with torch.load(weights_only=True), which builds tensors, numbers and plain "
        "containers and never runs code from the file.",
    ),
    "C012": Wording(
        "a Megatron-LM checkpoint does not say which run it is for",
        "give the run file of the model with --run RUN.toml; `steelyard translate` makes one of a launch script",
        "Tensors alone do not tell heads, activation, norm or vocabulary; the run file does.",
    ),
    "C013": Wording(
        "{path} holds a run's checkpoints already: {newest}",
        "give a folder of its own, and name it as the new run's checkpoint.load",
        "Converted weights are step 0 of a run. Among the checkpoints of another one they would be its newest, and the "
        "run would begin anew from them.",
    ),
    "G001": Wording(
        "the prompt is empty, or the tokenizer {tokenizer} has ids that the model's vocabulary of {vocab} does not",
        "give --prompt some text, and the checkpoint the tokenizer it was trained with",
        "`steelyard generate` reads the tokenizer that the checkpoint's run.toml names.",
    ),
    # --- T: training, L: launching -----------------------------------------------------------------------------------
    "T001": Wording(
        "the model on this rank is not the one that was planned: {difference}",
        "this is a mistake in steelyard itself; please report it with the run file",
        "Before the first step every rank compares the names and shapes of its parameters with the closed form.",
    ),
    "T002": Wording(
        "nothing to train on: data.train is empty",
        'set data.train = ["prefix"] to what `steelyard data prepare` wrote',
        "data.train lists prefixes of .bin/.idx pairs, or [weight, prefix] pairs.",
    ),
    "T003": Wording(
        "{name} is {value}, which `train` cannot run yet",
        "{advice}",
        "A run file can describe more than can be trained here, so that foreign runs can be planned and compared.",
    ),
    "L001": Wording(
        "{world} ranks on this machine, which has {devices} {kind}",
        "use --world {devices} or fewer, or start the run on several machines with torchrun",
        "Every rank needs a device of its own; on CPUs more than 8 ranks a core only wait for each other.",
    ),
    "L002": Wording(
        "the launcher started {world} ranks and --world says {asked}",
        "leave --world out under torchrun or srun",
        "Under a launcher the number of ranks is the launcher's.",
    ),
    "L003": Wording(
        "the ranks cannot meet at {endpoint}: {detail}",
        "another job may use that port: give torchrun another --master-port or --rdzv-endpoint",
        "Ranks find each other through a store on one port. `steelyard train` alone picks a free one.",
    ),
    "L004": Wording(
        "rank {rank} failed first, in {phase} of step {step}: {detail}",
        "{advice}",
        "The first rank that fails ends the whole run; the errors of the others, which then wait in vain, are noise.",
    ),
    "L005": Wording(
        "rank {rank} was killed ({signal}); the run has ended",
        "the newest complete checkpoint is intact; the same command resumes from it",
        "A killed rank cannot say why. The kernel log tells of memory running out (`dmesg`).",
    ),
    "D027": Wording(
        "the tokenizer {name!r} ends documents with the id {known}, the data were made with {made}",
        "set data.tokenizer to the tokenizer that the data were prepared with (their PREFIX.json names it)",
        "Masks and positions are cut at the id that ends a document; at a wrong one they would be cut in the middle of "
        "text, or nowhere.",
    ),
    # --- H: hardware -------------------------------------------------------------------------------------------------
    "H001": Wording(
        "unknown chip {chip!r}",
        "{suggestion}",
        "Peaks are dense figures from data sheets, listed with their source in hardware/chips.toml. A chip that is not "
        "there has no peak: nothing is assumed.",
    ),
    # --- B: benches --------------------------------------------------------------------------------------------------
    "B001": Wording(
        "cannot start an arm as {text!r}: {detail}",
        'write --arm NAME="program argument ...", such as --arm megatron="bash pretrain.sh 8 1 1 2 16"',
        "A command is split as a shell would split it and started without one: pipes, redirections and variables need "
        "a script of their own.",
    ),
    "B002": Wording(
        "cannot read this as a table of cases: {detail}",
        "first line: names out of nodes gpus tensor pipeline fp16 checkpointing micro global; then one line a case",
        "Each line becomes an arm: the run file under the values of its cells, on nodes x gpus ranks.",
    ),
    "B003": Wording(
        "the run has {steps} steps and a bench needs {needed}, {warmup} of them to warm up",
        "make [length] longer, or lower bench.warmup and bench.steps",
        "The timed window lies behind the warm-up and inside the run.",
    ),
    "B004": Wording(
        "two arms are called {name}",
        "give each arm a name of its own",
        "Results are kept under the name of their arm.",
    ),
    # --- K: comparing ------------------------------------------------------------------------------------------------
    "K001": Wording(
        "cannot read {path}: {detail}",
        "give a run folder, a run file, a one-line record or a log",
        "`steelyard compare` takes what a run left behind. A folder must hold one log that can be told apart.",
    ),
    "K002": Wording(
        "nothing in {path} looks like the log of a framework that is known here",
        "known are {known}; or write what you know as one JSON line: "
        '{{"framework": "...", "config": {{...}}, "memory": {{"device_bytes": ...}}, '
        '"speed": {{"samples_per_second": ...}}}}',
        "A log is recognised by its training lines, its configuration block or its memory lines, not by its name.",
    ),
    "K003": Wording(
        "{path} looks like a log of {framework}, but no step, configuration or memory figure in it is whole",
        "give the whole log: its beginning has the configuration, its end the steps",
        "A line that is cut in the middle gives no value, so that no value is wrong.",
    ),
    "K004": Wording(
        "{count} runs are given; a comparison needs two or more",
        "steelyard compare A B",
        "The first run is the one that the others are compared with.",
    ),
}
