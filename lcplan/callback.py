"""A callback for TRL's SFTTrainer: the prediction before training, the measured peak beside it afterwards.

    trainer = SFTTrainer(..., callbacks=[MemoryCallback()])

The plan is taken from the live run: the model, its SFTConfig and accelerate's state. Where one of them holds what
lcplan does not know, there is no prediction and the reason is printed; training goes on. Needs the train extra.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainerCallback

from lcplan.config_reading import read_values
from lcplan.errors import LcplanError, PlanError
from lcplan.estimation import estimate, installed_stack
from lcplan.hardware import GpuSpec, load_gpu
from lcplan.ledger import MemoryReport
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan, resolve
from lcplan.units import ByteUnits, format_bytes

READ = (
    "max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "loss_type", "packing",
    "padding_free", "fp16", "use_liger_kernel", "activation_offloading", "pad_to_multiple_of",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
)  # fmt: skip
"""Fields of SFTConfig that become fields of the plan."""
CHANGE_MEMORY = (
    "torch_compile", "neftune_noise_alpha", "label_smoothing_factor", "optim_target_modules", "optim_args",
    "auto_find_batch_size", "router_aux_loss_coef", "use_cache", "full_determinism", "liger_kernel_config",
    "torch_empty_cache_steps", "bf16_full_eval", "fp16_full_eval", "eval_accumulation_steps",
)  # fmt: skip
"""Fields that can move the peak and that no plan expresses; named where they are not at their default."""
FIRST_CHUNKED_ONLY = (1, 15)
"""trl from which on ``nll`` is the chunked loss."""
MASKED = ("completion_only_loss", "assistant_only_loss")
STAND_IN = "h200"
"""Catalog entry for a GPU that the catalog lacks; nothing of it is printed."""


class LiveJob(NamedTuple):
    """What a running trainer trains, in lcplan's words."""

    spec: ModelSpec
    plan: TrainPlan
    gpu: GpuSpec | None
    """None where the GPU is not in the catalog and none was named: the report then has no verdict."""
    notes: tuple[str, ...]
    """What the prediction takes for granted, and settings it does not count."""


