"""The callback in a real SFTTrainer on the CPU, and what it takes from settings that only GPUs run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lcplan import estimate, load_gpu
from lcplan.errors import PlanError
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import resolve
from lcplan.units import format_bytes
from tests.conftest import tiny_config
from tests.jobs import ROOT, run_python

pytestmark = pytest.mark.train

TRAIN = """
import json, sys
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import SFTConfig, SFTTrainer
from lcplan.callback import MemoryCallback

config = Qwen3Config(**json.loads(sys.argv[1]))
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b", pad_token="b", unk_token="a")
given = dict(use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, output_dir="out", max_length=64)
given |= dict(dataset_kwargs={"skip_prepare_dataset": True}, per_device_train_batch_size=1, max_steps=2)
rows = Dataset.from_dict({"input_ids": [[0, 1] * 32] * 4})
callback = MemoryCallback(**json.loads(sys.argv[2]))
arguments = SFTConfig(**given, **json.loads(sys.argv[3]))
SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[callback]).train()
report = callback.report
print("RESULT", json.dumps(report and {"plan": report.plan, "bytes": report.peak_allocated_bytes}))
print("MEASURED", callback.measured_bytes)
"""


def train(tmp_path: Path, *, callback: str = "{}", arguments: str = "{}") -> list[str]:
    """The lines that a run with the callback printed."""
    import json

    config = {**tiny_config(), "torch_dtype": "bfloat16"}
    done = run_python("-c", TRAIN, json.dumps(config), callback, arguments, cwd=tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_run_on_the_cpu_prints_the_prediction_and_that_nothing_can_be_measured(tmp_path: Path) -> None:
    import json

    lines = train(tmp_path, callback='{"gpu": "a10g"}')
    said = [line for line in lines if line.startswith("lcplan: ")]
    result = json.loads(next(line for line in lines if line.startswith("RESULT")).removeprefix("RESULT "))
    spec = ModelSpec.from_config(tiny_config(), "tiny")
    plan, _ = resolve(
        spec, {"max_length": 64, "gpu": "a10g", "dtype": "bfloat16", "rope": "none"}, usual_gpus_per_node=1
    )
    assert result["plan"] == plan.model_dump()
    assert result["bytes"] == estimate(spec, plan, load_gpu("a10g")).peak_allocated_bytes
    assert said[0].startswith("lcplan: predicted peak: ")
    assert said[0].endswith("of 21.98 GiB on a10g: fits")
    assert "every row holds max_length (64) tokens" in " ".join(said)
    assert said[-1] == "lcplan: measured: nothing; without a GPU there is no GPU memory to measure"
    assert "MEASURED None" in lines


def test_what_it_does_not_know_is_named_and_training_goes_on(tmp_path: Path) -> None:
    lines = train(tmp_path, arguments='{"loss_type": "dft"}')
    assert "lcplan: no prediction [loss-type]: SFTConfig: loss_type dft is not counted. Use nll." in lines
    assert any("train_loss" in line for line in lines)
    assert "RESULT null" in lines


# What a live run can hold, without running it


def settings(**changes: Any) -> Any:
    """An SFTConfig that has not looked at this machine."""
    import dataclasses

    from trl import SFTConfig

    args = object.__new__(SFTConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    args.__dict__.update(defaults | {"max_length": 4096, "per_device_train_batch_size": 1, "bf16": True} | changes)
    return args


def model(dtype: str = "bfloat16", **changes: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen3Config(**tiny_config(**changes)), dtype=getattr(torch, dtype))


def live(monkeypatch: pytest.MonkeyPatch, args: Any = None, of: Any = None, **state: Any) -> Any:
    from accelerate.state import DistributedType

    from lcplan import callback

    there = {"distributed_type": DistributedType.NO, "num_processes": 1, "parallelism_config": None} | state
    monkeypatch.setattr(callback, "AcceleratorState", lambda: SimpleNamespace(**there))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return callback.live_job(args or settings(), of if of is not None else model(), gpu="h200")


def fsdp(**changes: Any) -> dict[str, Any]:
    """accelerate's state as a launched job has it, with accelerate's own records."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import DistributedType

    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, "cpu_ram_efficient_loading": False} | changes)
    return {
        "distributed_type": DistributedType.FSDP, "num_processes": 8, "mixed_precision": "bf16", "fsdp_plugin": plugin,
        "parallelism_config": sizes(),
    }  # fmt: skip


def sizes(**changes: Any) -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig(**changes)


def test_settings_become_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    args = settings(
        gradient_accumulation_steps=3, optim="adafactor", gradient_checkpointing_kwargs={"every_n_layers": 2},
        per_device_train_batch_size=2, eval_strategy="steps", per_device_eval_batch_size=5, completion_only_loss=True,
        torch_compile=True,
    )  # fmt: skip
    job = live(monkeypatch, args, model("float32"))
    plan = job.plan
    assert (plan.gradient_accumulation_steps, plan.optim, plan.per_device_train_batch_size) == (3, "adafactor", 2)
    assert (plan.activation_checkpointing, plan.checkpoint_every_n_layers) == ("full", 2)
    assert (plan.dtype, plan.per_device_eval_batch_size, plan.loss) == ("float32", 5, "chunked")
    assert "completion_only_loss: counted as if every token had a label" in job.notes
    assert "not recognised, and not counted: torch_compile" in job.notes
    assert live(monkeypatch, settings(gradient_checkpointing=False)).plan.activation_checkpointing == "none"


