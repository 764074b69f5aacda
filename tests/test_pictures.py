"""What the pictures show: their data, and the same data drawn in a terminal and into files."""

from __future__ import annotations

import io
import itertools
import json
import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from lcplan import pictures
from lcplan.checking import check_rows, load_rows
from lcplan.cli.plan_options import Job, read_job
from lcplan.errors import EnvironmentProblem, InputError, PlanError
from lcplan.estimation import estimate
from lcplan.explanation import lever_table, waterfall
from lcplan.hardware import load_gpu
from lcplan.levers import LEVERS, active_levers
from lcplan.model_loading import load_model
from lcplan.recommendation import Goal, recommend
from lcplan.reports import plots
from lcplan.reports.text_pictures import print_picture
from lcplan.search import Prices
from tests.conftest import plan_of, tiny_spec

KINDS = ("timeline", "length", "waterfall", "pareto", "accuracy")


def job_of(**given: Any) -> Job:
    model, preset = given.pop("model", None), given.pop("preset", None)
    return read_job(model, preset, None, given, trust_remote_code=False)


GUIDE = job_of(preset="qwen3-8b-1m")


@pytest.fixture(scope="module")
def drawn() -> dict[str, pictures.Picture]:
    goal = Goal(max_length=2**20, gpu="h100-80gb", num_gpus=8)
    return {
        "timeline": pictures.timeline(estimate(GUIDE.spec, GUIDE.plan, GUIDE.gpu)),
        "length": pictures.length_curves(GUIDE.spec, GUIDE.plan, GUIDE.gpu),
        "waterfall": pictures.waterfall_steps(GUIDE.spec, GUIDE.plan, GUIDE.gpu),
        "pareto": pictures.pareto_points(recommend(GUIDE.spec, goal, GUIDE.gpu)),
        "accuracy": pictures.accuracy(check_rows(load_rows()[:40], tolerance=0.01)),
    }


@pytest.mark.parametrize(
    "job",
    [
        {"preset": "qwen3-8b-1m"},
        {"preset": "qwen3-4b-128k"},
        {"model": "Qwen/Qwen3-30B-A3B", "max_length": 8192, "gpu": "h200"},
        {"model": "openai/gpt-oss-20b", "max_length": 8192, "gpu": "h200"},
        {"model": "Qwen/Qwen3-4B", "max_length": 8192, "gpu": "h200", "per_device_eval_batch_size": 1},
        {"model": "Qwen/Qwen3-4B", "max_length": 32768, "gpu": "h200", "num_gpus": 4, "backend": "deepspeed"},
    ],
    ids=str,
)
def test_the_bars_add_up_to_the_phases(job: dict[str, Any]) -> None:
    found = job_of(**job)
    report = estimate(found.spec, found.plan, found.gpu)
    picture = pictures.timeline(report)
    assert [instant.phase for instant in picture.instants] == [phase.phase for phase in report.phases]
    assert [sum(instant.sizes) for instant in picture.instants] == [phase.allocated_bytes for phase in report.phases]
    peak = sum(picture.instants[picture.peak].sizes)
    assert peak == report.peak_allocated_bytes
    assert peak + picture.on_top_bytes == report.device_peak_bytes
    gaps = [instant.phase for instant in picture.instants if instant.after_others]
    assert gaps, "the layers between the ends"
    assert all(phase.startswith("backward[") for phase in gaps)


def test_where_each_set_of_levers_leaves_the_card(drawn: dict[str, pictures.Picture]) -> None:
    picture = drawn["length"]
    assert isinstance(picture, pictures.LengthPicture)
    prices = Prices(GUIDE.spec, GUIDE.gpu, GUIDE.gpu.usable_bytes)
    last = picture.curves[-1]
    assert last.lever == "context-parallel"
    assert last.longest is not None
    assert last.longest % 16 == 0
    for length, fits in ((last.longest, True), (last.longest + 16, False)):
        plan = GUIDE.plan.model_copy(update={"max_length": length})
        assert (prices.device_peak(plan) <= GUIDE.gpu.usable_bytes) == fits
    longest = [curve.longest for curve in picture.curves]
    assert None not in longest
    assert longest == sorted(longest), "each lever reaches further"
    for curve in picture.curves:
        assert [size for _, size in curve.points] == sorted(size for _, size in curve.points)


