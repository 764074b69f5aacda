from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from lcplan.errors import PlanError
from lcplan.hardware import GpuSpec, load_gpu
from lcplan.ledger import instant_words
from lcplan.levers import LEVERS
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from lcplan.presets import load_preset
from lcplan.recommendation import AS_FAST, Goal, Recommendation, compare_gpus, recommend
from lcplan.units import GIB
from tests.conftest import tiny_spec

H100 = load_gpu("h100-80gb")


def small_gpu(usable: int) -> GpuSpec:
    return H100.model_copy(update={"usable_bytes": usable})


def ask(spec: ModelSpec, gpu: GpuSpec, **goal: Any) -> Recommendation:
    return recommend(spec, Goal(gpu=gpu.id, **goal), gpu)


PLAIN = {"mlp_tile_size": 2**30, "kernels": "none", "offload_prefetch": False, "cp_head_chunks": 1}
"""The guide's stack has no tiled MLPs (one tile has all tokens), no kernels of other packages, and offloads and attends
as the libraries do."""
GUIDE = {**PLAIN, "host_memory_bytes": 512 * GIB}


@pytest.fixture(scope="module")
def guide() -> Recommendation:
    """A node with room for the layer inputs, and not for attention outputs as well."""
    return ask(load_model("Qwen/Qwen3-8B"), H100, max_length=2**20, num_gpus=8, fixed=GUIDE)


def test_tiles_reach_further() -> None:
    spec = load_model("Qwen/Qwen3-4B")
    best = ask(spec, H100).plans[0]
    assert "mlp-tiles" in best.levers
    assert best.plan.max_length > 1.5 * ask(spec, H100, fixed=PLAIN).plans[0].plan.max_length


def test_a_plan_that_is_hardly_faster_is_not_worth_more_levers_or_less_room() -> None:
    """Two groups of four GPUs with a sequence each are 0.4% faster, with twice the host memory."""
    spec = load_model("Qwen/Qwen3-8B")
    answer = ask(spec, H100, max_length=2**20, num_gpus=8)
    best = answer.plans[0]
    assert (best.plan.cp_size, best.plan.dp_shard_size) == (8, 1)
    faster = [
        p
        for p in answer.pareto
        if p.fits and not p.chosen and p.step_time_s is not None and p.relative_time < chosen(answer)
    ]
    assert all(p.relative_time > chosen(answer) / (1 + AS_FAST) for p in faster)


def chosen(answer: Recommendation) -> float:
    return next(point.relative_time for point in answer.pareto if point.chosen)


def test_attention_is_kept_where_the_host_has_room_for_it(guide: Recommendation) -> None:
    spec = load_model("Qwen/Qwen3-8B")
    best = ask(spec, H100, max_length=2**20, num_gpus=8, fixed={**PLAIN, "host_memory_bytes": 1024 * GIB}).plans[0]
    assert best.levers == ("chunked-loss", "yarn", "selective-checkpointing", "offload-activations", "context-parallel")
    assert best.report.peak_allocated_bytes == guide.plans[0].report.peak_allocated_bytes
    assert best.report.host.pinned_bytes_per_node == 8 * 36 * (2 * 2**30 + 2**24)
    assert best.report.step_time_s is not None
    assert guide.plans[0].report.step_time_s is not None
    assert best.report.step_time_s < 0.8 * guide.plans[0].report.step_time_s


def test_the_guides_plan(guide: Recommendation) -> None:
    best = guide.plans[0]
    assert best.levers == (
        "chunked-loss", "yarn", "activation-checkpointing", "offload-activations", "context-parallel",
    )  # fmt: skip
    assert best.plan.cp_size == 8
    assert best.plan.offload_activations
    assert best.report.rope is not None
    assert best.report.rope.factor == 32
    assert best.report.fits
    assert len(best.why) == len(best.levers)
    for lever, reason in zip(best.levers, best.why, strict=True):
        assert reason.startswith(f"{lever}: ")
    assert guide.searched > 1000


def test_the_waterfall_ends_at_the_chosen_plan(guide: Recommendation) -> None:
    best = guide.plans[0]
    peaks = [step.device_peak_bytes for step in best.steps]
    assert peaks == sorted(peaks, reverse=True), "no lever of the table raises the peak"
    assert peaks[-1] == best.report.device_peak_bytes
    assert not best.steps[-2].fits
    assert best.steps[-1].fits
    assert best.steps[-1].step_time_s == pytest.approx(best.report.step_time_s)


