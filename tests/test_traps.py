"""Every known trap: refused or warned of by its code, or shown to be out of reach."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import ROOT, fsdp2_job, run_python, small_job

import lcplan
from lcplan import estimate, load_gpu, load_model
from lcplan.backends import launch
from lcplan.backends.accelerate_yaml import accelerate_config
from lcplan.backends.job import TEMPLATES, render_job
from lcplan.backends.templates import data as job_data
from lcplan.config_reading import check_padding, read_configs
from lcplan.errors import LcplanError
from lcplan.job_options import TrainingOptions
from lcplan.levers import conflict
from lcplan.rope import check_theta, position_limit, resolve_rope
from lcplan.traps import TRAPS, table
from lcplan.units import GIB
from tests.conftest import Outcome, plan_of, tiny_spec
from tools.trap_table import FILE, main

QWEN = load_model("Qwen/Qwen3-8B")
LINEAR = tiny_spec().model_copy(update={"layer_types": ("linear_attention",) * 5})
SP: dict[str, Any] = {"num_gpus": 8, "sp_size": 8, "backend": "deepspeed"}


def config(tmp_path: Path, content: dict[str, Any]) -> Any:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    return read_configs([tmp_path / "c.yaml"])


def rope_keys(tmp_path: Path) -> None:
    config(tmp_path, {"max_length": 8, "model_init_kwargs": {"rope_parameters": {"rope_type": "yarn", "factor": 4}}})


def both_checkpointings(tmp_path: Path) -> None:
    fsdp = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(fsdp))
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"max_length": 4096}))
    read_configs([tmp_path / "a.yaml", tmp_path / "b.yaml"])


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cp-packing": (lambda _: plan_of(QWEN, max_length=64, num_gpus=2, cp_size=2, packing=True), "--no-packing"),
    "sp-packing": (lambda _: plan_of(QWEN, max_length=64, **SP, packing=True), "flash_attention_2"),
    "cp-layer-types": (
        lambda _: plan_of(load_model("google/gemma-3-4b-pt"), max_length=64, num_gpus=2, cp_size=2),
        "--cp-size 1",
    ),
    "sp-layer-types": (
        lambda _: plan_of(LINEAR, max_length=66, num_gpus=3, sp_size=3, backend="deepspeed"),
        "sp-size 1",
    ),
    "cp-attention": (
        lambda _: plan_of(QWEN, max_length=64, num_gpus=2, cp_size=2, attn_implementation="flash_attention_2"),
        "--attn-implementation sdpa",
    ),
    "sp-attention": (lambda _: plan_of(QWEN, max_length=64, **SP, attn_implementation="eager"), "flash_attention_2"),
    "liger-loss": (lambda path: config(path, {"max_length": 8, "use_liger_kernel": True}), "Leave it out"),
    "cp-with-sp": (
        lambda _: plan_of(QWEN, max_length=64, num_gpus=4, cp_size=2, sp_size=2, backend="fsdp2"),
        "Set one of them to 1",
    ),
    "sizes-do-not-multiply": (lambda _: plan_of(QWEN, max_length=64, num_gpus=8, dp_shard_size=4), "must equal it"),
    "replicas-without-shards": (
        lambda _: plan_of(QWEN, max_length=64, num_gpus=8, dp_replicate_size=2, cp_size=4),
        "--dp-shard-size of at least 2",
    ),
    "sp-heads": (
        lambda _: plan_of(QWEN, max_length=66, num_gpus=3, sp_size=3, backend="deepspeed"),
        "Legal sizes: 2, 4, 8, 16, 32",
    ),
    "length-multiple": (lambda _: plan_of(QWEN, max_length=1001, num_gpus=2, cp_size=2), "1000 or 1004"),
    "pad-multiple": (
        lambda path: check_padding(config(path, {"max_length": 64, "pad_to_multiple_of": 8}), 16),
        "Use 16",
    ),
    "two-checkpointings": (both_checkpointings, "fsdp_activation_checkpointing: false"),
    "rope-keys": (rope_keys, "Give all four"),
    "rope-theta": (lambda _: check_theta(QWEN, 10_000), "leave it out"),
    "rope-factor-too-small": (lambda _: resolve_rope(QWEN, 2**20, "yarn:2"), "--rope auto"),
    "rope-stacked": (
        lambda _: resolve_rope(load_model("meta-llama/Llama-3.1-8B"), 2**20, "auto"),
        "--rope none",
    ),
}


def warnings_of(**given: Any) -> set[str]:
    spec, gpu = QWEN, load_gpu("h100-80gb")
    return {warning.code for warning in estimate(spec, plan_of(spec, gpu=gpu.id, **given), gpu).warnings}


def of_files(tmp_path: Path, **fsdp: Any) -> set[str]:
    values = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2, **fsdp}}
    return {warning.code for warning in config(tmp_path, values).warnings}


def cudnn(tmp_path: Path) -> set[str]:
    (tmp_path / "libcudnn.so.9").write_text("")
    found = launch.hidden_cudnn({"LD_LIBRARY_PATH": f"/nowhere::{tmp_path}"})
    assert launch.hidden_cudnn({"LD_LIBRARY_PATH": "/nowhere"}) is launch.hidden_cudnn({}) is None
    return {"hidden-cudnn"} if found == str(tmp_path) else set()


WARNED: dict[str, Callable[[Path], set[str]]] = {
    "rope-too-short": lambda _: warnings_of(max_length=2**17, rope="none"),
    "full-state-dict": lambda path: of_files(path, fsdp_state_dict_type="FULL_STATE_DICT"),
    "every-rank-loads": lambda path: of_files(path, fsdp_cpu_ram_efficient_loading=False),
    "host-memory-unknown": lambda _: warnings_of(max_length=2**17, offload_activations=True),
    "hidden-cudnn": cudnn,
    "gpus-without-length": lambda _: warnings_of(max_length=4096, num_gpus=8),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str, tmp_path: Path) -> None:
    make, fix = REFUSED[code]
    with pytest.raises(LcplanError) as caught:
        make(tmp_path)
    assert caught.value.code == code
    assert fix in caught.value.message


@pytest.mark.parametrize("code", WARNED)
def test_warned(code: str, tmp_path: Path) -> None:
    assert code in WARNED[code](tmp_path)


def test_every_trap_has_its_test() -> None:
    by_guard = {guard: {trap.code for trap in TRAPS if trap.guard == guard} for guard in ("refused", "warned", "safe")}
    assert by_guard["refused"] == set(REFUSED)
    assert by_guard["warned"] == set(WARNED)
    tests = {name.removeprefix("test_safe_").replace("_", "-") for name in globals() if name.startswith("test_safe_")}
    assert by_guard["safe"] == tests
    assert len({trap.code for trap in TRAPS}) == len(TRAPS)


def test_codes_of_the_table_are_those_of_the_code() -> None:
    root = Path(lcplan.__file__).parent
    strings = {
        node.value
        for file in root.rglob("*.py") if file.name != "traps.py"
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }  # fmt: skip
    for trap in TRAPS:
        if trap.guard != "safe" and trap.code != "hidden-cudnn":
            assert trap.code in strings or trap.code.startswith(("cp-", "sp-")), trap.code
    assert any("hidden-cudnn" in text for text in strings)


def test_the_document_is_current(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert table() in FILE.read_text("utf-8")
    monkeypatch.setattr(sys, "argv", ["trap_table.py", "--check"])
    assert main() == 0, "python tools/trap_table.py writes it"
    monkeypatch.setattr("tools.trap_table.FILE", tmp_path / "t.md")
    assert main() == 1
    monkeypatch.setattr(sys, "argv", ["trap_table.py"])
    assert main() == 0
    assert (tmp_path / "t.md").is_file()


# Out of reach


def script(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


@pytest.mark.train
def test_safe_rope_set_late(tmp_path: Path) -> None:
    """The rotary frequencies of a model that the job built are not those of the model without scaling."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 256}
    from lcplan.ledger import RopeParameters

    render_job(small_job(rope=RopeParameters.model_validate(rope)), tmp_path / "scaled")
    render_job(small_job(), tmp_path / "plain")
    code = (
        "import json, torch; from model import build_model, load_config;"
        "job = json.load(open('plan.json')); config = load_config(job);"
        "model = build_model(job, config, torch.device('cpu'), empty=False);"
        "print(json.dumps([model.model.rotary_emb.inv_freq.tolist(), config.max_position_embeddings]))"
    )
    found = {}
    for name in ("scaled", "plain"):
        done = run_python("-c", code, cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr[-800:]
        found[name] = json.loads(done.stdout.splitlines()[-1])
    assert found["scaled"][0] != found["plain"][0]
    assert found["scaled"][1] == 1024


@pytest.mark.train
def test_safe_first_loss() -> None:
    code = (
        "from first_step import first_loss as f;"
        "print([f(loss, pretrained=known, vocab_size=151936).as_planned"
        " for loss, known in ((10.6, True), (4.4, True), (11.9, False), (float('nan'), False))])"
    )
    done = run_python("-c", code, cwd=Path(str(TEMPLATES)))
    assert done.stdout.strip() == "[False, True, True, False]", done.stderr[-500:]


def test_safe_offload_by_version() -> None:
    source = script("arguments.py")
    assert "inspect.signature(enable)" in source
    assert "transformers.__version__ <" not in source


def test_safe_surprise_checkpoint() -> None:
    assert TrainingOptions().save_strategy == "no"
    report = estimate(QWEN, plan_of(QWEN, max_length=4096, num_gpus=8), load_gpu("h200"))
    assert report.disk.checkpoint_bytes == pytest.approx(12 * QWEN.num_parameters, rel=0.01)
    assert accelerate_config(fsdp2_job().plan)["fsdp_config"]["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"


def test_safe_tied_loading() -> None:
    assert accelerate_config(fsdp2_job().plan)["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is True
    empty = script("model.py").partition("def empty_model")[2]
    assert "model.tie_weights()" in empty
    plan = plan_of(tiny_spec(tie_word_embeddings=True), max_length=64, num_gpus=2)
    tied = estimate(tiny_spec(tie_word_embeddings=True), plan, load_gpu("h200")).host.load_bytes_per_node
    assert tied == 4 * tiny_spec(tie_word_embeddings=True).num_parameters, "once a node, tied weights once"


def test_safe_tied_under_fsdp2() -> None:
    pyproject = (Path(ROOT) / "pyproject.toml").read_text("utf-8")
    assert "accelerate>=1.15" in pyproject
    tied, untied = (tiny_spec(tie_word_embeddings=on) for on in (True, False))
    assert untied.num_parameters - tied.num_parameters == 560 * 40


def test_safe_root_unit() -> None:
    """At no instant are the gathered embedding and the gathered head of an untied model reduced as one."""
    spec = tiny_spec()
    report = estimate(spec, plan_of(spec, max_length=64, num_gpus=2), load_gpu("h200"))
    unit = next(item for item in report.items_in("backward[4].mlp") if item.key == "communication.reduce_scatter_input")
    assert unit.num_bytes == 2 * (560 * 40 + 40), "the head and its norm, without the embedding"


def test_safe_pinned_blocks() -> None:
    spec = load_model("Qwen/Qwen3-32B")
    given: dict[str, Any] = {"max_length": 2**20, "num_gpus": 8, "cp_size": 8, "offload_activations": True}
    host = estimate(spec, plan_of(spec, **given), load_gpu("h200")).host
    assert host.pinned_bytes_per_node == 1024 * GIB, "1.25 GiB a layer become 2"


def test_safe_host_states() -> None:
    spec = load_model("Qwen/Qwen2.5-72B")
    given: dict[str, Any] = {"max_length": 4096, "num_gpus": 8, "offload_params": True}
    states = 16 * spec.num_parameters
    report = estimate(spec, plan_of(spec, **given, host_memory_bytes=states), load_gpu("h200"))
    assert report.host.fits is False, "weights, gradients and both moments in float32, rounded up to pinned blocks"
    assert not report.fits


@pytest.mark.train
def test_pinned_memory_that_ran_out_is_named(tmp_path: Path) -> None:
    render_job(small_job(), tmp_path / "job")
    code = (
        "import causes, train; plan = train.JOB['plan'] | {'offload_activations': True};"
        "e = RuntimeError('CUDA error: out of memory'); gib = 2**30;"
        "print(causes.explain(e, plan, causes.Facts(free_gpu_bytes=70 * gib, total_gpu_bytes=80 * gib)));"
        "print(causes.explain(e, plan, causes.Facts(free_gpu_bytes=1 * gib, total_gpu_bytes=80 * gib)))"
    )
    done = run_python("-c", code, cwd=tmp_path / "job")
    lines = done.stdout.splitlines()
    assert "pinned host memory" in lines[-2], done.stderr[-800:]
    assert "pinned" not in lines[-1]


def test_safe_labels_masked(tmp_path: Path) -> None:
    """Rows of joined texts hold input_ids alone, so the trainer labels every token; a share of labels is refused."""
    with pytest.raises(LcplanError) as caught:
        render_job(small_job(plan={"scored_fraction": 0.5}), tmp_path / "job")
    assert caught.value.code == "scored-fraction-joined"
    joined = script("rows.py").partition("def _join(")[2].partition("def _tokens(")[0]
    assert "maker.add(pending[row * length : (row + 1) * length])" in joined


def test_safe_levers_that_exclude() -> None:
    assert conflict(frozenset({"offload-activations", "selective-checkpointing"})) is None
    assert conflict(frozenset({"activation-offloading", "context-parallel", "activation-checkpointing"})) is not None
    assert conflict(frozenset({"offload-activations", "activation-checkpointing", "context-parallel"})) is None


def test_safe_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert launch.job_environment("gpu", offline=True)["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert 'setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")' in script("train.py")


def test_safe_mlp_tiles(tmp_path: Path) -> None:
    assert "distributed" not in script("tiling.py")
    zero = {"backend": "deepspeed", "zero_stage": 3}
    with pytest.raises(LcplanError) as caught:
        render_job(fsdp2_job(mlp_tile_size=64, **zero), tmp_path / "job")
    assert caught.value.code == "tiles-backend"


def test_the_job_asks_for_nothing_of_the_traps() -> None:
    """No Liger kernels, no packing, one checkpointing, rows of exactly one length."""
    source = script("train.py") + script("arguments.py")
    for word in ("use_liger_kernel", "packing=True", "padding_free", "pad_to_multiple_of"):
        assert word not in source
    plan = fsdp2_job(cp_size=2, dp_shard_size=1, max_length=4096).plan
    assert accelerate_config(plan)["fsdp_config"]["fsdp_activation_checkpointing"] is False


def test_the_effective_factor_is_the_one_that_is_printed() -> None:
    """Some releases derive the factor from max_position_embeddings: the job sets both to the same end."""
    for length in (65_536, 2**20):
        rope = resolve_rope(QWEN, length, "auto")
        assert rope is not None
        assert position_limit(QWEN, length, rope) / rope.original_max_position_embeddings == rope.factor


def test_theta_is_read_where_transformers_5_keeps_it() -> None:
    spec = tiny_spec(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 77_000.0})
    assert spec.rope.rope_theta == 77_000.0


def test_lengths_of_texts_beside_the_length_of_a_row() -> None:
    summary = job_data.length_summary([5] * 99 + [1000], max_length=100)
    assert summary == {
        "num_texts": 100, "text_min": 5, "text_median": 5, "text_p99": 5, "text_max": 1000, "num_longer_texts": 1,
    }  # fmt: skip
    made = {"format": "text", "num_rows": 50, "num_tokens": 5000, **summary}
    text = job_data.describe(made, max_length=100, rows_per_step=8)
    assert "50 rows of 100 tokens; 6 steps an epoch of 8 rows (800 tokens)" in text
    assert "the longest 1,000; 1 are longer than a row and are cut" in text
    short = job_data.describe({**made, "num_longer_texts": 0}, max_length=10_000, rows_per_step=1)
    assert "no text is as long as max_length" in short
    none = job_data.describe(
        {"format": "text", "num_rows": 1, **job_data.length_summary([], max_length=8)}, max_length=8, rows_per_step=1
    )
    assert none.endswith("0 texts read whole.")


def test_the_batch_counts_ranks_that_share_a_sequence_once(lcplan: Callable[..., Outcome]) -> None:
    given: dict[str, Any] = {"max_length": 64, "num_gpus": 8, "per_device_train_batch_size": 2}
    assert plan_of(QWEN, **given, cp_size=4, gradient_accumulation_steps=3).sequences_per_step == 2 * 2 * 3
    assert plan_of(QWEN, **given, sp_size=8, backend="deepspeed").sequences_per_step == 2
    assert plan_of(QWEN, **given).tokens_per_step == 2 * 8 * 64
    out = lcplan("estimate", "Qwen/Qwen3-8B", "--max-length", "4096", "--gpu", "h200", "--token-budget", "1M").out
    assert "245 steps" in " ".join(out.split())
