"""The plan flags that estimate, recommend and run share, and how they become a resolved job.

Precedence: preset or --config file, then flags. Flag names are the plan's field names in kebab-case.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_args

import typer

from lcplan.cli import completion
from lcplan.errors import InputError
from lcplan.hardware import GpuSpec, load_gpu
from lcplan.model_loading import SpecReader, load_model
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import (
    KNOWN_OPTIMIZERS,
    ActivationCheckpointing,
    AttnImplementation,
    Backend,
    CommStrategy,
    Dtype,
    Loss,
    TrainPlan,
    resolve,
)
from lcplan.units import ByteUnits, parse_bytes, parse_count

if TYPE_CHECKING:
    from lcplan.config_reading import ForeignJob
    from lcplan.presets import Preset

    Base = Preset | ForeignJob

Flag = bool | None
PLAN = "Plan"


def _option(help: str, *names: str, complete: completion.Completer | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PLAN, show_default=False, autocompletion=complete)


def _choice(help: str, choices: Any) -> Any:
    """An option whose values are those of a ``Literal``."""
    return _option(help, complete=completion.one_of(*get_args(choices)))


def _plan_flags(
    max_length: Annotated[str | None, _option("Tokens of one sequence: 1048576, 1Mi (2^20) or 1M (10^6).")] = None,
    per_device_train_batch_size: Annotated[int | None, _option("Sequences a rank holds at once.")] = None,
    per_device_eval_batch_size: Annotated[int | None, _option("Sequences a rank evaluates at once.")] = None,
    gradient_accumulation_steps: Annotated[int | None, _option("Micro steps before an optimizer step.")] = None,
    gpu: Annotated[str | None, _option("GPU id, see `lcplan list gpus`.", complete=completion.gpus)] = None,
    num_gpus: Annotated[int | None, _option("GPUs of the job.")] = None,
    gpus_per_node: Annotated[int | None, _option("GPUs of one node.")] = None,
    backend: Annotated[str | None, _choice("single, ddp, fsdp2 or deepspeed.", Backend)] = None,
    dp_replicate_size: Annotated[int | None, _option("Replicas of the sharded model.")] = None,
    dp_shard_size: Annotated[int | None, _option("Data-parallel ranks that shard the states.")] = None,
    cp_size: Annotated[int | None, _option("Ranks that split a sequence by ring attention (FSDP2).")] = None,
    sp_size: Annotated[int | None, _option("Ranks that split a sequence by Ulysses (DeepSpeed).")] = None,
    cp_comm_strategy: Annotated[str | None, _choice("allgather or alltoall.", CommStrategy)] = None,
    cp_head_chunks: Annotated[int | None, _option("Parts of the heads that ring attention takes in turn.")] = None,
    cp_merge_dtype: Annotated[str | None, _choice("float32 or bfloat16: sums of ring attention.", Dtype)] = None,
    dtype: Annotated[str | None, _choice("bfloat16 or float32: type the weights are loaded in.", Dtype)] = None,
    optim: Annotated[
        str | None, _option("Optimizer, by transformers' name.", complete=completion.one_of(*KNOWN_OPTIMIZERS))
    ] = None,
    loss: Annotated[str | None, _choice("chunked, chunked-256 (TRL 1.13 and 1.14) or full.", Loss)] = None,
    scored_fraction: Annotated[float | None, _option("Share of tokens with a label; prompts masked: below 1.")] = None,
    activation_checkpointing: Annotated[
        str | None, _choice("full, selective or none.", ActivationCheckpointing)
    ] = None,
    checkpoint_every_n_layers: Annotated[int | None, _option("Checkpoint every n-th layer only.")] = None,
    offload_activations: Annotated[
        Flag,
        _option(
            "Keep checkpointed layer inputs in pinned host memory.",
            "--offload-activations/--no-offload-activations",
        ),
    ] = None,
    offload_prefetch: Annotated[
        Flag,
        _option("Offload on a side stream, and back a layer ahead.", "--offload-prefetch/--no-offload-prefetch"),
    ] = None,
    activation_offloading: Annotated[
        Flag, _option("TRL's own activation offloading.", "--activation-offloading/--no-activation-offloading")
    ] = None,
    offload_params: Annotated[
        Flag,
        _option("Keep parameters and optimizer states on the host.", "--offload-params/--no-offload-params"),
    ] = None,
    reshard_after_forward: Annotated[
        Flag,
        _option(
            "FSDP2: free a layer's weights after its forward.", "--reshard-after-forward/--no-reshard-after-forward"
        ),
    ] = None,
    zero_stage: Annotated[int | None, _option("DeepSpeed: 1, 2 or 3.")] = None,
    offload_optimizer: Annotated[
        Flag, _option("DeepSpeed: optimizer on the host.", "--offload-optimizer/--no-offload-optimizer")
    ] = None,
    mlp_tile_size: Annotated[int | None, _option("Tokens of one MLP tile; no tiles with as many as a GPU has.")] = None,
    kernels: Annotated[
        str | None,
        _option("none, or liger: norms, RoPE, SwiGLU.", complete=completion.one_of("none", "liger")),
    ] = None,
    lora_r: Annotated[int | None, _option("LoRA rank.")] = None,
    lora_target_modules: Annotated[str | None, _option("Modules that get an adapter.")] = None,
    lora_dropout: Annotated[float | None, _option("Dropout before the adapters.")] = None,
    quantize: Annotated[str | None, _option("none or nf4.", complete=completion.one_of("none", "nf4"))] = None,
    freeze_embeddings: Annotated[
        Flag, _option("Do not train the token embedding.", "--freeze-embeddings/--no-freeze-embeddings")
    ] = None,
    freeze_head: Annotated[Flag, _option("Do not train lm_head.", "--freeze-head/--no-freeze-head")] = None,
    padding: Annotated[Flag, _option("Rows are padded to max_length.", "--padding/--no-padding")] = None,
    attn_implementation: Annotated[str | None, _choice("sdpa, flash_attention_2 or eager.", AttnImplementation)] = None,
    rope: Annotated[str | None, _option("auto, none or yarn:FACTOR.")] = None,
    packing: Annotated[Flag, _option("Pack short samples into a row.", "--packing/--no-packing")] = None,
    host_memory: Annotated[str | None, _option("Host memory of a node, such as 2TB.")] = None,
) -> dict[str, Any]:
    given = dict(locals())
    if max_length is not None:
        given["max_length"] = parse_count(max_length)
    host = given.pop("host_memory")
    given["host_memory_bytes"] = parse_bytes(host) if host is not None else None
    return {name: value for name, value in given.items() if value is not None}


def with_plan_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every plan flag but those it has itself; it receives what the user set as ``given``."""
    every = inspect.signature(_plan_flags, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True)
    shared = {name: flag for name, flag in every.items() if name not in own.parameters}

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        flags = {name: values.pop(name) for name in shared}
        command(given=_plan_flags(**flags), **values)

    kept = [p for name, p in own.parameters.items() if name != "given"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*kept, *shared.values())]
    documented = cast("Any", wrapper)
    documented.__signature__ = own.replace(parameters=parameters)
    documented.__annotations__ = {p.name: p.annotation for p in parameters}
    del documented.__wrapped__
    return wrapper


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Catalog or Hub id, or a path to a config.json or its folder.",
        autocompletion=completion.models,
    ),
]
PresetOption = Annotated[
    str | None, typer.Option(help="A named job, see `lcplan list presets`.", autocompletion=completion.presets)
]
ConfigOption = Annotated[
    list[Path] | None,
    typer.Option(help="A preset's YAML, or that of accelerate, TRL, axolotl or LLaMA-Factory; several are merged."),
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model repository's own code.")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
TokenBudgetOption = Annotated[str | None, typer.Option(help="Tokens to train on, such as 1B: how long that takes.")]
EmitOption = Annotated[
    Path | None, typer.Option(help="Write the plan as accelerate.yaml and sft.yaml (TRL) into this folder.")
]
UnitsOption = Annotated[str, typer.Option(help="GiB or GB.", autocompletion=completion.one_of(*get_args(ByteUnits)))]


def emit_plan(spec: ModelSpec, plan: TrainPlan, folder: Path | None) -> None:
    """Write the files of ``--emit`` and say so on stderr."""
    if folder is None:
        return
    from lcplan.config_writing import write_configs

    launcher, trainer = write_configs(spec, plan, folder)
    print(f"Wrote {launcher} and {trainer}.", file=sys.stderr)  # noqa: T201


def parse_token_budget(text: str | None) -> int | None:
    """``--token-budget`` as a count; None where it is not given.

    Raises:
        InputError: for what is no count, and for none.
    """
    if text is None:
        return None
    tokens = parse_count(text)
    if tokens < 1:
        raise InputError("bad-value", f"--token-budget {text!r:.60} is not a positive count. Write 1B or 500M.")
    return tokens


class Job(NamedTuple):
    """Everything a command knows once the command line is read."""

    spec: ModelSpec
    plan: TrainPlan
    gpu: GpuSpec
    assumptions: tuple[str, ...]
    preset: Base | None


def read_job(
    model: str | None,
    preset: str | None,
    config: list[Path] | None,
    given: dict[str, Any],
    *,
    trust_remote_code: bool,
    any_architecture: bool = False,
) -> Job:
    """Preset or config file, then flags, resolved once.

    With ``any_architecture`` transformers is asked for a model that lcplan's own table lacks.

    Raises:
        LcplanError: for anything that cannot be used.
    """
    base = read_base(model, preset, config)
    spec = read_spec(model, base, trust_remote_code=trust_remote_code, any_architecture=any_architecture)
    values = (dict(base.plan) if base else {}) | given
    gpu = values.get("gpu")
    if base is not None and gpu == base.device == "cpu":
        raise InputError(
            "cpu-preset",
            f"{base.name} is a CPU job, so there is no GPU it could fit. Train it with lcplan run --preset "
            f"{base.name}, or plan it for a GPU with --gpu.",
        )
    found = load_gpu(gpu) if gpu else None
    plan, assumptions = resolve(spec, values, usual_gpus_per_node=found.gpus_per_node if found else 1)
    check_foreign(base, spec, plan)
    return Job(spec, plan, load_gpu(plan.gpu), assumptions, base)


def check_foreign(base: Base | None, spec: ModelSpec, plan: TrainPlan) -> None:
    """What another tool's file says that only shows once the plan is known.

    Raises:
        PlanError: for padding that does not divide, and a rope_theta that is not the model's.
    """
    if getattr(base, "formats", None) is None:
        return
    from lcplan.config_reading import check_padding
    from lcplan.rope import check_theta

    job = cast("ForeignJob", base)
    check_padding(job, plan.length_multiple)
    if job.rope is not None and job.rope.get("rope_theta") is not None:
        check_theta(spec, float(job.rope["rope_theta"]))


def read_base(model: str | None, preset: str | None, config: list[Path] | None) -> Base | None:
    """The preset or job files that the flags build on; at least one of model, preset and file must be there."""
    if preset is not None and config:
        raise InputError("two-bases", "--preset and --config both describe a job. Give one of them.")
    if model is None and preset is None and not config:
        raise InputError("no-model", "No model is named. Give MODEL, --preset NAME or --config FILE.")
    if preset is not None:
        from lcplan.presets import load_preset  # yaml: only where it is needed

        return load_preset(preset)
    return _read_files(config) if config else None


def _read_files(files: list[Path]) -> Base:
    from lcplan.config_reading import read_configs, read_yaml
    from lcplan.presets import parse_preset

    if len(files) == 1 and "plan" in read_yaml(files[0]):
        return parse_preset(files[0].read_text("utf-8"), name=files[0].stem)
    job = read_configs(files)
    say_what_was_read(job)
    return job


def say_what_was_read(job: ForeignJob) -> None:
    """On stderr: what was taken from another tool's files, and what was not."""
    lines = [f"read {job.name} ({', '.join(job.formats)}): {'; '.join(job.taken) or 'nothing'}"]
    if job.ignored:
        lines.append(f"ignored: {', '.join(job.ignored)}")
    lines += [f"warning [{warning.code}]: {warning.message} {warning.fix}" for warning in job.warnings]
    for line in lines:
        print(line, file=sys.stderr)  # noqa: T201


def read_spec(
    model: str | None, base: Base | None, *, trust_remote_code: bool, any_architecture: bool = False
) -> ModelSpec:
    """The model named on the command line, or the preset's."""
    read: SpecReader = ModelSpec.from_config
    if any_architecture:
        from lcplan.estimation import need_train_extra

        need_train_extra("--method trace runs the training code")
        from lcplan.tracing.spec_from_model import spec_of_config

        read = spec_of_config
    if model is not None:
        return load_model(model, trust_remote_code=trust_remote_code, read=read)
    if base is None:
        raise InputError("no-model", "No model is named. Give MODEL, --preset NAME or --config FILE.")
    if base.model is None:
        raise InputError("no-model", f"{base.name} names no model. Give MODEL on the command line as well.")
    if base.config is not None:
        return read(base.config, base.model)
    return load_model(base.model, trust_remote_code=trust_remote_code, read=read)