def test_every_lever_is_pulled_or_left_out_with_a_reason(guide: Recommendation) -> None:
    best = guide.plans[0]
    rest = {row.lever: row.why for row in best.left_out}
    assert {*best.levers, *rest} == {lever.id for lever in LEVERS}
    assert "does not fit" in rest["checkpoint-every-n-layers"]
    assert "faster, but does not fit: 161.93 GiB" in rest["selective-checkpointing"], "host memory, with offload"
    assert "slower: not needed" in rest["offload-params"]
    assert "not searched" in rest["lora"]
    why = dict(zip(best.levers, best.why, strict=True))
    assert "saves 34.04 GiB (without it 89.20 GiB, which does not fit)" in why["offload-activations"]
    assert "288.00 GiB of pinned host memory" in why["offload-activations"]
    assert "32,768" in why["yarn"]
    assert "40,960" in why["yarn"]
    assert "trim, never pad" in why["context-parallel"]


def test_what_binds(guide: Recommendation) -> None:
    assert guide.binding == "mlp.saved (12.00 GiB) in backward[0].mlp on h100-80gb"


def test_memory_against_time(guide: Recommendation) -> None:
    points = guide.pareto
    assert sum(point.chosen for point in points) == 1
    times = [point.relative_time for point in points]
    peaks = [point.device_peak_bytes for point in points]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)
    assert times[0] == 1
    chosen = next(point for point in points if point.chosen)
    assert chosen.device_peak_bytes == guide.plans[0].report.device_peak_bytes


@pytest.mark.parametrize(
    "goal",
    [
        ["Qwen/Qwen3-4B", "--longest", "--gpu", "h100-80gb", "--kernels", "none", "--mlp-tile-size", "1048576"],
        ["Qwen/Qwen3-0.6B", "--max-length", "8192", "--gpu", "h200", "--mlp-tile-size", "16384"],
    ],
)
def test_one_tile_with_all_tokens_is_no_tile(lcplan, goal: list[str]) -> None:
    answer = lcplan("recommend", *goal)
    assert answer.code == 0
    assert "left out: mlp-tiles" in answer.out
    assert "MLP in tiles" not in " ".join(answer.out.split())
    points = json.loads(lcplan("recommend", *goal, "--json").out)["pareto"]
    assert {point["plan"]["mlp_tile_size"] for point in points} == {None}


def test_tiles_that_run_are_named(lcplan) -> None:
    answer = lcplan(
        "recommend", "Qwen/Qwen3-0.6B", "--max-length", "32768", "--gpu", "h200", "--mlp-tile-size", "16384"
    )
    assert "MLP in tiles" in " ".join(answer.out.split())


def test_kernels_of_another_package_are_chosen_where_they_win() -> None:
    """They save more than 1% of the time, at 32k tokens as at 1M beside kept attention."""
    spec = load_model("Qwen/Qwen3-8B")
    best, without = (
        ask(spec, H100, max_length=2**15, num_gpus=8, fixed=fixed).plans[0] for fixed in ({}, {"kernels": "none"})
    )
    why = dict(zip(best.levers, best.why, strict=True))
    assert "pip install 'lcplan[liger]'" in why["fused-kernels"]
    assert without.plan.kernels == "none"
    assert best.report.tokens_per_second is not None
    assert without.report.tokens_per_second is not None
    assert best.report.tokens_per_second > (1 + AS_FAST) * without.report.tokens_per_second
    long = ask(spec, H100, max_length=2**20, num_gpus=8).plans[0]
    assert {"fused-kernels", "selective-checkpointing", "offload-activations"} <= set(long.levers)


def test_a_family_without_such_kernels_has_none() -> None:
    shallow = load_model("Qwen/Qwen3-30B-A3B").config | {"num_hidden_layers": 4}
    best = ask(ModelSpec.from_config(shallow, "shallow"), H100, max_length=4096).plans[0]
    rest = {row.lever: row.why for row in best.left_out}
    assert rest["fused-kernels"] == rest["mlp-tiles"] == "not for shallow"
    assert rest["data-parallel"] == "there is one GPU"