class MemoryCallback(TrainerCallback):  # type: ignore[misc]
    """Prints what lcplan predicts when training begins, and what was measured when it ends.

    Attributes:
        report: the prediction; None before training, and where there is none
        measured_bytes: peak allocated of the worst rank after the first step (which makes the optimizer's states), or
            of the only step; None without a GPU
    """

    def __init__(self, gpu: str | None = None, *, units: ByteUnits = "GiB") -> None:
        """Predict for ``gpu``, an id of the catalog; by itself for the GPU that the run is on."""
        self.gpu, self.units = gpu, units
        self.report: MemoryReport | None = None
        self.measured_bytes: int | None = None
        self._steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Print the prediction, or why there is none."""
        self._steps, self.measured_bytes, self.report = 0, None, None
        try:
            job = live_job(args, model, gpu=self.gpu)
            self.report = estimate(job.spec, job.plan, job.gpu or load_gpu(STAND_IN))
        except LcplanError as error:
            self._say(state, f"no prediction [{error.code}]: {error.message}")
        else:
            self._say(state, *_prediction(self.report, job, self.units))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the first step out of the peak: the optimizer's states do not exist before its end."""
        self._steps += 1
        if torch.cuda.is_available() and self._steps == 1:
            self.measured_bytes = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the measured peak beside the prediction."""
        if not torch.cuda.is_available():
            self._say(state, "measured: nothing; without a GPU there is no GPU memory to measure")
            return
        if self._steps > 1:
            self.measured_bytes = torch.cuda.max_memory_allocated()
        if self.measured_bytes is None:
            self._say(state, "measured: nothing; no step was made")
            return
        self.measured_bytes = _worst_of_all_ranks(self.measured_bytes)
        text = f"measured peak: {format_bytes(self.measured_bytes, self.units)} allocated"
        if self._steps == 1:
            text += " in the only step, in which the optimizer's states did not exist yet"
        if self.report is not None:
            error = self.report.peak_allocated_bytes / self.measured_bytes - 1
            text += f"; predicted {format_bytes(self.report.peak_allocated_bytes, self.units)} ({error:+.2%})"
        self._say(state, text)

    def _say(self, state: Any, *lines: str) -> None:
        if state.is_world_process_zero:
            for line in lines:
                print(f"lcplan: {line}", flush=True)  # noqa: T201


def _worst_of_all_ranks(num_bytes: int) -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return num_bytes
    largest = torch.tensor(num_bytes, device="cuda")
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)


def _prediction(report: MemoryReport, job: LiveJob, units: ByteUnits) -> list[str]:
    peak = f"{format_bytes(report.peak_allocated_bytes, units)} allocated in {report.peak_phase}"
    device = format_bytes(report.device_peak_bytes, units)
    if job.gpu is None:
        verdict = (
            f"{device} with what lies outside tensors; this GPU is not in the catalog, so that nothing says it fits"
        )
    else:
        fits = "fits" if report.fits else "does not fit"
        verdict = f"{device} of {format_bytes(job.gpu.usable_bytes, units)} on {job.gpu.id}: {fits}"
    top = report.dominant
    return [
        f"predicted peak: {peak}; {verdict}",
        f"largest item: {top.key} ({format_bytes(top.num_bytes, units)})",
        *(f"note: {note}" for note in job.notes),
    ]


def live_job(args: Any, model: Any, *, gpu: str | None = None) -> LiveJob:
    """The plan of a trainer's arguments, model and accelerator.

    Args:
        args: SFTConfig of the run
        model: the model as the trainer has it, with adapters where it has some
        gpu: id of the catalog; None: the GPU that the process runs on

    Raises:
        PlanError: for what no plan expresses, by name.
        ModelError: for a model that the formulas do not know.
    """
    if model is None or not hasattr(args, "max_length"):
        raise PlanError("not-sft", "the run is not of TRL's SFTTrainer, whose settings are the only ones known here.")
    spec = ModelSpec.from_config(model.config.to_dict(), model.config.name_or_path or model.config.model_type)
    found = _gpu(gpu)
    given = {
        **_trainer_fields(args),
        **_layout(),
        **_model_fields(model, spec),
        "gpu": found.id if found else STAND_IN,
        "rope": "none",  # the config says already how the model was built
        "loss": _loss(args.loss_type),
    }
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
        given["per_device_eval_batch_size"] = args.per_device_eval_batch_size
    _check_precision(args, given)
    plan, filled = resolve(spec, given, usual_gpus_per_node=1)
    return LiveJob(spec, plan, found, (*_notes(args), *filled))


def _gpu(id: str | None) -> GpuSpec | None:
    """The named GPU, or the one of this process where the catalog has it."""
    if id is not None:
        return load_gpu(id)
    if not torch.cuda.is_available():
        return None
    from lcplan import catalog

    total = torch.cuda.mem_get_info()[1]
    name = torch.cuda.get_device_name().casefold()
    for known in map(load_gpu, catalog.gpu_ids()):
        # "NVIDIA H100 80GB HBM3" is h100-80gb: the words of the id, and the memory that the catalog says within 2%
        words = [word for word in known.id.split("-") if not word.endswith("gb")]
        if all(word in name for word in words) and abs(total / known.usable_bytes - 1) < 0.02:
            return known.model_copy(update={"usable_bytes": total})
    return None


def _trainer_fields(args: Any) -> dict[str, Any]:
    values = {name: getattr(args, name, None) for name in READ}
    values = {name: getattr(value, "value", value) for name, value in values.items() if value is not None}
    values["dtype"] = "bfloat16"  # the model itself says, below
    plan = read_values("TRL", values, where="SFTConfig").plan
    return {"activation_checkpointing": "none", "offload_activations": False, **plan}


def _loss(loss_type: str) -> str:
    """``nll`` keeps all logits before trl 1.15, and ``chunked_nll`` scores 256 rows at a time."""
    version = installed_stack()["trl"] or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) >= FIRST_CHUNKED_ONLY:
        return "chunked"
    return "chunked-256" if loss_type == "chunked_nll" else "full"


def _layout() -> dict[str, Any]:
    """Ranks and how they share the job, from accelerate's state."""
    state = AcceleratorState()
    ranks = state.num_processes
    backends = {DistributedType.NO: "single", DistributedType.MULTI_GPU: "ddp", DistributedType.FSDP: "fsdp2"}
    if state.distributed_type not in backends:
        raise PlanError(
            "distributed-type",
            f"{state.distributed_type.value} is not recognised in a live run: what it holds depends on a configuration "
            "that is not read here. Use lcplan estimate.",
        )
    backend = backends[state.distributed_type]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    fields: dict[str, Any] = {"backend": backend, "num_gpus": ranks, "gpus_per_node": local}
    if backend == "fsdp2":
        plugin = state.fsdp_plugin
        if plugin.fsdp_version != 2:
            raise PlanError("fsdp1", f"fsdp_version {plugin.fsdp_version} is another sharding. Set fsdp_version: 2.")
        if state.mixed_precision != "bf16":
            raise PlanError("precision", f"FSDP2 with mixed_precision {state.mixed_precision}: only bf16 is counted.")
        fields["offload_params"] = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        fields["reshard_after_forward"] = bool(plugin.reshard_after_forward)
        if plugin.activation_checkpointing:
            raise PlanError("two-checkpointings", "fsdp_activation_checkpointing is set: leave it to the trainer.")
    return fields | _parallel_sizes(state, backend)


