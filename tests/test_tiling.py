"""Tiled MLPs: the same training as without, in the module, in the generated job, and as one rank of several."""

from __future__ import annotations

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, fsdp2_job, run_python, small_job

from lcplan.backends.job import TEMPLATES, render_job
from lcplan.errors import PlanError
from tests.conftest import plan_of, tiny_spec
from tests.families import family_spec
from tests.test_jobs_on_cpu import LAUNCH
from tests.test_smoke_run import ON_CPU

pytestmark = [pytest.mark.train, pytest.mark.filterwarnings("ignore")]
FLOAT32_ROUNDING = 1e-5
TOKENS = (2, 50)
"""Rows and their length: 100 tokens, which are no multiple of most tiles."""


@pytest.fixture
def tiling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TEMPLATES))
    return importlib.import_module("tiling")


def model_of(family: str = "qwen3", *, dtype: str = "float32", attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"hidden_size": 32, "intermediate_size": 56, "vocab_size": 97, "head_dim": 8, "num_attention_heads": 4}
    raw = {**family_spec(family, num_hidden_layers=3).config, **sizes, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[raw.pop("model_type")].from_dict(raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    return model.to(getattr(torch, dtype)).train()


def gradients(model: Any, *, steps: int = 1) -> tuple[float, dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        ids = torch.randint(1, 97, TOKENS, generator=generator)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return float(loss), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest distance of a gradient from its counterpart, relative to that."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


@pytest.mark.parametrize("tile", [1, 7, 50, 99])
@pytest.mark.parametrize("checkpointing", [{}, {"every_n_layers": 1}, {"every_n_layers": 2}])
def test_losses_and_gradients_are_those_without_tiles(tiling: Any, tile: int, checkpointing: dict[str, int]) -> None:
    def made(size: int | None) -> tuple[float, dict[str, Any]]:
        model = model_of()
        if size is not None:
            tiling.tile_mlps(model, size)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False}, **checkpointing)
        return gradients(model, steps=2)

    (loss, plain), (tiled_loss, tiled) = made(None), made(tile)
    assert tiled_loss == pytest.approx(loss, rel=1e-6)
    assert apart(tiled, plain) < FLOAT32_ROUNDING


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2", "glm4", "gemma2", "gemma"])
def test_other_mlps_train_alike(tiling: Any, family: str) -> None:
    plain, tiled = (model_of(family, attention="eager") for _ in range(2))
    tiling.tile_mlps(tiled, 16)
    assert apart(gradients(tiled)[1], gradients(plain)[1]) < FLOAT32_ROUNDING


def test_bfloat16_gradients_are_as_near_to_the_exact_ones(tiling: Any) -> None:
    exact = gradients(model_of())[1]
    plain = apart(gradients(model_of(dtype="bfloat16"))[1], exact)
    tiled = model_of(dtype="bfloat16")
    tiling.tile_mlps(tiled, 16)
    assert apart(gradients(tiled)[1], exact) < 1.1 * plain


def test_autocast_reaches_the_tiles(tiling: Any) -> None:
    import torch

    def made(size: int) -> dict[str, Any]:
        model = model_of()
        tiling.tile_mlps(model, size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ids = torch.arange(1, 91).view(1, 90)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    whole, tiled, exact = made(90), made(45), gradients(model_of())[1]
    assert apart(tiled, whole) < apart(whole, exact), "nearer to bf16's products than those are to float32's"
    assert all(gradient.dtype == torch.float32 for gradient in tiled.values())


def test_a_checkpointed_layer_runs_its_mlp_forward_no_more_often(tiling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    forward, seen = Qwen3MLP.forward, []

    def count(self: Any, hidden_states: Any) -> Any:
        seen.append(hidden_states.shape[:-1].numel())
        return forward(self, hidden_states)

    monkeypatch.setattr(Qwen3MLP, "forward", count)
    passes = {}
    for tile in (None, 16):
        for checkpointed in (False, True):
            model = model_of()
            if tile is not None:
                tiling.tile_mlps(model, tile)
            if checkpointed:
                model.activation_checkpointing_enable({"use_reentrant": False})
            seen.clear()
            gradients(model)
            passes[tile, checkpointed] = sum(seen) / (3 * 100)
    assert passes == {(None, False): 1, (None, True): 2, (16, False): 2, (16, True): 2}


def test_each_weight_gets_its_gradient_once(tiling: Any) -> None:
    model = model_of()
    tiling.tile_mlps(model, 16)
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: fired.update({name: fired.get(name, 0) + 1}))
    gradients(model)
    assert set(fired.values()) == {1}


def test_adapters_train_alike_and_frozen_weights_stay_so(tiling: Any) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    def made(tile: int) -> dict[str, Any]:
        import torch

        model = model_of()
        tiling.tile_mlps(model, tile)
        model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(2)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model.enable_input_require_grads()
        return gradients(adapted)[1]

    whole, tiled = made(100), made(16)
    assert len(whole) == 3 * 7 * 2, "an A and a B for every linear, nothing else"
    assert apart(tiled, whole) < FLOAT32_ROUNDING


def test_without_gradients_it_runs_in_tiles_as_well(tiling: Any) -> None:
    import torch

    plain, tiled = model_of(), model_of()
    tiling.tile_mlps(tiled, 16)
    ids = torch.arange(1, 91).view(1, 90)
    with torch.no_grad():
        assert torch.allclose(tiled(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-6)


def test_what_cannot_be_tiled_is_refused(tiling: Any) -> None:
    import torch

    with pytest.raises(ValueError, match="decoder layer 0 has no dense MLP"):
        tiling.tile_mlps(model_of("mixtral"), 16)
    noisy = model_of()
    noisy.model.layers[1].mlp.noise = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match="decoder layer 1 has dropout"):
        tiling.tile_mlps(noisy, 16)


# --- the generated job

GRADIENTS = """
import sys, torch
import {module} as job
from transformers import TrainerCallback
make = job.make_trainer
class Dump(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            torch.save({{n: p.grad.clone() for n, p in model.named_parameters()}}, "gradients.pt")
def with_dump(*args):
    trainer = make(*args)
    trainer.add_callback(Dump())
    return trainer
job.make_trainer = with_dump
sys.exit(job.main(job.JOB))
"""


def test_the_job_trains_alike(tmp_path: Path) -> None:
    import torch

    tiles = {"untiled": None, "tiled": 48, "one tile": 256}
    folders = {}
    for name, tile in tiles.items():
        plan = {"max_length": 64, "per_device_train_batch_size": 4, "mlp_tile_size": tile}
        job = small_job(plan=plan, training={"max_steps": 3, "save_model": False})
        folders[name] = render_job(job, tmp_path / name)
        (folders[name] / "look.py").write_text(GRADIENTS.format(module="train"))
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda folder: run_python("look.py", cwd=folder), folders.values()))
    assert [one.returncode for one in done] == [0, 0, 0], done[1].stderr
    results = {name: json.loads((folder / "result.json").read_text()) for name, folder in folders.items()}
    losses = {name: [step["loss"] for step in result["steps"]] for name, result in results.items()}
    made = {name: torch.load(folder / "gradients.pt") for name, folder in folders.items()}
    assert losses["one tile"] == losses["untiled"]
    assert losses["tiled"] == pytest.approx(losses["untiled"], abs=2e-5)
    assert apart(made["tiled"], made["untiled"]) < FLOAT32_ROUNDING
    assert apart(made["one tile"], made["untiled"]) == 0