def test_nothing_is_filled_in_behind_the_run_s_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(live(monkeypatch).notes) == 1, "that rows are full; no default of lcplan's"
    for split in (sizes(), sizes(cp_size=8), sizes(dp_replicate_size=2, dp_shard_size=4)):
        assert len(live(monkeypatch, **fsdp() | {"parallelism_config": split}).notes) == 1


def test_ring_attention_over_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import TorchContextParallelConfig

    handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    split = sizes(dp_shard_size=2, cp_size=4, cp_handler=handler)
    plan = live(monkeypatch, **fsdp(cpu_offload=True) | {"parallelism_config": split}).plan
    assert (plan.backend, plan.num_gpus, plan.dp_shard_size, plan.cp_size) == ("fsdp2", 8, 2, 4)
    assert (plan.cp_comm_strategy, plan.offload_params, plan.reshard_after_forward) == ("alltoall", True, True)


def test_fsdp2_without_sizes_shards_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = live(monkeypatch, **fsdp(reshard_after_forward=False)).plan
    assert (plan.dp_shard_size, plan.cp_size) == (8, 1)
    assert (plan.offload_params, plan.reshard_after_forward) == (False, False)


def test_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import DistributedType

    plan = live(monkeypatch, distributed_type=DistributedType.MULTI_GPU, num_processes=2).plan
    assert (plan.backend, plan.dp_replicate_size) == ("ddp", 2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    asked = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    plan = live(monkeypatch, of=peft.get_peft_model(model(), asked)).plan
    assert (plan.lora_r, plan.lora_target_modules, plan.lora_dropout, plan.dtype) == (
        4,
        "q_proj,v_proj",
        0.1,
        "bfloat16",
    )
    asked = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(PlanError, match="modules_to_save: only plain LoRA"):
        live(monkeypatch, of=peft.get_peft_model(model(), asked))


def test_frozen_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = model()
    frozen.get_input_embeddings().weight.requires_grad_(False)
    plan = live(monkeypatch, of=frozen).plan
    assert (plan.freeze_embeddings, plan.freeze_head) == (True, False)
    frozen.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    with pytest.raises(PlanError, match="2 parameters of .* are frozen"):
        live(monkeypatch, of=frozen)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"args": {"fp16": True}}, "fp16 true"),
        ({"args": {"use_liger_kernel": True}}, "use_liger_kernel"),
        ({"args": {"optim": "lomo"}}, "lomo"),
        ({"args": {"bf16": False}, "dtype": "float32"}, "float32 throughout"),
        ({"dtype": "float16"}, "torch.float16"),
        ({"fsdp": {"fsdp_version": 1}}, "fsdp_version 1"),
        ({"fsdp": {"activation_checkpointing": True}}, "fsdp_activation_checkpointing"),
        ({"tp_size": 2}, "tp_size 2"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantised"),
    ],
)
def test_what_no_plan_expresses_is_named(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], what: str) -> None:
    state = fsdp(**changes["fsdp"]) if "fsdp" in changes else {}
    if "tp_size" in changes:
        state = fsdp() | {"parallelism_config": sizes(tp_size=changes["tp_size"])}
    of = model(changes.get("dtype", "bfloat16"))
    if "quantization_config" in changes:
        of.config.quantization_config = changes["quantization_config"]
    with pytest.raises(PlanError, match=what):
        live(monkeypatch, settings(**changes.get("args", {})), of, **state)


def test_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import DistributedType

    with pytest.raises(PlanError, match="DEEPSPEED is not recognised"):
        live(monkeypatch, distributed_type=DistributedType.DEEPSPEED)


def test_another_trainer_is_named() -> None:
    from lcplan.callback import live_job

    with pytest.raises(PlanError, match="SFTTrainer"):
        live_job(SimpleNamespace(), model())


def test_the_peak_of_the_steps_after_the_first_is_beside_the_prediction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU; here torch's counters are those of a GPU that is not there."""
    import torch

    from lcplan.callback import MemoryCallback

    live(monkeypatch)
    peaks = iter((5_000_000_000, 3_000_000_000))
    resets: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, load_gpu("h100-80gb").usable_bytes + 100))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    callback, state = MemoryCallback(units="GB"), SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(settings(), state, None, model=model())
    for _ in range(3):
        callback.on_step_end(settings(), state, None)
    callback.on_train_end(settings(), state, None)
    said = capsys.readouterr().out
    assert callback.measured_bytes == 3_000_000_000
    assert len(resets) == 2
    assert "on h100-80gb: fits" in said
    assert callback.report is not None
    error = callback.report.peak_allocated_bytes / 3e9 - 1
    predicted = format_bytes(callback.report.peak_allocated_bytes, "GB")
    assert f"lcplan: measured peak: 3.00 GB allocated; predicted {predicted} ({error:+.2%})\n" in said


def test_a_gpu_that_the_catalog_lacks_gets_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from lcplan.callback import MemoryCallback

    live(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    callback, state = MemoryCallback(), SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(settings(), state, None, model=model())
    said = capsys.readouterr().out
    assert "not in the catalog, so that nothing says it fits" in said
    assert "h200" not in said