FULL = {"activation_checkpointing": "full"}


def test_headroom_is_asked_for_and_kept() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    tight = ask(spec, H100, max_length=2**20, num_gpus=8, headroom_bytes=0, fixed={**PLAIN, **FULL}).plans[0]
    assert (tight.plan.offload_activations, tight.plan.offload_params) == (True, False), (
        "offload_params is 0.6% faster with as many levers, and leaves 2 GiB free"
    )
    assert tight.report.headroom_bytes < 30 * GIB
    roomy = ask(spec, H100, max_length=2**20, num_gpus=8, headroom_bytes=30 * GIB, fixed={**PLAIN, **FULL}).plans[0]
    assert roomy.report.headroom_bytes >= 30 * GIB


def test_nothing_is_pulled_that_is_not_needed() -> None:
    answer = ask(load_model("Qwen/Qwen3-0.6B"), load_gpu("h200"), max_length=1024, fixed={"kernels": "none"})
    assert answer.plans[0].levers == ("chunked-loss",)
    assert answer.plans[0].plan.activation_checkpointing == "none"


def test_what_the_user_fixed_stays() -> None:
    goal = Goal(max_length=1024, gpu="h200", fixed={"activation_checkpointing": "full", "optim": "adamw_torch"})
    plan = recommend(load_model("Qwen/Qwen3-0.6B"), goal, load_gpu("h200")).plans[0].plan
    assert (plan.activation_checkpointing, plan.optim) == ("full", "adamw_torch")
    goal = Goal(max_length=2**16, gpu="h200", num_gpus=8, fixed={"cp_size": 2})
    assert recommend(load_model("Qwen/Qwen3-4B"), goal, load_gpu("h200")).plans[0].plan.cp_size == 2


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_longest_length_fits_and_one_more_multiple_does_not(num_gpus: int) -> None:
    spec = load_model("Qwen/Qwen3-4B")
    plan = ask(spec, H100, num_gpus=num_gpus).plans[0].plan
    multiple = plan.length_multiple
    assert plan.max_length % multiple == 0
    beyond = ask(spec, H100, max_length=plan.max_length + multiple, num_gpus=num_gpus, headroom_bytes=0)
    assert beyond.plans == ()


def test_the_guides_ladder_on_one_card() -> None:
    """Full logits, chunked, with offload, for Qwen3-4B on 80 GB; the guide says 32k, 128k to 160k and 256k.

    Row m016 measured 90.7 GB for the plain 32k, rows m005 and m006 160k; docs/recommend.md says where it differs.
    """
    spec = load_model("Qwen/Qwen3-4B")
    kept = {
        "activation_checkpointing": "full", "checkpoint_every_n_layers": 1, "activation_offloading": False,
        "offload_activations": False, **PLAIN,
    }  # fmt: skip
    lengths = [
        ask(spec, H100, fixed=kept | change).plans[0].plan.max_length
        for change in ({"loss": "full"}, {}, {"offload_activations": True})
    ]
    assert lengths == pytest.approx([28_027, 140_358, 227_885], rel=0.005)
    further = [ask(spec, H100, fixed=fixed).plans[0].plan.max_length for fixed in ({"kernels": "none"}, {})]
    assert further == pytest.approx([351_339, 486_997], rel=0.005), "and its MLPs in tiles, and Liger's kernels"


def test_a_scaling_model_goes_no_further_than_it_reaches() -> None:
    answer = ask(load_model("meta-llama/Llama-3.2-1B"), load_gpu("h200"))
    assert answer.plans[0].plan.max_length == 131072


def test_nothing_fits_and_what_would() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    answer = ask(spec, H100, max_length=2**20, num_gpus=2, fixed=PLAIN)
    assert answer.plans == ()
    assert answer.nearest is not None
    assert not answer.nearest.report.fits
    assert answer.nearest.report.dominant.key in answer.binding
    miss, *changes = answer.changes
    assert "GiB short in the backward of the MLP of the last layer" in miss
    more = next(int(change.split()[0]) for change in changes if "more h100-80gb" in change)
    assert ask(spec, H100, max_length=2**20, num_gpus=2 + more, fixed=PLAIN).plans
    assert not ask(spec, H100, max_length=2**20, num_gpus=1 + more, fixed=PLAIN).plans
    length = next(int(change.split()[1].replace(",", "")) for change in changes if change.startswith("max_length"))
    assert ask(spec, H100, max_length=length, num_gpus=2).plans
    assert any(change.startswith("2 x ") for change in changes)