def test_a_card_that_is_too_small_for_the_states_fits_no_length() -> None:
    spec = load_model("Qwen/Qwen3-32B")
    picture = pictures.length_curves(spec, plan_of(spec, max_length=8192, gpu="a10g"), load_gpu("a10g"))
    assert all(curve.longest is None and not curve.always_fits for curve in picture.curves)
    plots.render(picture, "png")


def test_a_plan_that_always_fits_says_so() -> None:
    spec = tiny_spec()
    huge = load_gpu("h200").model_copy(update={"usable_bytes": 10**15})
    picture = pictures.length_curves(spec, plan_of(spec, max_length=4096), huge)
    assert all(curve.always_fits for curve in picture.curves)
    out = Console(file=io.StringIO(), width=60, color_system=None)
    print_picture(picture, console=out)
    assert "over 1,073,741,824" in out.file.getvalue()


def test_ulysses_is_a_step_of_the_waterfall_with_the_same_gpus() -> None:
    job = job_of(model="Qwen/Qwen3-8B", max_length=65536, gpu="h100-80gb", num_gpus=8, backend="deepspeed", sp_size=8)
    steps = waterfall(job.spec, job.plan, Prices(job.spec, job.gpu, job.gpu.usable_bytes))
    # the formulas cover no ZeRO without checkpointing, so there is no naive row to guess at
    assert [step.lever for step in steps] == ["chunked-loss, yarn, activation-checkpointing", "sequence-parallel"]
    before = job.plan.model_copy(update={"sp_size": 1, "dp_shard_size": 8})
    assert steps[0].device_peak_bytes == estimate(job.spec, before, job.gpu).device_peak_bytes
    assert steps[1].device_peak_bytes == estimate(job.spec, job.plan, job.gpu).device_peak_bytes
    assert steps[1].device_peak_bytes < steps[0].device_peak_bytes


def test_a_waterfall_has_no_row_that_changes_nothing() -> None:
    job = job_of(model="Qwen/Qwen3-4B", max_length=65536, gpu="h200", num_gpus=2)
    steps = waterfall(job.spec, job.plan, Prices(job.spec, job.gpu, job.gpu.usable_bytes))
    assert [step.lever for step in steps] == ["naive", "chunked-loss", "yarn", "activation-checkpointing"]
    assert steps[0].change == "full logits, everything saved; with data-parallel"


def test_no_picture_of_a_plan_that_is_not_covered() -> None:
    spec = tiny_spec()
    plan = plan_of(spec, max_length=4096, mlp_tile_size=512, dtype="float32")
    for make in (pictures.waterfall_steps, pictures.length_curves):
        with pytest.raises(PlanError, match="mlp-tile-size"):
            make(spec, plan, load_gpu("h200"))


FLIPS = [
    ({"num_gpus": 8, "cp_size": 8}, {"context-parallel": {"cp_size": 1, "dp_shard_size": 8}}),
    ({"lora_r": 16}, {"lora": {"lora_r": None}, "offload-activations": {"offload_activations": True}}),
    (
        {"num_gpus": 4, "backend": "deepspeed", "sp_size": 4, "offload_optimizer": True},
        {
            "sequence-parallel": {"sp_size": 1, "dp_shard_size": 4},
            "offload-optimizer": {"offload_optimizer": False},
            "offload-params": {"offload_params": True},
        },
    ),
    ({"num_gpus": 2, "reshard_after_forward": False}, {"kept-gathered": {"reshard_after_forward": True}}),
]


