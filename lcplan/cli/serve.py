"""``lcplan serve``: the plan's controls as a web page of this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lcplan.cli.plan_options import (
    ConfigOption,
    ModelArgument,
    PresetOption,
    TrustOption,
    read_job,
    with_plan_flags,
)
from lcplan.errors import InputError

DEFAULT_PORT = 8765
FIRST_PRESET = "qwen3-8b-1m"
"""What the page shows where no job is named."""


@with_plan_flags
def command(
    given: dict[str, Any],
    model: ModelArgument = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes any that is free.")] = DEFAULT_PORT,
    trust_remote_code: TrustOption = False,
) -> None:
    """A web page for this machine alone that estimates while you move its controls. Ctrl-C ends it.

    Example: lcplan serve --preset qwen3-8b-1m
    """
    from lcplan.reports.serve_page import page_files
    from lcplan.serving import Planner, PlanServer

    if not 0 <= port <= 65535:
        raise InputError("bad-port", f"--port {port} is no port. Give one of 1024 to 65535, or 0 for any that is free.")
    if model is None and preset is None and not config:
        preset = FIRST_PRESET
    job = read_job(model, preset, config, given, trust_remote_code=trust_remote_code)
    planner = Planner(job.spec)
    asked = (dict(job.preset.plan) if job.preset else {}) | given
    with PlanServer(port, planner, page_files(planner.models(), job.spec, job.plan, asked)) as server:
        print(f"lcplan serves {server.url} to this machine; Ctrl-C ends it.", flush=True)  # noqa: T201
        server.serve_forever()
