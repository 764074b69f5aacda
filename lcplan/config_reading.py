"""Reads the YAML that people already have: accelerate, TRL, axolotl, LLaMA-Factory; says what it took and what not.

A file is known by its keys. Several files are merged: an accelerate file sets the launcher, a trainer's file the rest.
Keys that lcplan has no word for are listed, never guessed at; values that change memory and that no plan can express
are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from lcplan._record import Record
from lcplan.errors import InputError, PlanError
from lcplan.job_options import DataSource, Device, Init, TokenizerSource, TrainingOptions
from lcplan.ledger import PlanWarning
from lcplan.presets import UniqueKeyLoader

Format = Literal["accelerate", "TRL", "axolotl", "LLaMA-Factory"]
Values = Mapping[str, Any]


class ForeignJob(Record):
    """A job as other tools' files describe it; it stands where a preset does."""

    name: str
    formats: tuple[Format, ...]
    model: str | None
    plan: dict[str, Any]
    taken: tuple[str, ...]
    """``field = value (file's key)`` for each plan field."""
    ignored: tuple[str, ...]
    """Keys that say nothing about a plan, or that lcplan has no word for."""
    warnings: tuple[PlanWarning, ...] = ()
    rope: dict[str, Any] | None = None
    """``rope_parameters`` that the file passes to the model."""
    pad_to_multiple_of: int | None = None
    training: TrainingOptions = TrainingOptions()
    config: dict[str, Any] | None = None
    init: Init = "pretrained"
    device: Device = "gpu"
    data: DataSource | None = None
    tokenizer: TokenizerSource | None = None


TRAINING = frozenset(TrainingOptions.model_fields)


class _Reader:
    """One file's mapping on its way into a plan."""

    def __init__(self, values: Values, where: str) -> None:
        self.values, self.where = values, where
        self.plan: dict[str, Any] = {}
        self.taken: list[str] = []
        self.training: dict[str, Any] = {}
        self.model: str | None = None
        self.warnings: list[PlanWarning] = []
        self.rope: dict[str, Any] | None = None
        self.pad: int | None = None
        self._seen: set[str] = set()

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of that type; absent and null are the same.

        Raises:
            InputError: for a value of another type.
        """
        self._seen.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        if (isinstance(value, bool) and kind is int) or not isinstance(value, kind):
            raise InputError("bad-config", f"{self.where}: {key} is {value!r:.80}, which lcplan cannot read.")
        return value

    def take(self, field: str, value: Any, key: str) -> None:
        """Set a plan field from a key; None sets nothing."""
        if value is not None:
            self.plan[field] = value
            self.taken.append(f"{field} = {value} ({key})")

    def copy(self, key: str, kind: type, field: str | None = None) -> None:
        """A key whose value is the plan's own."""
        self.take(field or key, self.get(key, kind), key)

    def warn(self, code: str, message: str, fix: str) -> None:
        """Something the file does that its owner should know."""
        self.warnings.append(PlanWarning(code=code, message=message, fix=fix))

    def refuse(self, code: str, message: str) -> None:
        """Stop at what no plan can express.

        Raises:
            PlanError: always.
        """
        raise PlanError(code, f"{self.where}: {message}")

    def use(self, *keys: str) -> None:
        """Mark keys as read."""
        self._seen.update(keys)

    @property
    def ignored(self) -> list[str]:
        """Keys nothing was taken from."""
        return [key for key, value in self.values.items() if key not in self._seen and value is not None]


def read_configs(paths: Sequence[Path]) -> ForeignJob:
    """One job out of one or more files.

    Raises:
        InputError: a file that cannot be read, is of no known kind, or says otherwise than another.
        PlanError: a setting that changes memory and that no plan can express.
    """
    readers: list[tuple[Format, _Reader]] = []
    for path in paths:
        values = read_yaml(path)
        kind = detect(values)
        if kind is None:
            raise InputError(
                "unknown-config",
                f"--config {path} is no preset, and no file of accelerate, TRL, axolotl or LLaMA-Factory: none of "
                "their keys is there. Give a preset's YAML, or one with max_length, sequence_len, cutoff_len or "
                "distributed_type.",
            )
        reader = _Reader(values, str(path))
        READERS[kind](reader)
        readers.append((kind, reader))
    return _merge(readers, paths)