def test_a_miss_by_the_headroom_alone_says_so() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    answer = ask(spec, H100, max_length=2**20, num_gpus=4, headroom_bytes=4 * GIB, fixed=PLAIN)
    assert answer.plans == ()
    assert answer.nearest is not None
    assert answer.nearest.report.fits
    unasked = ask(spec, H100, max_length=2**20, num_gpus=4, fixed=PLAIN)
    assert unasked.headroom_bytes == 0, "5% are a wish only"
    assert unasked.plans[0].report.fits
    assert answer.changes[1].startswith("a headroom of 3.7")


def test_of_plans_for_trl_s_own_files_the_fastest_with_or_without_kept_attention() -> None:
    """What they cannot say is attention on the host; kept on the GPU it can be faster than full checkpointing."""
    spec = load_model("Qwen/Qwen3-4B")
    goal = {"max_length": 786_432, "num_gpus": 8}
    ours, theirs, full = (
        ask(spec, H100, **goal, **more).plans[0]
        for more in (
            {"fixed": PLAIN},
            {"fixed": PLAIN, "writable": True},
            {"fixed": PLAIN | {"activation_checkpointing": "full"}},
        )
    )
    assert ours.plan.keeps_attention_on_host
    assert (theirs.plan.activation_checkpointing, theirs.plan.offload_activations) == ("selective", False)
    times = [ranked.report.step_time_s or 0.0 for ranked in (theirs, full)]
    assert times[0] < 0.8 * times[1]


def test_host_memory_that_ends_the_longest_length_is_what_binds() -> None:
    spec = load_model("Qwen/Qwen3-0.6B")
    fixed = {"offload_activations": True, "rope": "none"}
    small, large = (ask(spec, H100, fixed=fixed | {"host_memory_bytes": size * GIB}) for size in (16, 4096))
    assert small.binding.startswith("host memory: ")
    assert not large.binding.startswith("host memory: ")
    lengths = [answer.plans[0].plan.max_length for answer in (small, large)]
    assert lengths[0] < lengths[1]


def test_more_gpus_are_not_the_advice_where_the_formulas_do_not_cover_them() -> None:
    h200 = load_gpu("h200")
    with pytest.raises(PlanError, match=r"on 1 x h200 at any length\. Use a larger GPU, .* More of them: qwen3_moe"):
        ask(load_model("Qwen/Qwen3-30B-A3B"), h200, num_gpus=8)
    with pytest.raises(PlanError, match=r"on 1 x h100-80gb at any length\. Use more GPUs, a larger one"):
        ask(load_model("Qwen/Qwen3-32B"), H100, num_gpus=1)


def test_fewest_gpus() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    answer = ask(spec, H100, max_length=2**19, num_gpus=8, min_gpus=True)
    few = answer.plans[0].plan.num_gpus
    assert few < 8
    assert ask(spec, H100, max_length=2**19, num_gpus=few - 1, headroom_bytes=0).plans == ()


def test_a_length_that_eight_gpus_cannot_cut_takes_fewer() -> None:
    plan = ask(load_model("Qwen/Qwen3-8B"), H100, max_length=786_444, num_gpus=8, fixed=PLAIN).plans[0].plan
    assert plan.max_length % (2 * plan.cp_size) == 0
    assert plan.cp_size == plan.num_gpus == 6


def test_idle_gpus_are_explained(guide: Recommendation) -> None:
    assert guide.fewer_gpus is None
    uneven = ask(load_model("Qwen/Qwen3-8B"), H100, max_length=786_444, num_gpus=8, fixed=PLAIN)
    assert uneven.fewer_gpus == "6 of 8 GPUs: no plan on all of them is as good"
    shallow = load_model("Qwen/Qwen3-30B-A3B").config | {"num_hidden_layers": 4}
    experts = ask(ModelSpec.from_config(shallow, "shallow"), H100, max_length=4096, num_gpus=8)
    assert str(experts.fewer_gpus).startswith("1 of 8 GPUs: qwen3_moe with --")


