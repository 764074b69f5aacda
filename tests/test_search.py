"""The search is exact: legal plans only, the fastest that fits or one as fast with fewer levers.

Held against random goals, and against brute force.
"""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import pytest

from lcplan import GpuSpec, load_gpu, load_model
from lcplan.errors import PlanError
from lcplan.estimation import estimate
from lcplan.estimators import formula, step_time
from lcplan.estimators.coverage import check_covered
from lcplan.estimators.host_need import host_need
from lcplan.levers import BY_ID, LEVERS, OFF, TILE_SIZES, active_levers, conflict, divisors, excluded, spacings
from lcplan.model_spec import ModelSpec
from lcplan.recommendation import AS_FAST, SEARCHED, Goal, Recommendation, recommend
from lcplan.rope import resolve_rope
from lcplan.search import FORWARD_IGNORES, Candidate, Prices, gpu_counts, lattice, ordering_rates
from lcplan.train_plan import TrainPlan, resolve
from lcplan.units import GIB, ceil_div
from tests.conftest import tiny_spec

H100 = load_gpu("h100-80gb")


def fresh_peak(spec: ModelSpec, plan: TrainPlan) -> int:
    """Device peak by the report alone, without anything that the search shares."""
    return estimate(spec, plan, H100).device_peak_bytes