def test_a_job_that_cannot_be_tiled_says_so(tmp_path: Path) -> None:
    folder = render_job(small_job(plan={"mlp_tile_size": 16}), tmp_path / "job")
    (folder / "tiling.py").write_text("def tile_mlps(model, size):\n    raise ValueError('decoder layer 0 is odd')\n")
    done = run_python("train.py", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "--mlp-tile-size 16: decoder layer 0 is odd" in done.stderr


def test_what_the_job_cannot_tile_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--mlp-tile-size 16 with --backend deepspeed"):
        render_job(fsdp2_job(backend="deepspeed", zero_stage=3, mlp_tile_size=16), tmp_path / "job")
    ddp = {"backend": "ddp", "dp_shard_size": 1, "dp_replicate_size": 2}
    with pytest.raises(PlanError, match="--mlp-tile-size 16 with --backend ddp"):
        render_job(fsdp2_job(**ddp, mlp_tile_size=16), tmp_path / "job")
    with pytest.raises(PlanError, match="--mlp-tile-size 16 with --activation-offloading"):
        plan_of(tiny_spec(), max_length=64, mlp_tile_size=16, activation_offloading=True)
    with pytest.raises(PlanError, match="--mlp-tile-size 16 with --lora-dropout"):
        plan_of(tiny_spec(), max_length=64, mlp_tile_size=16, lora_r=4, lora_dropout=0.1)


# --- FSDP2 with context parallelism, as one rank of a fake process group

AS_A_RANK = """
import os, sys, torch
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
from accelerate.state import PartialState
from accelerate.utils import DistributedType
PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
import argparse
import probe
from lcplan.tracing.seams import ring_attention_on_cpu
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
build = probe.sft_arguments
probe.sft_arguments = lambda job: {**build(job), "use_cpu": False}
probe.ARGUMENTS = argparse.Namespace(rank=0, capacity=None, whole_steps=1)
found, reduce = {}, FSDPParamGroup.post_backward
def look(self, *args):
    for one in self.fsdp_params:
        grad = getattr(getattr(one, "_unsharded_param", None), "grad", None)
        if grad is not None and one._param_fqn not in found:  # of the first step: what the group reduces is made up
            found[one._param_fqn] = grad.clone()
    return reduce(self, *args)
FSDPParamGroup.post_backward = look
with ring_attention_on_cpu():
    code = probe.main({**probe.JOB, "device": "cpu"})
torch.save(found, "gradients.pt")
sys.exit(code)
"""


def test_ring_attention_under_fsdp2_trains_alike(tmp_path: Path) -> None:
    """All gradients but those that are sums over tiles are equal to the last bit; these are bf16 sums."""
    import torch

    sizes = {"num_gpus": 4, "gpus_per_node": 4, "dp_shard_size": 1, "cp_size": 4, "per_device_train_batch_size": 1}
    folders = []
    for tile in (None, 48):
        job = fsdp2_job(**sizes, max_length=512, mlp_tile_size=tile)
        folders.append(render_job(job, tmp_path / str(tile)))
        (folders[-1] / "rank.py").write_text(AS_A_RANK)
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda folder: run_python("rank.py", cwd=folder, PYTHONPATH=ROOT), folders))
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    losses = [json.loads((folder / "probe.json").read_text())["loss"] for folder in folders]
    assert losses[0] == losses[1]
    plain, tiled = (torch.load(folder / "gradients.pt") for folder in folders)
    summed = {name for name in plain if ".mlp." in name}
    assert len(summed) == 2 * 3
    for name in plain.keys() - summed:
        assert tiled[name].equal(plain[name]), name
    rounding = torch.finfo(torch.bfloat16).eps
    each = {name: apart({name: tiled[name].float()}, {name: plain[name].float()}) for name in summed}
    assert 0 < max(each.values()) < rounding, "three tiles of 48, 48 and 32 tokens"


def test_real_ranks_of_fsdp2_train_alike(tmp_path: Path) -> None:
    losses = []
    for tile in (None, 96):
        folder = render_job(fsdp2_job(max_length=64, mlp_tile_size=tile), tmp_path / str(tile))
        (folder / "on_cpu.py").write_text(ON_CPU)
        done = run_python(*LAUNCH, "on_cpu.py", cwd=folder)
        assert done.returncode == 0, done.stderr
        result = json.loads((folder / "result.json").read_text())
        assert (result["distributed_type"], result["first_layer_sees"]) == ("FSDP", [4, 64])
        losses.append([step["loss"] for step in result["steps"]])
    assert losses[1][0] == losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=0.02), "as bf16 goes: AdamW's first steps are signs of gradients"
    assert losses[1][-1] < losses[1][0] - 0.1