def test_smallest() -> None:
    spec = load_model("Qwen/Qwen3-4B")
    fast, small = (ask(spec, H100, max_length=2**16, num_gpus=4, objective=o) for o in ("fastest", "smallest"))
    best = small.plans[0].report
    assert best.device_peak_bytes == min(point.device_peak_bytes for point in small.pareto)
    assert best.device_peak_bytes < fast.plans[0].report.device_peak_bytes
    assert (best.step_time_s or 0) > 0


def test_host_memory_is_a_limit() -> None:
    spec, short = load_model("Qwen/Qwen3-8B"), {"host_memory_bytes": 90 * GIB}
    assert ask(spec, H100, max_length=2**20, num_gpus=8, fixed={**PLAIN, **short}).plans == ()
    assert "fused-kernels" in ask(spec, H100, max_length=2**20, num_gpus=8, fixed=short).plans[0].levers
    usual = ask(load_model("Qwen/Qwen3-8B"), H100, max_length=2**20, num_gpus=8).plans[0]
    assert usual.report.host.fits is True
    assert any("the usual node of this GPU" in text for text in usual.report.assumptions)


def test_disk_is_a_limit() -> None:
    answer = ask(load_model("Qwen/Qwen3-8B"), H100, max_length=2**16, num_gpus=8, disk_bytes=GIB)
    assert answer.plans == ()
    assert "disk" in answer.changes[0]


def test_gpus_are_compared_by_price_where_there_is_one() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    prices = {"h100-80gb": 2.0, "h200": 9.0, "a100-80gb": None}
    answers = [ask(spec, load_gpu(id), max_length=2**17, num_gpus=8, price_per_hour=p) for id, p in prices.items()]
    both = compare_gpus(answers)
    assert [ranked.plan.gpu for ranked in both.plans] == ["h100-80gb", "h200", "a100-80gb"]
    first = both.plans[0]
    assert first.cost is not None
    assert first.report.step_time_s is not None
    assert first.cost.per_step == pytest.approx(first.report.step_time_s / 3600 * 2.0 * first.plan.num_gpus)
    assert both.searched == sum(answer.searched for answer in answers)
    fastest = compare_gpus([ask(spec, load_gpu(id), max_length=2**17, num_gpus=8) for id in prices])
    assert fastest.plans[0].plan.gpu == "h200"


def test_gpus_on_which_nothing_fits_are_no_answer() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    answers = [ask(spec, load_gpu(id), max_length=2**21, num_gpus=8) for id in ("rtx-4090", "h200")]
    assert [ranked.plan.gpu for ranked in compare_gpus(answers).plans] == ["h200"]
    assert compare_gpus(answers[:1]).plans == ()


def test_an_untimed_gpu_has_an_order_and_no_times() -> None:
    answer = ask(load_model("Qwen/Qwen3-4B"), load_gpu("a100-80gb"), max_length=2**16, num_gpus=2)
    best = answer.plans[0]
    assert best.report.step_time_s is None
    assert all(point.step_time_s is None for point in answer.pareto)
    assert all(step.step_time_s is None for step in best.steps)
    assert "order of the plans alone" in answer.order


def test_several_nodes() -> None:
    answer = ask(load_model("Qwen/Qwen3-8B"), H100, max_length=2**21, num_gpus=16, fixed=PLAIN)
    plan = answer.plans[0].plan
    assert (plan.num_gpus, plan.gpus_per_node, plan.cp_size) == (16, 8, 16)