def brute_force(spec: ModelSpec, gpu: GpuSpec, num_gpus: int, length: int) -> list[TrainPlan]:
    """Every combination of field values that a user could type, kept where it is legal, covered and without clash."""
    found = []
    for count in gpu_counts(num_gpus, gpu.gpus_per_node):
        sizes = [
            {"dp_replicate_size": r, "dp_shard_size": count // r // c, "cp_size": c}
            for c in divisors(count) for r in divisors(count // c)
        ]  # fmt: skip
        checkpointing: list[dict[str, Any]] = [
            {"activation_checkpointing": "none"}, {"activation_checkpointing": "selective"},
            *({"activation_checkpointing": "full", "checkpoint_every_n_layers": n}
              for n in range(1, spec.num_hidden_layers + 1)),
        ]  # fmt: skip
        for choice in product(
            sizes, checkpointing, ({}, {"offload_activations": True}, {"activation_offloading": True}),
            ({}, {"offload_prefetch": True}), ({}, {"offload_params": True}), ({}, {"cp_comm_strategy": "alltoall"}),
            ({}, {"cp_head_chunks": spec.num_key_value_heads}), ({}, {"mlp_tile_size": TILE_SIZES[0]}),
            ({}, {"kernels": "liger"}),
        ):  # fmt: skip
            values: dict[str, Any] = {"max_length": length, "gpu": gpu.id, "num_gpus": count, "loss": "chunked"}
            for part in choice:
                values |= part
            try:
                plan, _ = resolve(spec, values, usual_gpus_per_node=gpu.gpus_per_node)
                check_covered(spec, plan)
            except PlanError:
                continue
            if conflict(frozenset(active_levers(spec, plan)) - {"yarn"}) is None and not (
                plan.cp_size == 1 and plan.cp_comm_strategy == "alltoall"
            ):
                found.append(plan)
    return found


def searched(plan: TrainPlan) -> tuple[Any, ...]:
    ignored = {"host_memory_bytes", "rope"}
    return tuple(value for name, value in plan.model_dump().items() if name not in ignored)


@pytest.mark.parametrize(("num_gpus", "length"), [(1, 97), (4, 2**12), (6, 24)])
def test_the_lattice_is_what_a_user_could_type(num_gpus: int, length: int) -> None:
    spec = tiny_spec(num_hidden_layers=3)
    counts = gpu_counts(num_gpus, 8)
    mine = {searched(candidate.plan) for candidate in lattice(spec, H100, counts, length, {}).candidates}
    assert mine == {searched(plan) for plan in brute_force(spec, H100, num_gpus, length)}


def test_numbers_of_gpus_that_are_tried() -> None:
    assert gpu_counts(1, 8) == (1,)
    assert gpu_counts(6, 8) == (1, 2, 3, 4, 5, 6)
    assert gpu_counts(8, 8) == (*range(1, 9),)
    assert gpu_counts(16, 8) == (*range(1, 9), 16)
    assert gpu_counts(40, 8) == (*range(1, 9), 16, 32, 40)


def test_eight_gpus_have_more_than_five_thousand_plans_each_one_once() -> None:
    spec = load_model("Qwen/Qwen3-8B")
    candidates = lattice(spec, H100, gpu_counts(8, 8), 2**20, {}).candidates
    assert len(candidates) >= 5000
    assert len({searched(candidate.plan) for candidate in candidates}) == len(candidates)
    times = [candidate.seconds_per_token for candidate in candidates]
    assert times == sorted(times)


@pytest.mark.parametrize("length", [2**11, 2**16, 2**20])
def test_what_plans_share_changes_no_price(length: int) -> None:
    """Prices of a sample of the lattice, shared, equal those of each plan on its own; so do the bounds."""
    spec = load_model("Qwen/Qwen3-4B")
    candidates = lattice(spec, H100, gpu_counts(8, 8), length, {}).candidates
    prices = Prices(spec, H100, H100.usable_bytes)
    for candidate in random.Random(1).sample(candidates, 60):
        expected = fresh_peak(spec, candidate.plan)
        assert prices.device_peak(candidate.plan) == expected
        assert not prices.exceeds(candidate, expected)
        assert prices.exceeds(candidate, expected - 1)
        assert prices.forward(candidate.plan) <= formula.forward_bytes(spec, candidate.plan)
        if candidate.levers >= {"mlp-tiles", "fused-kernels"} or candidate.plan.activation_offloading:
            assert prices.forward(candidate.plan) == formula.forward_bytes(spec, candidate.plan)


def test_the_forward_phase_depends_on_nothing_that_its_key_leaves_out() -> None:
    spec = load_model("Qwen/Qwen3-4B")
    other = {
        "cp_comm_strategy": "alltoall", "cp_head_chunks": 8, "offload_prefetch": True, "rope": "none",
        "host_memory_bytes": 1, "num_gpus": 64, "gpus_per_node": 4, "dp_replicate_size": 3,
    }  # fmt: skip
    assert set(other) == FORWARD_IGNORES
    for candidate in random.Random(2).sample(lattice(spec, H100, (4,), 2**14, {}).candidates, 50):
        fused = {"adamw_torch": "adamw_torch_fused", "adamw_torch_fused": "adamw_torch"}
        changed = candidate.plan.model_copy(update={**other, "optim": fused[candidate.plan.optim]})
        assert formula.forward_bytes(spec, changed) == formula.forward_bytes(spec, candidate.plan)


def test_an_unfused_optimizer_is_never_smaller_nor_faster() -> None:
    """So the search leaves it alone."""
    spec = load_model("Qwen/Qwen3-4B")
    timer = step_time.StepTimer(spec, H100, ordering_rates(H100))
    for candidate in random.Random(3).sample(lattice(spec, H100, (1, 4), 2**14, {}).candidates, 100):
        unfused = candidate.plan.model_copy(update={"optim": "adamw_torch"})
        assert fresh_peak(spec, unfused) >= fresh_peak(spec, candidate.plan)
        assert timer.seconds(unfused) >= timer.seconds(candidate.plan)
        assert host_need(spec, unfused) == host_need(spec, candidate.plan)


@pytest.mark.parametrize(
    "given",
    [
        {}, {"offload_activations": True}, {"offload_activations": True, "offload_prefetch": True},
        {"activation_offloading": True}, {"mlp_tile_size": 16_384}, {"kernels": "liger"},
        {"num_gpus": 4, "cp_size": 4, "offload_activations": True}, {"num_gpus": 4, "offload_params": True},
    ],
)  # fmt: skip
def test_of_spacings_with_as_many_checkpointed_layers_the_smallest_needs_least(given: dict[str, Any]) -> None:
    """So the search leaves the others alone; where layers differ it tries all."""
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B"):
        spec = load_model(name)
        best: dict[int, tuple[int, float]] = {}
        for n in range(1, spec.num_hidden_layers + 1):
            checkpointing = {"activation_checkpointing": "full", "checkpoint_every_n_layers": n}
            values = {"gpu": H100.id, "max_length": 2**14, **checkpointing, **given}
            plan, _ = resolve(spec, values, usual_gpus_per_node=8)
            timer = step_time.StepTimer(spec, H100, ordering_rates(H100))
            found = fresh_peak(spec, plan), timer.seconds(plan)
            number = ceil_div(spec.num_hidden_layers, n)
            assert n == 1 or (n in spacings(spec)) == (number not in best)
            assert best.setdefault(number, found) <= found
            assert best[number][1] == found[1]
    assert spacings(load_model("openai/gpt-oss-20b")) == tuple(range(2, 25))


@pytest.mark.parametrize(
    ("num_gpus", "fixed", "said"),
    [
        (1, {"lora_r": 8, "packing": True}, "--packing"),
        (8, {"cp_head_chunks": 8, "cp_size": 1}, "--cp-head-chunks 8 is of ring attention, and --cp-size is 1."),
        (8, {"cp_head_chunks": 8, "dp_shard_size": 8}, "--cp-head-chunks 8 is of ring attention"),
        (8, {"offload_prefetch": True, "activation_checkpointing": "selective"}, "--offload-prefetch brings"),
        (8, {"offload_prefetch": True, "backend": "deepspeed"}, "--offload-prefetch"),
        (8, {"lora_r": 16, "checkpoint_every_n_layers": 6}, "--lora-r 16 with --checkpoint-every-n-layers 6"),
        (1, {"offload_params": True}, "--offload-params without --backend fsdp2"),
    ],
)
def test_a_refusal_names_what_was_asked_not_what_the_search_put_in(
    num_gpus: int, fixed: dict[str, Any], said: str
) -> None:
    found = lattice(load_model("Qwen/Qwen3-8B"), H100, gpu_counts(num_gpus, 8), 4096, fixed)
    assert not found.candidates
    assert all(said in refusal.message for refusal in found.refusals)
    assert found.refusals


def test_what_the_table_has_against_a_goal_is_said_where_the_stack_has_nothing() -> None:
    """Accelerate takes the ring's way of exchanging without a ring."""
    for num_gpus, fixed in ((1, {}), (8, {"cp_size": 1})):
        found = lattice(load_model("Qwen/Qwen3-8B"), H100, (num_gpus,), 4096, {"cp_comm_strategy": "alltoall", **fixed})
        assert not found.candidates
        assert [refusal.code for refusal in found.refusals] == ["nothing-legal"]
        assert "alltoall needs context-parallel" in found.refusals[0].message


def test_a_spacing_that_the_search_would_not_try_is_the_user_s_own() -> None:
    """7 checkpoints as many of 36 layers as 6 does."""
    spec = load_model("Qwen/Qwen3-8B")
    assert 7 not in spacings(spec)
    found = {
        n: {
            searched(candidate.plan.model_copy(update={"checkpoint_every_n_layers": 0}))
            for candidate in lattice(spec, H100, (8,), 2**14, {"checkpoint_every_n_layers": n}).candidates
        }
        for n in (6, 7)
    }
    assert found[7] == found[6]
    assert any("checkpoint-every-n-layers" in c.levers for c in lattice(
        spec, H100, (8,), 2**14, {"checkpoint_every_n_layers": 7, "activation_checkpointing": "full"}
    ).candidates)  # fmt: skip


def test_gpus_that_ulysses_leaves_are_split() -> None:
    spec, fixed = load_model("Qwen/Qwen3-8B"), {"backend": "deepspeed", "sp_size": 4}
    plans = [candidate.plan for candidate in lattice(spec, H100, (4, 8), 2**14, fixed).candidates]
    assert {(plan.num_gpus, plan.sp_size, plan.dp_shard_size) for plan in plans} == {(4, 4, 1), (8, 4, 2)}


def test_what_a_lever_sets_is_known_as_searched() -> None:
    """A preset's own value of such a field does not bind the search, and the table of plans has it."""
    settings = [setting for lever in LEVERS for setting in lever.settings(load_model("Qwen/Qwen3-8B"), 8)]
    assert {name for setting in (*settings, *OFF.values()) for name in setting} <= set(SEARCHED)


def test_settings_that_are_called_alike_are_legal_alike() -> None:
    spec = tiny_spec()
    for candidate in lattice(spec, H100, (1, 2, 4), 64, {}).candidates:
        plan, _ = resolve(spec, candidate.plan.model_dump(), usual_gpus_per_node=8)
        check_covered(spec, plan)
        assert plan == candidate.plan


MODELS = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "microsoft/phi-4", "Qwen/Qwen3-30B-A3B",
)  # fmt: skip


def reaches(spec: ModelSpec, length: int) -> bool:
    """Llama 3 scales already, so that lengths beyond its own are refused."""
    try:
        resolve_rope(spec, length, "auto")
    except PlanError:
        return False
    return True


def test_ten_thousand_random_goals() -> None:
    """The first plan that fits is legal, fits by its own report, and no legal plan of the lattice is faster and fits.

    Each goal draws a model, a length, a number of GPUs and the memory they have. So that every plan of every goal can
    be priced by its own report, every n-th layer is left out here; the other tests have it.
    """
    draw = random.Random(20261129)
    fixed = {"checkpoint_every_n_layers": 1, "optim": "adamw_torch_fused"}
    known: dict[tuple[str, int, int], tuple[tuple[Candidate, ...], list[int]]] = {}
    chosen = refused = 0
    for _ in range(10_000):
        name, num_gpus, length = draw.choice(MODELS), draw.choice((1, 2, 4)), 2 ** draw.randrange(10, 21, 2)
        room = draw.randint(4, 140) * GIB
        spec = load_model(name)
        gpu = H100.model_copy(update={"usable_bytes": room})
        if not reaches(spec, length):
            refused += 1
            continue
        key = (name, num_gpus, length)
        if key not in known:
            candidates = lattice(spec, gpu, (num_gpus,), length, fixed).candidates
            for candidate in candidates:
                assert resolve(spec, candidate.plan.model_dump(), usual_gpus_per_node=8)[0] == candidate.plan
            known[key] = candidates, [fresh_peak(spec, candidate.plan) for candidate in candidates]
        candidates, peaks = known[key]
        prices = Prices(spec, gpu, room)
        best = next((candidate for candidate in candidates if prices.fits(candidate)), None)
        by_report = next((c for c, peak in zip(candidates, peaks, strict=True) if peak <= room), None)
        assert best is by_report
        chosen, refused = chosen + (best is not None), refused + (best is None)
    assert chosen > 5000
    assert refused > 500


def test_whole_recommendations_of_random_goals() -> None:
    """The same over the whole lattice and through the front door."""
    draw = random.Random(7)
    for _ in range(25):
        spec, length = load_model(draw.choice(MODELS[:6])), 2 ** draw.randint(12, 20)
        if not reaches(spec, length):
            continue
        gpu = H100.model_copy(update={"usable_bytes": draw.randint(16, 140) * GIB})
        answer = recommend(spec, Goal(max_length=length, gpu=gpu.id, num_gpus=draw.choice((1, 4))), gpu)
        if answer.plans:
            best = answer.plans[0]
            assert best.report.fits
            assert best.report.headroom_bytes >= answer.headroom_bytes
            faster = [p for p in answer.pareto if p.relative_time * (1 + AS_FAST) < chosen_time(answer) and p.fits]
            assert faster == []
        else:
            assert answer.nearest is not None
            assert answer.nearest.report.headroom_bytes < answer.headroom_bytes
            assert answer.changes


def chosen_time(answer: Recommendation) -> float:
    return next(point.relative_time for point in answer.pareto if point.chosen)


@pytest.mark.parametrize("seed", range(6))
def test_brute_force_finds_no_faster_plan(seed: int) -> None:
    draw = random.Random(seed)
    spec = tiny_spec(num_hidden_layers=3, hidden_size=512, intermediate_size=2048, vocab_size=32_000)
    num_gpus, length = draw.choice((1, 2, 4)), 2 ** draw.randint(10, 12)
    plans = brute_force(spec, H100, num_gpus, length)
    timer = step_time.StepTimer(spec, H100.model_copy(), rates := timed_for(spec))
    gpu = H100.model_copy(update={"kernel_rates": rates})
    peaks = sorted(fresh_peak(spec, plan) for plan in plans)
    room = peaks[draw.randrange(len(peaks) // 3)]
    gpu = gpu.model_copy(update={"usable_bytes": room})
    answer = recommend(spec, Goal(max_length=length, gpu=gpu.id, num_gpus=num_gpus, headroom_bytes=0), gpu)
    best = answer.plans[0]
    assert answer.searched == len(plans)
    assert best.report.device_peak_bytes <= room
    fitting = [plan for plan in plans if fresh_peak(spec, plan) <= room]
    times = [timer.seconds(plan) / plan.tokens_per_step for plan in fitting]
    as_fast = [plan for plan, time in zip(fitting, times, strict=True) if time <= min(times) * (1 + AS_FAST)]
    least = min((num_levers(spec, plan), fresh_peak(spec, plan)) for plan in as_fast)
    assert (num_levers(spec, best.plan), best.report.device_peak_bytes) == least


def num_levers(spec: ModelSpec, plan: TrainPlan) -> int:
    return sum(not BY_ID[id].is_default for id in active_levers(spec, plan))


def timed_for(spec: ModelSpec) -> Any:
    rates = ordering_rates(H100)
    d = spec.head_dim
    return rates.model_copy(update={"attention_forward_flops": {d: 3e14}, "attention_backward_flops": {d: 3e14}})


def test_the_table_of_levers_says_what_the_stack_refuses() -> None:
    """Pairs that the table excludes are refused or not covered; pairs that it allows have a legal plan."""
    spec = tiny_spec(num_attention_heads=8, num_key_value_heads=4)
    ways: dict[str, dict[str, Any]] = {
        lever.id: settings[0] for lever in LEVERS if (settings := lever.settings(spec, 4))
    } | {
        "replicas": {"dp_replicate_size": 2, "dp_shard_size": 2},
        "context-parallel": {"cp_size": 4},
        "sequence-parallel": {"sp_size": 4, "backend": "deepspeed"},
        "zero": {"backend": "deepspeed", "num_gpus": 4},
        "offload-optimizer": {"offload_optimizer": True},
        "kept-gathered": {"reshard_after_forward": False},
        "ddp": {"backend": "ddp", "num_gpus": 4},
        "unfused-optimizer": {"optim": "adamw_torch"},
        "smaller-states": {"optim": "sgd"},
        "frozen-tables": {"freeze_embeddings": True},
        "lora": {"lora_r": 8},
        "packing": {"packing": True},
    }  # fmt: skip
    for a, b in combinations(ways, 2):
        if BY_ID[a].dimension == BY_ID[b].dimension:
            continue
        both = frozenset({a, b})
        needed = {extra for id in both for extra in BY_ID[id].requires[:1]}
        values = {k: v for id in (*needed, a, b) for k, v in ways[id].items()}
        gpus = 4 if both & {"data-parallel", "replicas", "context-parallel", "sequence-parallel"} or needed & {
            "data-parallel"
        } else 1  # fmt: skip
        try:
            plan, _ = resolve(spec, {"max_length": 64, "gpu": "h200", "num_gpus": gpus} | values, usual_gpus_per_node=8)
            check_covered(spec, plan)
        except PlanError:
            legal = False
        else:
            legal = True
        if b in excluded(BY_ID[a]):
            assert not legal, (a, b)


def test_the_table_is_closed() -> None:
    ids = set(BY_ID)
    assert len(ids) == len(LEVERS)
    for lever in LEVERS:
        assert set(lever.excludes) <= ids
        assert set(lever.requires) <= ids
        assert lever.summary
        assert lever.costs
        assert bool(lever.not_searched) == (not lever.settings(tiny_spec(), 4)), "searched, or not and why"
        assert all(field in TrainPlan.model_fields for field in lever.changes.split(", "))
    assert set(OFF) <= {lever.dimension for lever in LEVERS}
    assert conflict(frozenset({"packing", "context-parallel"})) is not None
    assert conflict(frozenset({"nf4"})) == "nf4 needs lora"