def read_values(kind: Format, values: Values, *, where: str) -> ForeignJob:
    """The same of one tool's settings that are no file.

    Raises:
        InputError: a value of another type than the tool's.
        PlanError: a setting that changes memory and that no plan can express.
    """
    reader = _Reader(values, where)
    READERS[kind](reader)
    return _merge([(kind, reader)], [Path(where)])


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping of a YAML file; a repeated key is an error.

    Raises:
        InputError: naming what is wrong.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("unreadable-config", f"--config {path} cannot be read: {error}.") from None
    try:
        content = yaml.load(text, Loader=UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError("bad-config", f"--config {path} is not valid YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError("bad-config", f"--config {path} is not a mapping of settings.")
    return content


def detect(values: Values) -> Format | None:
    """Which tool a file belongs to; None for none of them."""
    keys = set(values)
    launcher = keys & {"distributed_type", "compute_environment", "fsdp_config"}
    if launcher and not keys & {"base_model", "max_length", "per_device_train_batch_size"}:
        return "accelerate"
    if "base_model" in keys or "sequence_len" in keys:
        return "axolotl"
    if keys & {"cutoff_len", "finetuning_type", "stage"}:
        return "LLaMA-Factory"
    if keys & {"max_length", "per_device_train_batch_size", "model_name_or_path", "loss_type"}:
        return "TRL"
    return None


def _merge(readers: Sequence[tuple[Format, _Reader]], paths: Sequence[Path]) -> ForeignJob:
    plan: dict[str, Any] = {}
    for _, reader in readers:
        for name, value in reader.plan.items():
            if plan.get(name, value) != value:
                raise InputError(
                    "configs-disagree",
                    f"{reader.where} says {name} = {value}, and another file {plan[name]}. Make them agree.",
                )
            plan[name] = value
    _check_one_checkpointing(readers)
    models = [reader.model for _, reader in readers if reader.model]
    training: dict[str, Any] = {}
    for _, reader in readers:
        training |= reader.training
    return ForeignJob(
        name=" + ".join(path.name for path in paths),
        formats=tuple(kind for kind, _ in readers),
        model=models[0] if models else None,
        plan=plan,
        taken=tuple(text for _, reader in readers for text in reader.taken),
        ignored=tuple(key for _, reader in readers for key in reader.ignored),
        warnings=tuple(warning for _, reader in readers for warning in reader.warnings),
        rope=next((reader.rope for _, reader in readers if reader.rope), None),
        pad_to_multiple_of=next((reader.pad for _, reader in readers if reader.pad), None),
        training=TrainingOptions.model_validate(training),
    )


def _check_one_checkpointing(readers: Sequence[tuple[Format, _Reader]]) -> None:
    """FSDP's own checkpointing and the trainer's at once recompute twice, and transformers refuses them."""
    by_fsdp = any(_fsdp(reader.values).get("fsdp_activation_checkpointing") for _, reader in readers)
    by_trainer = any(
        kind != "accelerate" and reader.plan.get("activation_checkpointing", "full") != "none"
        for kind, reader in readers
    )
    if by_fsdp and by_trainer:
        raise PlanError(
            "two-checkpointings",
            "fsdp_activation_checkpointing is true and the trainer checkpoints as well (TRL does unless told not to): "
            "transformers refuses both at once. Set fsdp_activation_checkpointing: false.",
        )


def _fsdp(values: Values) -> Values:
    found = values.get("fsdp_config")
    return found if isinstance(found, dict) else {}


# One reader a tool


def _read_accelerate(reader: _Reader) -> None:
    kind = str(reader.get("distributed_type", str, "NO")).upper()
    backends = {"NO": "single", "FSDP": "fsdp2", "DEEPSPEED": "deepspeed"}
    num_gpus = reader.get("num_processes", int, 1)
    if kind not in backends:
        reader.refuse(
            "ddp" if kind == "MULTI_GPU" else "distributed-type",
            f"distributed_type {kind} keeps a whole copy of the states on every GPU or runs elsewhere, which no plan "
            "expresses. Use FSDP with fsdp_version 2.",
        )
    if kind == "NO" and num_gpus > 1:
        reader.refuse(
            "ddp", f"num_processes {num_gpus} with distributed_type NO starts one process. Use FSDP, or one process."
        )
    reader.take("backend", backends[kind], "distributed_type")
    reader.take("num_gpus", num_gpus, "num_processes")
    machines = reader.get("num_machines", int, 1)
    if machines > 0 and num_gpus % machines == 0 and kind != "NO":
        reader.take("gpus_per_node", num_gpus // machines, "num_machines")
    precision = str(reader.get("mixed_precision", (str, bool), "no")).lower()
    if precision in ("fp16", "fp8"):
        reader.refuse("precision", f"mixed_precision {precision}: lcplan counts bf16 and float32. Use bf16.")
    if kind == "FSDP":
        _read_fsdp(reader)
    if kind == "DEEPSPEED":
        _read_zero(reader)
    _read_parallelism(reader)
    reader.use("compute_environment", "machine_rank", "use_cpu", "main_training_function", "downcast_bf16", "debug")
    if reader.values.get("use_cpu"):
        reader.refuse("cpu-plan", "use_cpu is true, and lcplan plans GPUs. Set use_cpu: false.")


def _read_fsdp(reader: _Reader) -> None:
    settings = _Reader(_fsdp(reader.values), f"{reader.where}: fsdp_config")
    reader.use("fsdp_config")
    version = settings.get("fsdp_version", (int, str), 1)
    if str(version) != "2":
        settings.refuse("fsdp1", f"fsdp_version {version} is another sharding than lcplan counts. Set fsdp_version: 2.")
    if settings.get("fsdp_offload_params", bool, False):
        reader.take("offload_params", True, "fsdp_offload_params")
    if settings.get("fsdp_activation_checkpointing", bool, False):
        reader.take("activation_checkpointing", "full", "fsdp_activation_checkpointing")
    if settings.get("fsdp_cpu_ram_efficient_loading", bool, True) is False:
        reader.warn(
            "every-rank-loads",
            "fsdp_cpu_ram_efficient_loading is false: every rank reads the whole model into host memory at once.",
            "Set it to true: the main process alone reads it.",
        )
    if str(settings.get("fsdp_state_dict_type", str, "SHARDED_STATE_DICT")) == "FULL_STATE_DICT":
        reader.warn(
            "full-state-dict",
            "fsdp_state_dict_type FULL_STATE_DICT gathers weights and optimizer on one rank at every checkpoint, which "
            "can run out of memory where training does not.",
            "Set SHARDED_STATE_DICT.",
        )
    if settings.get("fsdp_reshard_after_forward", (bool, str), True) in (False, "false", "SHARD_GRAD_OP"):
        settings.refuse("no-reshard", "fsdp_reshard_after_forward false keeps every layer gathered. Set it to true.")


def _read_zero(reader: _Reader) -> None:
    settings = _Reader(reader.get("deepspeed_config", dict, {}), f"{reader.where}: deepspeed_config")
    reader.take("zero_stage", settings.get("zero_stage", int), "zero_stage")
    for name, key in (("offload_optimizer", "offload_optimizer_device"), ("offload_params", "offload_param_device")):
        where = str(settings.get(key, str, "none")).lower()
        if where == "nvme":
            settings.refuse("zero-nvme", f"{key} nvme: lcplan counts host memory, not disks. Set it to cpu or none.")
        if where == "cpu":
            reader.take(name, True, key)


def _read_parallelism(reader: _Reader) -> None:
    settings = reader.get("parallelism_config", dict, {})
    inner = _Reader(settings, f"{reader.where}: parallelism_config")
    prefix = "parallelism_config_"
    for name in ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size"):
        reader.take(name, inner.get(prefix + name, int), prefix + name)
    reader.take("cp_comm_strategy", inner.get(prefix + "cp_comm_strategy", str), prefix + "cp_comm_strategy")
    if inner.get(prefix + "tp_size", int, 1) > 1:
        inner.refuse("tp", "tp_size above 1: lcplan has no tensor parallelism. Use cp_size or dp_shard_size.")


def _read_trl(reader: _Reader) -> None:
    reader.model = reader.get("model_name_or_path", str)
    for name, kind in (
        ("max_length", int), ("per_device_train_batch_size", int), ("gradient_accumulation_steps", int), ("optim", str),
    ):  # fmt: skip
        reader.copy(name, kind)
    _read_trl_checkpointing(reader)
    _read_trl_loss(reader)
    if reader.get("activation_offloading", bool, False):
        reader.take("activation_offloading", True, "activation_offloading")
    for name in ("packing", "padding_free"):
        if reader.get(name, bool, False):
            reader.take("packing", True, name)
    if reader.get("fp16", bool, False):
        reader.refuse("precision", "fp16 true: lcplan counts bf16 and float32. Use bf16.")
    reader.use("bf16")
    _read_trl_model(reader)
    pad = reader.get("pad_to_multiple_of", (int, str))
    reader.pad = pad if isinstance(pad, int) else None
    if reader.get("deepspeed", (str, dict)) is not None:
        reader.take("backend", "deepspeed", "deepspeed")
    for name in TRAINING:
        value = reader.get(name, (int, float, str, bool))
        if value is not None:
            reader.training[name] = None if name == "max_steps" and value == -1 else value
    if "save_strategy" not in reader.values:
        reader.training.setdefault("save_strategy", "steps")


def _read_trl_checkpointing(reader: _Reader) -> None:
    prefix = "activation" if "activation_checkpointing" in reader.values else "gradient"
    key = f"{prefix}_checkpointing"
    asked = reader.get(key, bool)
    options = _Reader(reader.get(f"{key}_kwargs", dict, {}), f"{reader.where}: {key}_kwargs")
    if asked is False:
        reader.take("activation_checkpointing", "none", key)
        return
    selective = options.get("selective", bool, False)
    if asked or selective:
        reader.take("activation_checkpointing", "selective" if selective else "full", key)
    offload = options.get("offload", bool, False)
    if offload and selective:
        reader.refuse(
            "selective-offload",
            f"{key}_kwargs with selective and offload: trl keeps the attention outputs of all layers on the GPU then, "
            "which lcplan does not count. Leave one out; the job of lcplan run sends both to the host.",
        )
    if offload:
        reader.take("offload_activations", True, f"{key}_kwargs.offload")
    reader.take("checkpoint_every_n_layers", options.get("every_n_layers", int), f"{key}_kwargs.every_n_layers")


def _read_trl_loss(reader: _Reader) -> None:
    loss = reader.get("loss_type", str)
    if reader.get("use_liger_kernel", bool, False):
        what = f"with loss_type {loss}, which trl refuses" if loss == "chunked_nll" else "switches the chunked loss off"
        reader.refuse(
            "liger-loss",
            f"use_liger_kernel true {what}. Leave it out: trl's chunked loss holds no full logits either, and Liger's "
            "other kernels are --kernels liger.",
        )
    if loss in ("nll", "chunked_nll"):
        reader.take("loss", "chunked", "loss_type (nll is the chunked loss from trl 1.15 on)")
    elif loss is not None:
        reader.refuse("loss-type", f"loss_type {loss} is not counted. Use nll.")


def _read_trl_model(reader: _Reader) -> None:
    """The model's own arguments: at the top (ModelConfig) or under ``model_init_kwargs``."""
    inner = _Reader(reader.get("model_init_kwargs", dict, {}), f"{reader.where}: model_init_kwargs")
    where = "model_init_kwargs" if inner.values else "the file"
    dtype = inner.get("dtype", str) or inner.get("torch_dtype", str) or reader.get("dtype", str)
    dtype = dtype or reader.get("torch_dtype", str)
    if dtype is None:
        reader.take("dtype", "float32", "trl's default where no dtype is named")
    elif dtype not in ("bfloat16", "float32"):
        reader.refuse("precision", f"dtype {dtype}: lcplan counts bfloat16 and float32.")
    else:
        reader.take("dtype", dtype, "dtype")
    attention = inner.get("attn_implementation", str) or reader.get("attn_implementation", str)
    reader.take("attn_implementation", attention, "attn_implementation")
    rope = inner.get("rope_parameters", dict) or inner.get("rope_scaling", dict)
    if rope:
        reader.rope = rope
        reader.take("rope", rope_text(rope, reader), f"{where}.rope_parameters")
    if reader.get("use_peft", bool, False):
        reader.take("lora_r", reader.get("lora_r", int, 16), "lora_r")
        _take_targets(reader, "lora_target_modules")
    if reader.get("load_in_4bit", bool, False):
        reader.take("quantize", "nf4", "load_in_4bit")
    if reader.get("load_in_8bit", bool, False):
        reader.refuse("int8", "load_in_8bit true is not counted. Use load_in_4bit, or neither.")


ROPE_KEYS = ("rope_type", "factor", "rope_theta", "original_max_position_embeddings")


def rope_text(rope: Values, reader: _Reader) -> str:
    """``--rope``'s form of rope_parameters.

    Raises:
        PlanError: for another scaling than YaRN, and where one of the four keys is missing.
    """
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "default":
        return "none"
    if kind != "yarn":
        reader.refuse("rope-type", f"rope_type {kind!r}: lcplan plans YaRN. Use rope_type: yarn, or leave it out.")
    missing = [key for key in ROPE_KEYS if rope.get(key) is None and not (key == "rope_type" and "type" in rope)]
    if missing:
        reader.refuse(
            "rope-keys",
            f"rope_parameters lacks {', '.join(missing)}: the dict replaces the model's whole one, so transformers "
            "then takes a default or fails. Give all four of " + ", ".join(ROPE_KEYS) + ".",
        )
    return f"yarn:{float(rope['factor']):g}:{int(rope['original_max_position_embeddings'])}"


def _take_targets(reader: _Reader, key: str) -> None:
    targets = reader.get(key, (str, list))
    if isinstance(targets, list):
        targets = ",".join(map(str, targets))
    reader.take("lora_target_modules", "all-linear" if targets in ("all", "all-linear") else targets, key)


def _read_axolotl(reader: _Reader) -> None:
    reader.model = reader.get("base_model", str)
    reader.copy("sequence_len", int, "max_length")
    reader.copy("micro_batch_size", int, "per_device_train_batch_size")
    reader.copy("gradient_accumulation_steps", int)
    reader.take("optim", reader.get("optimizer", str), "optimizer")
    checkpointing = reader.get("gradient_checkpointing", (bool, str), False)
    if checkpointing in ("offload", "offload_disk"):
        reader.refuse("offload-kind", f"gradient_checkpointing {checkpointing} is axolotl's own offload, not counted.")
    reader.take("activation_checkpointing", "full" if checkpointing else "none", "gradient_checkpointing")
    if reader.get("activation_offloading", (bool, str), False):
        reader.take("activation_offloading", True, "activation_offloading")
    if reader.get("sample_packing", bool, False):
        reader.take("packing", True, "sample_packing")
    _read_adapter(reader, reader.get("adapter", str), rank="lora_r", targets="lora_target_modules")
    if reader.get("lora_target_linear", bool, False):
        reader.take("lora_target_modules", "all-linear", "lora_target_linear")
    if reader.get("flash_attention", bool, False):
        reader.take("attn_implementation", "flash_attention_2", "flash_attention")
    for name in ("dp_shard_size", "dp_replicate_size"):
        reader.copy(name, int)
    if (size := reader.get("context_parallel_size", int, 1)) > 1:
        reader.refuse(
            "axolotl-cp",
            f"context_parallel_size {size} is ring flash attention there, another code than the one lcplan counts. "
            "Leave it out and give --cp-size to plan the same split with TRL.",
        )
    if str(reader.get("fsdp_version", (int, str), "2")) != "2":
        reader.refuse("fsdp1", "fsdp_version 1 is another sharding than lcplan counts. Set fsdp_version: 2.")
    if _fsdp(reader.values).get("offload_params"):
        reader.take("offload_params", True, "fsdp_config.offload_params")
    reader.use("fsdp_config")
    if reader.get("deepspeed", (str, dict)) is not None:
        reader.take("backend", "deepspeed", "deepspeed")
    reader.take("dtype", "bfloat16" if reader.get("bf16", (bool, str), False) else None, "bf16")
    if reader.get("plugins", list):
        reader.refuse("plugins", "plugins replace kernels and losses, which is not counted. Leave them out.")
    reader.take("loss", "full", "axolotl computes full logits unless a plugin replaces the loss")


def _read_adapter(reader: _Reader, adapter: str | None, *, rank: str, targets: str) -> None:
    if adapter in ("lora", "qlora"):
        reader.take("lora_r", reader.get(rank, int, 8), rank)
        _take_targets(reader, targets)
    elif adapter not in (None, "full"):
        reader.refuse("adapter", f"{adapter!r} is no adapter that lcplan counts. Use lora, or none.")
    if adapter == "qlora" or reader.get("load_in_4bit", bool, False) or reader.get("quantization_bit", int) == 4:
        reader.take("quantize", "nf4", "qlora" if adapter == "qlora" else "load_in_4bit or quantization_bit")


def _read_llama_factory(reader: _Reader) -> None:
    if reader.get("stage", str, "sft") != "sft":
        reader.refuse("stage", f"stage {reader.values['stage']}: lcplan plans supervised fine-tuning. Use stage: sft.")
    reader.model = reader.get("model_name_or_path", str)
    reader.copy("cutoff_len", int, "max_length")
    for name, kind in (("per_device_train_batch_size", int), ("gradient_accumulation_steps", int), ("optim", str)):
        reader.copy(name, kind)
    disabled = reader.get("disable_gradient_checkpointing", bool, False)
    reader.take("activation_checkpointing", "none" if disabled else "full", "disable_gradient_checkpointing")
    _read_adapter(reader, reader.get("finetuning_type", str, "lora"), rank="lora_rank", targets="lora_target")
    attention = reader.get("flash_attn", str, "auto")
    names = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "auto": "sdpa"}
    if attention not in names:
        reader.refuse("attention", f"flash_attn {attention} is not known. Use fa2, sdpa or disabled.")
    reader.take("attn_implementation", names[attention], "flash_attn")
    if reader.get("packing", bool, False) or reader.get("neat_packing", bool, False):
        reader.take("packing", True, "packing")
    if reader.get("use_unsloth", bool, False) or reader.get("enable_liger_kernel", bool, False):
        reader.refuse("liger-loss", "other kernels (use_unsloth, enable_liger_kernel) are not counted. Leave them out.")
    if reader.get("deepspeed", (str, dict)) is not None:
        reader.take("backend", "deepspeed", "deepspeed")
    reader.take("loss", "full", "LLaMA-Factory computes full logits")
    reader.use("bf16")


READERS: dict[Format, Callable[[_Reader], None]] = {
    "accelerate": _read_accelerate,
    "TRL": _read_trl,
    "axolotl": _read_axolotl,
    "LLaMA-Factory": _read_llama_factory,
}


def check_padding(job: ForeignJob, length_multiple: int) -> None:
    """Refuse padding that leaves rows ring attention cannot cut.

    Raises:
        PlanError: naming the multiple it has to be.
    """
    pad = job.pad_to_multiple_of
    if length_multiple > 1 and pad is not None and pad % length_multiple:
        raise PlanError(
            "pad-multiple",
            f"pad_to_multiple_of {pad} is no multiple of {length_multiple}, into which the sequence is cut. Use "
            f"{length_multiple}, or better rows that need no padding: one padded token makes a mask of max_length^2.",
        )