@pytest.mark.parametrize(
    "goal",
    [
        "Qwen/Qwen3-4B --max-length 65536 --gpu h100-80gb --num-gpus 4",
        "Qwen/Qwen3-4B --max-length 262144 --gpu h100-80gb --num-gpus 8 --headroom 0B",
        "Qwen/Qwen3-8B --max-length 8192 --gpu a100-40gb --num-gpus 4 --freeze-embeddings --freeze-head",
        "Qwen/Qwen3-8B --max-length 16384 --gpu h100-80gb --num-gpus 2 --backend deepspeed --offload-optimizer",
        "meta-llama/Llama-3.1-8B --max-length 131072 --gpu h100-80gb --num-gpus 4 --backend deepspeed --sp-size 4 "
        "--cp-size 1 --dp-shard-size 1",
        "Qwen/Qwen3-8B --max-length 8192 --gpu h200 --num-gpus 2 --no-reshard-after-forward",
        "Qwen/Qwen3-8B --max-length 8192 --gpu h200 --num-gpus 2 --cp-size 1 --per-device-eval-batch-size 2",
        "Qwen/Qwen3-8B --max-length 8192 --gpu h200 --lora-r 8 --lora-dropout 0.1",
        "Qwen/Qwen3-0.6B --max-length 8192 --gpu h200 --mlp-tile-size 16384 --scored-fraction 0.3 --host-memory 300GB",
    ],
)
def test_the_printed_command_gives_the_same_report(lcplan, goal: str) -> None:
    answer = json.loads(lcplan("recommend", *goal.split(), "--json").out)["plans"][0]
    shown = lcplan("recommend", *goal.split()).out
    command = shlex.split(shown[shown.index("\nlcplan estimate") :].replace("\\\n", " "))
    assert command == shlex.split(answer["command"])
    again = json.loads(lcplan(*command[1:], "--json").out)
    for name in ("plan", "device_peak_bytes", "fits", "host", "step_time_s"):
        assert again[name] == answer["report"][name], name


def test_a_goal_without_a_legal_plan_says_why() -> None:
    goal = Goal(max_length=2**20 + 1, gpu="h200", num_gpus=4, fixed={"cp_size": 4})
    with pytest.raises(PlanError, match="multiple of 8"):
        recommend(load_model("Qwen/Qwen3-8B"), goal, load_gpu("h200"))
    goal = Goal(max_length=1024, gpu="h200", num_gpus=2, fixed={"cp_size": 2})
    with pytest.raises(PlanError, match="qwen3_moe with --cp-size 2"):
        recommend(load_model("Qwen/Qwen3-30B-A3B"), goal, load_gpu("h200"))


def test_longest_where_nothing_fits() -> None:
    with pytest.raises(PlanError, match="No combination"):
        ask(tiny_spec(), small_gpu(1000))


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("backward[0].mlp", "the backward of the MLP of the first layer"),
        ("backward[35].attention", "the backward of the attention of the last layer"),
        ("backward[3].expert_gradients", "the backward of the expert gradients of layer 3"),
        ("backward.embedding", "the backward of the embedding"),
        ("loss", "the backward of the loss"),
        ("optimizer_step", "the optimizer step"),
        ("forward", "the forward"),
    ],
)
def test_instants_in_words(phase: str, words: str) -> None:
    assert instant_words(phase, 36) == words


def test_a_prefetch_that_was_asked_for_is_a_lever_like_the_others() -> None:
    """It is the offload of the plan: neither the naive plan nor one without offload has it."""
    answer = ask(load_model("Qwen/Qwen3-4B"), H100, max_length=2**17, fixed={**PLAIN, "offload_prefetch": True})
    best = answer.plans[0]
    assert best.plan.offload_prefetch
    assert [step.lever for step in best.steps][-2:] == ["activation-checkpointing", "offload-prefetch"]
    why = dict(zip(best.levers, best.why, strict=True))
    for lever in ("activation-checkpointing", "offload-prefetch"):
        assert "cannot be left out" not in why[lever]
    assert "pinned host memory" in why["offload-prefetch"]


def test_the_levers_of_long_sequences_are_chosen_where_they_are_needed() -> None:
    """Parts of the heads where ring attention is the peak, prefetch where pinned blocks would overflow the host."""
    spec = load_model("Qwen/Qwen3-8B")
    four_million = ask(spec, H100, max_length=2**22, num_gpus=8).plans[0]
    preset = load_preset("qwen3-8b-4m")
    given = {name: getattr(four_million.plan, name) for name in preset.plan}
    assert given == preset.plan
    usual = ask(spec, H100, num_gpus=8, fixed={"offload_prefetch": False}).plans[0]
    longest = ask(spec, H100, num_gpus=8).plans[0]
    assert "offload-prefetch" in longest.levers
    assert longest.plan.max_length > 1.2 * usual.plan.max_length > 1.2 * 2**22