def _parallel_sizes(state: Any, backend: str) -> dict[str, Any]:
    """accelerate's ParallelismConfig; without one FSDP2 shards over all ranks, and DDP repeats on them."""
    sizes = state.parallelism_config
    names = ("dp_replicate_size", "dp_shard_size", "cp_size", "sp_size")
    if sizes is None or all(getattr(sizes, name) == 1 for name in (*names, "tp_size")):
        spread = {"fsdp2": "dp_shard_size", "ddp": "dp_replicate_size"}.get(backend)
        return {spread: state.num_processes} if spread else {}
    if sizes.tp_size > 1:
        raise PlanError("tp", f"tp_size {sizes.tp_size}: lcplan has no tensor parallelism.")
    fields: dict[str, Any] = {name: getattr(sizes, name) for name in names}
    if sizes.cp_size > 1:
        fields["cp_comm_strategy"] = sizes.cp_handler.cp_comm_strategy
    return fields


def _model_fields(model: Any, spec: ModelSpec) -> dict[str, Any]:
    """What the live model says: type of the weights, attention, adapters, what is frozen."""
    trained = {p.dtype for p in model.parameters() if p.is_floating_point()}
    fields: dict[str, Any] = {"attn_implementation": model.config._attn_implementation}
    adapters = getattr(model, "peft_config", None)
    if adapters:
        fields |= _lora_fields(adapters[model.active_adapter])
        trained = {p.dtype for name, p in model.named_parameters() if "lora_" not in name and p.is_floating_point()}
    elif frozen := {name for name, p in model.named_parameters() if not p.requires_grad}:
        fields |= _frozen_fields(model, frozen, spec)
    if quantised := getattr(model.config, "quantization_config", None):
        fields["quantize"] = _quantisation(quantised)
    elif len(trained) != 1 or not trained <= {torch.bfloat16, torch.float32}:
        types = ", ".join(sorted(map(str, trained)))
        raise PlanError("precision", f"the weights are {types}: bfloat16 or float32 alone is counted.")
    fields["dtype"] = "float32" if trained == {torch.float32} else "bfloat16"
    return fields


def _lora_fields(config: Any) -> dict[str, Any]:
    uncounted = ("modules_to_save", "use_dora", "rank_pattern", "layers_to_transform", "trainable_token_indices")
    used = [name for name in uncounted if getattr(config, name, None)]
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA" or used:
        what = ", ".join(used) or f"peft_type {config.peft_type}"
        raise PlanError("adapters", f"{what}: only plain LoRA adapters are counted.")
    targets = config.target_modules
    names = targets if isinstance(targets, str) else ",".join(sorted(targets))
    return {"lora_r": config.r, "lora_target_modules": names, "lora_dropout": float(config.lora_dropout)}


def _frozen_fields(model: Any, frozen: set[str], spec: ModelSpec) -> dict[str, Any]:
    tables = {
        "freeze_embeddings": model.get_input_embeddings().weight,
        "freeze_head": model.get_output_embeddings().weight,
    }
    fields = {name: True for name, weight in tables.items() if not weight.requires_grad}
    counted = len({id(weight) for weight in tables.values() if not weight.requires_grad})
    if len(frozen) != counted:
        raise PlanError(
            "frozen-weights", f"{len(frozen)} parameters of {spec.id} are frozen: only embedding and head are counted."
        )
    return fields


def _quantisation(config: Any) -> str:
    values = config if isinstance(config, dict) else config.to_dict()
    if (values.get("load_in_4bit"), values.get("bnb_4bit_quant_type"), values.get("bnb_4bit_use_double_quant")) != (
        True, "nf4", True,
    ):  # fmt: skip
        raise PlanError("quantisation", "the weights are quantised, and not as nf4 with double quantisation.")
    return "nf4"


def _check_precision(args: Any, given: dict[str, Any]) -> None:
    """float32 weights are counted under bf16 autocast alone."""
    if given["backend"] != "fsdp2" and given["dtype"] == "float32" and not args.bf16:
        raise PlanError(
            "precision",
            "float32 weights with bf16 false train in float32 throughout, which is not counted. Set bf16=True, or load "
            'the model in bfloat16 (model_init_kwargs={"dtype": "bfloat16"}).',
        )


def _notes(args: Any) -> list[str]:
    notes = [f"every row holds max_length ({args.max_length:,}) tokens and none is padded"]
    if masked := [name for name in MASKED if getattr(args, name, None)]:
        notes.append(f"{', '.join(masked)}: counted as if every token had a label")
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    changed = [name for name in CHANGE_MEMORY if name in defaults and getattr(args, name) != defaults[name]]
    if changed:
        notes.append(f"not recognised, and not counted: {', '.join(changed)}")
    return notes
