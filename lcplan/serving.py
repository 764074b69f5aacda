"""A local web page with the plan's controls, and the JSON API behind it; for this machine alone.

``GET /api/estimate?model=...&max_length=1Mi&...`` answers with the MemoryReport of ``lcplan estimate --json``; names
are plan fields, values are written as on the command line. ``GET /api/view`` adds what the page draws. The server
listens on 127.0.0.1, answers only requests addressed to it by that name (a page of another site could otherwise reach
it through a name of its own), reads no file and asks no network for a request: models are those of the catalog and the
one it was started with.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from lcplan import catalog
from lcplan._record import Record
from lcplan.errors import EnvironmentProblem, InputError, LcplanError, ModelError
from lcplan.estimation import estimate
from lcplan.hardware import load_gpu
from lcplan.ledger import MemoryReport
from lcplan.model_loading import load_model
from lcplan.model_spec import ModelSpec
from lcplan.pictures import Timeline, timeline
from lcplan.reproduction import command_line, plan_flags
from lcplan.train_plan import TrainPlan, resolve
from lcplan.units import parse_bytes, parse_count

ADDRESS = "127.0.0.1"
MAX_FIELDS = 64
IDLE_S = 30
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class View(Record):
    """What the page shows of one plan."""

    report: MemoryReport
    answer: str
    time: str
    command: str
    """The same plan on the command line."""
    timeline: Timeline


class Problem(Record):
    """An answer that is an error: the command line's code and message."""

    code: str
    message: str


class Planner:
    """Estimates plans that are asked for by text."""

    def __init__(self, started_with: ModelSpec | None = None) -> None:
        """``started_with`` is a model beside those of the catalog."""
        self._specs = {} if started_with is None else {started_with.id.casefold(): started_with}

    def models(self) -> list[str]:
        """Ids that can be asked for, those not of the catalog first."""
        known = catalog.model_ids()
        return [spec.id for spec in self._specs.values() if spec.id not in known] + known

    def estimate(self, fields: Mapping[str, str]) -> MemoryReport:
        """The report of a plan.

        Raises:
            LcplanError: as the command line would.
        """
        return self._planned(fields)[2]

    def view(self, fields: Mapping[str, str]) -> View:
        """The report and what the page draws beside it.

        Raises:
            LcplanError: as the command line would.
        """
        from lcplan.reports.terminal import answer, time_line

        spec, plan, report = self._planned(fields)
        flags = plan_flags(spec, plan, load_gpu(plan.gpu))
        return View(
            report=report,
            answer=answer(report, "GiB"),
            time=time_line(report),
            command=command_line("estimate", [spec.id, *flags]),
            timeline=timeline(report),
        )

    def _planned(self, fields: Mapping[str, str]) -> tuple[ModelSpec, TrainPlan, MemoryReport]:
        values = {name: _value(name, text) for name, text in fields.items() if text and name != "model"}
        if "host_memory" in values:
            values["host_memory_bytes"] = values.pop("host_memory")
        spec = self._spec(fields.get("model", ""))
        found = load_gpu(str(values["gpu"])) if "gpu" in values else None
        plan, assumptions = resolve(spec, values, usual_gpus_per_node=found.gpus_per_node if found else 1)
        return spec, plan, estimate(spec, plan, load_gpu(plan.gpu), assumptions=assumptions)

    def _spec(self, name: str) -> ModelSpec:
        known = name.casefold()
        if known not in self._specs:
            if not name:
                raise InputError("no-model", "No model is named. Add model=Qwen/Qwen3-8B (`lcplan list models`).")
            if known not in catalog.model_names():
                raise ModelError(
                    "not-in-catalog",
                    f"Model {name!r:.200} is not in the catalog, and this page asks for no other. Start it with that "
                    "model: lcplan serve MODEL.",
                )
            self._specs[known] = load_model(catalog.model_names()[known][0])
        return self._specs[known]


def _value(name: str, text: str) -> Any:
    """A field's value from its text, as a flag reads it; what is no number is left to the plan to refuse."""
    if name == "max_length":
        return parse_count(text)
    if name == "host_memory":
        return parse_bytes(text)
    try:
        return int(text)
    except ValueError:
        return text


class PlanServer(ThreadingHTTPServer):
    """Listens on the loopback address; one thread a connection."""

    daemon_threads = True

    def __init__(self, port: int, planner: Planner, page: Mapping[str, tuple[str, bytes]]) -> None:
        """Bind ``port``, 0 for any free one; ``page`` maps paths to content types and contents.

        Raises:
            EnvironmentProblem: when the port is taken or not allowed.
        """
        self.planner, self.page = planner, page
        try:
            super().__init__((ADDRESS, port), Handler)
        except OSError as error:
            raise EnvironmentProblem(
                "port-not-free",
                f"--port {port} cannot be used ({error.strerror}). Give another one, or --port 0 for any that is free.",
            ) from None

    def server_bind(self) -> None:
        """Bind without asking the network what this machine's name is."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def names(self) -> tuple[str, str]:
        """What a request may call this server."""
        return f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """Say nothing of a browser that went away."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server_version = "lcplan"
    sys_version = ""
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer with the page or a plan."""
        server = cast("PlanServer", self.server)
        if self.headers.get("Host") not in server.names or not self._is_own_page(server):
            self._problem(HTTPStatus.FORBIDDEN, Problem(code="foreign-host", message=f"Open {server.url} instead."))
            return
        url = urlsplit(self.path)
        if url.path in server.page:
            self._send(HTTPStatus.OK, *server.page[url.path])
        elif url.path == "/api/estimate":
            self._answer(server.planner.estimate, url.query)
        elif url.path == "/api/view":
            self._answer(server.planner.view, url.query)
        else:
            self._problem(HTTPStatus.NOT_FOUND, Problem(code="no-such-path", message=f"Open {server.url} instead."))

    do_HEAD = do_GET  # noqa: N815

    def _is_own_page(self, server: PlanServer) -> bool:
        origin = self.headers.get("Origin")
        return origin is None or origin in {f"http://{name}" for name in server.names}

    def _answer(self, make: Any, query: str) -> None:
        try:
            record: Record = make(_fields(query))
        except LcplanError as error:
            self._problem(HTTPStatus.BAD_REQUEST, Problem(code=error.code, message=error.message))
        except Exception:
            traceback.print_exc()
            message = "This is a defect in lcplan; please report it with the lines in its terminal."
            self._problem(HTTPStatus.INTERNAL_SERVER_ERROR, Problem(code="internal", message=message))
        else:
            self._send(HTTPStatus.OK, "application/json", record.model_dump_json().encode())

    def _problem(self, status: HTTPStatus, problem: Problem) -> None:
        self._send(status, "application/json", json.dumps({"error": problem.model_dump()}).encode())

    def _send(self, status: HTTPStatus, content_type: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (*HEADERS.items(), ("Content-Type", content_type), ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the terminal quiet."""


def _fields(query: str) -> dict[str, str]:
    """Names and texts of a query; each once.

    Raises:
        InputError: for a name that comes twice, and for too many.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InputError(
            "bad-query", f"The query has more than {MAX_FIELDS} fields. Name each plan field once."
        ) from None
    names = [name for name, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError("bad-query", f"{repeated[0]!r:.60} comes twice in the query. Name each plan field once.")
    return dict(pairs)