@pytest.mark.parametrize(("given", "flips"), FLIPS)
def test_the_lever_table_prices_the_plan_with_a_lever_flipped(
    given: dict[str, Any], flips: dict[str, dict[str, Any]]
) -> None:
    job = job_of(model="Qwen/Qwen3-4B", max_length=65536, gpu="h200", **given)
    table = {row.lever: row for row in lever_table(job.spec, job.plan, Prices(job.spec, job.gpu, job.gpu.usable_bytes))}
    assert set(table) == {lever.id for lever in LEVERS}
    assert {id for id, row in table.items() if row.pulled} == set(active_levers(job.spec, job.plan))
    for id, update in flips.items():
        plan = job.plan.model_copy(update=update)
        assert table[id].flipped_peak_bytes == estimate(job.spec, plan, job.gpu).device_peak_bytes, id
    for row in table.values():
        assert row.note
        assert (row.flipped_fits is None) == (row.flipped_peak_bytes is None)
    if "cp_size" not in given:
        assert table["alltoall"].note == "alltoall needs context-parallel"


def test_accuracy_is_measured_over_predicted() -> None:
    rows = load_rows()[:3]
    picture = pictures.accuracy(check_rows(rows, tolerance=0.01))
    assert [row.id for row in picture.rows] == [row.id for row in rows]
    assert all(abs(row.ratio - 1) < 0.01 for row in picture.rows)
    refused = [row.model_copy(update={"plan": row.plan | {"no_such_lever": 1}}) for row in rows]
    with pytest.raises(InputError, match="None of these rows"):
        pictures.accuracy(check_rows(refused, tolerance=0.01))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_terminal_picture_is_no_wider_than_its_terminal(
    drawn: dict[str, pictures.Picture], kind: str, width: int
) -> None:
    out = Console(file=io.StringIO(), width=width, color_system=None)
    print_picture(drawn[kind], console=out)
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in out.file.getvalue()


def test_the_terminal_timeline_reads_without_colour(drawn: dict[str, pictures.Picture]) -> None:
    out = Console(file=io.StringIO(), width=100, color_system=None)
    print_picture(drawn["timeline"], console=out)
    text = out.file.getvalue()
    peak = next(line for line in text.splitlines() if "peak" in line and "layer 0: MLP" in line)
    # of 79.1 GiB: 5.3 weights, 7.6 optimizer states, 18 MLP, then what lies outside tensors, then the card's limit
    for letter, share in (("W", 5.33 / 79.1), ("O", 7.63 / 79.1), ("M", 18 / 79.1)):
        bar = peak[len("layer 35: attention") : peak.index("|")]
        assert abs(peak.count(letter) - share * len(bar)) <= 2
    assert peak.index("/") < peak.index("|")
    assert "M MLP intermediates: 18.00 GiB at the peak" in text
    assert "| h100-80gb: 79.10 GiB usable" in text


LABELS = {
    "timeline": ("MLP intermediates 18.0", "optimizer step", "h100-80gb: 79.10 GiB usable", "loss head 12.0", "36.0"),
    "length": ("+ context-parallel: up to 1,753,056 tokens", "max_length, tokens of one sequence (log scale)"),
    "waterfall": ("+ offload-activations", "55.16 GiB  fits", "h100-80gb: 79.10 GiB usable"),
    "pareto": ("chosen: 8 GPUs: cp 8", "time a token, over the fastest plan"),
    "accuracy": ("measured over predicted, difference from 1 in %", "measured peak allocated, GiB (log scale)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_svg_says_in_words_what_it_shows(drawn: dict[str, pictures.Picture], kind: str) -> None:
    content = plots.render(drawn[kind], "svg")
    assert content == plots.render(drawn[kind], "svg"), "the same bytes each time"
    root = ET.fromstring(content)
    texts = [
        "".join(element.itertext()) for element in root.iter() if element.tag == "{http://www.w3.org/2000/svg}text"
    ]
    for label in (drawn[kind].title, *LABELS[kind]):
        assert any(label in text for text in texts), (label, texts)
    assert b"<dc:date>" not in content


@pytest.mark.parametrize("kind", KINDS)
def test_a_png_opens(drawn: dict[str, pictures.Picture], kind: str) -> None:
    from PIL import Image

    content = plots.render(drawn[kind], "png", units="GB")
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        assert image.size == (width, height)
        assert len(set(image.convert("L").tobytes())) > 20, "something is drawn"


def test_neighbours_in_the_stack_differ_in_grey_or_hatch() -> None:
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    order = [group for group in pictures.STACK if group in plots.STYLE]
    for lower, upper in itertools.pairwise(order):
        (one, hatch), (other, other_hatch) = plots.STYLE[lower], plots.STYLE[upper]
        assert abs(grey(one) - grey(other)) > 25 or hatch != other_hatch, (lower, upper)


def test_no_part_of_a_name_is_drawn_as_a_formula() -> None:
    name = "a$x_1$<b>&\u6a21\u578b"
    spec = tiny_spec().model_copy(update={"id": name})
    picture = pictures.timeline(estimate(spec, plan_of(spec, max_length=4096), load_gpu("h200")))
    text = plots.inline_svg(picture)
    root = ET.fromstring(text)
    assert any(name in "".join(element.itertext()) for element in root.iter())
    assert "<b>" not in text


@pytest.mark.parametrize(
    "job",
    [
        {"model": "Qwen/Qwen3-4B", "max_length": 65536, "gpu": "h200", "lora_r": 16},
        {"model": "Qwen/Qwen3-0.6B", "max_length": 2048, "gpu": "h200"},
        {"preset": "qwen3-8b-1m"},
    ],
    ids=str,
)
def test_the_numbers_along_an_axis_are_plain_and_apart(job: dict[str, Any]) -> None:
    found = job_of(**job)
    for picture in (
        pictures.waterfall_steps(found.spec, found.plan, found.gpu),
        pictures.length_curves(found.spec, found.plan, found.gpu),
    ):
        figure = plots.draw(picture)
        figure.canvas.draw()
        for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
            labels = [label for label in axis.get_ticklabels(which="both") if label.get_text()]
            assert len(labels) >= 1
            assert not any("$" in label.get_text() for label in labels)
            boxes = [label.get_window_extent() for label in labels]
            for one, other in itertools.combinations(boxes, 2):
                assert not one.overlaps(other), (picture.kind, [label.get_text() for label in labels])


def test_without_matplotlib_the_extra_is_named(
    drawn: dict[str, pictures.Picture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentProblem, match=r"lcplan\[plots\]"):
        plots.draw(drawn["timeline"])


@pytest.mark.parametrize("kind", KINDS)
def test_plot_prints_draws_and_gives_its_data(lcplan, tmp_path: Path, kind: str) -> None:
    job = [] if kind == "accuracy" else ["--preset", "qwen3-4b-128k"]
    printed = lcplan("plot", kind, *job)
    assert printed.code == 0
    assert "|" in printed.out or "#" in printed.out
    assert json.loads(lcplan("plot", kind, *job, "--json").out)["kind"] == kind
    file = tmp_path / "picture.svg"
    result = lcplan("plot", kind, *job, "--output", str(file))
    assert (result.code, result.out) == (0, "")
    assert str(file) in result.err.replace("\n", "")
    assert file.read_bytes().startswith(b"<?xml")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.svg"]


def test_a_file_is_not_overwritten_unless_asked(lcplan, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_text("mine")
    command = ("plot", "waterfall", "--preset", "qwen3-4b-128k", "-o", str(file))
    result = lcplan(*command)
    assert result.code == 2
    assert "--force" in result.err
    assert file.read_text() == "mine"
    assert lcplan(*command, "--force").code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing", "--preset", "qwen3-4b-128k"], "timeline, length, waterfall, pareto, accuracy"),
        (["timeline"], "No model is named"),
        (["timeline", "--preset", "qwen3-4b-128k", "-o", "x.pdf"], ".svg or .png"),
        (["timeline", "--preset", "qwen3-4b-128k", "-o", "."], ".svg or .png"),
        (["timeline", "--preset", "qwen3-4b-128k", "-o", "no/such/folder/x.svg"], "cannot be written"),
        (["timeline", "--preset", "qwen3-4b-128k", "-o", "x.svg", "--json"], "Give one of them"),
        (["accuracy", "--preset", "qwen3-4b-128k"], "takes no model or plan"),
        (["accuracy", "--max-length", "4096"], "takes no model or plan"),
    ],
)
def test_a_mistake_is_one_message(lcplan, args: list[str], message: str) -> None:
    result = lcplan("plot", *args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
