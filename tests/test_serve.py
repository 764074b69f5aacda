"""``lcplan serve``: its API over a real connection, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from lcplan.cli.plan_options import read_job
from lcplan.reports.serve_page import page_files
from lcplan.serving import Planner, PlanServer
from tests.conftest import tiny_spec

GUIDE = {
    "model": "Qwen/Qwen3-8B", "max_length": "1Mi", "gpu": "h100-80gb", "num_gpus": "8", "cp_size": "8",
    "offload_activations": "true",
}  # fmt: skip
FLAGS = ["Qwen/Qwen3-8B", "--max-length", "1Mi", "--gpu", "h100-80gb", "--num-gpus", "8", "--cp-size", "8"]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks one server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def ask(self, fields: dict[str, str], path: str = "/api/estimate") -> Answer:
        return self.get(f"{path}?{urlencode(fields)}")


@pytest.fixture(scope="module")
def server() -> Iterator[PlanServer]:
    job = read_job(None, "qwen3-8b-1m", None, {}, trust_remote_code=False)
    planner = Planner(job.spec)
    with PlanServer(0, planner, page_files(planner.models(), job.spec, job.plan, {})) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def client(server: PlanServer) -> Client:
    return Client(server.server_port)


def test_the_answer_is_the_json_of_estimate(client: Client, lcplan) -> None:
    answer = client.ask(GUIDE)
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json == json.loads(lcplan("estimate", *FLAGS, "--offload-activations", "--json").out)


def test_the_view_is_the_report_and_its_picture(client: Client, lcplan) -> None:
    view = client.ask(GUIDE, "/api/view").json
    assert view["report"] == client.ask(GUIDE).json
    assert view["answer"].startswith("FITS: 55.16 GiB of 79.10 GiB")
    assert view["command"] == (
        "lcplan estimate Qwen/Qwen3-8B --max-length 1048576 --gpu h100-80gb --num-gpus 8 --cp-size 8 "
        "--offload-activations"
    )
    assert [sum(instant["sizes"]) for instant in view["timeline"]["instants"]] == [
        phase["allocated_bytes"] for phase in view["report"]["phases"]
    ]


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"cp_size": "3"}, ["--cp-size", "3"]),
        ({"max_length": "1000001"}, ["--max-length", "1000001"]),
        ({"max_length": "4k5"}, ["--max-length", "4k5"]),
        ({"max_length": "-5"}, ["--max-length", "-5"]),
        ({"max_length": ""}, None),
        ({"gpu": "h100"}, ["--gpu", "h100"]),
        ({"num_gpus": "0"}, ["--num-gpus", "0"]),
        ({"backend": "fsdp"}, ["--backend", "fsdp"]),
        ({"lora_r": "-1"}, ["--lora-r", "-1"]),
        ({"host_memory": "2T"}, ["--host-memory", "2T"]),
        ({"per_device_train_batch_size": "9999999"}, ["--per-device-train-batch-size", "9999999"]),
    ],
)
def test_a_mistake_has_the_message_of_the_command_line(
    client: Client, lcplan, changes: dict[str, str], flags: list[str] | None
) -> None:
    said = lcplan("estimate", *(FLAGS + flags if flags else [FLAGS[0], *FLAGS[3:]])).err.strip()
    for path in ("/api/estimate", "/api/view"):
        answer = client.ask({name: text for name, text in (GUIDE | changes).items() if text != "true"}, path)
        assert answer.status == 400
        error = answer.json["error"]
        assert f"error [{error['code']}]: {error['message']}" == said


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("", "no-model"),
        ("model=/etc/passwd&max_length=4096&gpu=h200", "not-in-catalog"),
        ("model=someone/private&max_length=4096&gpu=h200", "not-in-catalog"),
        ("model=Qwen/Qwen3-8B&max_length=4096&gpu=h200&no_such_field=1", "unknown-field"),
        ("model=Qwen/Qwen3-8B&max_length=4096&gpu=h200&gpu=h200", "bad-query"),
        ("model=Qwen/Qwen3-8B&" + "&".join(f"f{i}=1" for i in range(100)), "bad-query"),
        ("model=Qwen/Qwen3-8B&max_length=4096&gpu=h200&num_gpus=" + "9" * 5000, "bad-value"),
        ("model=Qwen/Qwen3-8B&max_length=4096&gpu=h200&num_gpus=%00", "bad-value"),
    ],
)
def test_what_the_page_cannot_ask_is_refused_as_well(client: Client, query: str, code: str) -> None:
    answer = client.get(f"/api/estimate?{query}")
    assert (answer.status, answer.json["error"]["code"]) == (400, code)


def test_values_are_read_as_flags_are(client: Client) -> None:
    plan = client.ask(GUIDE | {"offload_activations": "false", "host_memory": "2TB", "scored_fraction": "0.5"}).json[
        "plan"
    ]
    assert plan["max_length"] == 2**20
    assert plan["offload_activations"] is False
    assert plan["host_memory_bytes"] == 2 * 10**12
    assert plan["scored_fraction"] == 0.5


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", ""])
def test_a_name_that_was_pointed_at_this_machine_gets_nothing(client: Client, host: str) -> None:
    for path in ("/", "/page.js", f"/api/estimate?{urlencode(GUIDE)}"):
        answer = client.get(path, Host=host)
        assert answer.status == 403
        assert answer.json["error"]["code"] == "foreign-host"


def test_its_own_names_and_only_its_own_pages_are_served(client: Client) -> None:
    own = f"localhost:{client.port}"
    assert client.get("/", Host=own).status == 200
    assert client.get("/", Host=own, Origin=f"http://{own}").status == 200
    assert client.get("/api/view", Host=own, Origin="https://evil.example").status == 403
    assert client.get("/api/view", Host=own, Origin="null").status == 403


def test_nothing_comes_from_elsewhere(client: Client) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        answer = client.get(path)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in answer.headers
        assert b"http://" not in answer.body
        assert b"https://" not in answer.body


def test_other_paths_and_methods(client: Client) -> None:
    for path in ("/nothing", "/../pyproject.toml", "/page.js/", "//evil.example/"):
        assert client.get(path).status == 404
    assert client.get("/", method="POST").status == 501
    head = client.get("/", method="HEAD")
    assert (head.status, head.body) == (200, b"")


def test_a_defect_is_said_and_the_server_lives(client: Client, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("surprise")

    with monkeypatch.context() as patched:
        patched.setattr("lcplan.serving.estimate", broken)
        answer = client.ask(GUIDE)
        assert (answer.status, answer.json["error"]["code"]) == (500, "internal")
        assert "surprise" not in answer.body.decode()
        assert "surprise" in capfd.readouterr().err
    assert client.ask(GUIDE).status == 200


def test_one_connection_takes_many_questions_and_they_are_quick(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
    took = []
    for step in range(20):
        start = time.perf_counter()
        fields = GUIDE | {"max_length": str(2**20 - 16 * step)}
        connection.request("GET", f"/api/estimate?{urlencode(fields)}")
        assert len(connection.getresponse().read()) > 1000
        took.append(time.perf_counter() - start)
    connection.close()
    # without waiting for packets to be acknowledged, which alone would be 40 ms
    assert min(took) < 0.03


def test_the_model_it_was_started_with_can_be_asked_for() -> None:
    planner = Planner(tiny_spec())
    assert planner.models()[0] == "tiny"
    assert planner.estimate({"model": "tiny", "max_length": "512", "gpu": "a10g"}).model.id == "tiny"
    assert planner.estimate({"model": "qwen3-8b", "max_length": "512", "gpu": "a10g"}).model.id == "Qwen/Qwen3-8B"


def test_the_page_starts_with_the_job_that_was_asked_for(lcplan) -> None:
    given = {"lora_r": 16, "lora_dropout": 0.1, "num_gpus": 5, "packing": True, "host_memory_bytes": 10**12}
    base = {"max_length": 4096, "gpu": "h200"}
    job = read_job("Qwen/Qwen3-4B", None, None, given | base, trust_remote_code=False)
    files = page_files(["Qwen/Qwen3-4B"], job.spec, job.plan, given | base)
    text = files["/"][1].decode()
    for control in (
        'name="lora_dropout" value="0.1" readonly',
        'name="packing" value="true" readonly',
        'name="host_memory" value="1000000000000B" readonly',
        'name="num_gpus" min="0" max="0" value="0" data-value="5"',
        'name="lora_r" min="1" step="1" value="16"',
    ):
        assert control in text, control
    settings = json.loads(files["/page.js"][1].decode().partition("const SETTINGS = ")[2].partition(";\n")[0])
    assert 5 in settings["gpus"]


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lcplan", "serve", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )


def test_the_command_serves_until_it_is_interrupted() -> None:
    with start("--port", "0") as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            port = int(said.partition("127.0.0.1:")[2].partition("/")[0])
            assert Client(port).ask(GUIDE).status == 200
            addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)}
            for address in addresses - {"127.0.0.1"}:
                with socket.socket() as other:
                    other.settimeout(2)
                    if not address.startswith("127."):
                        assert other.connect_ex((address, port)) != 0, "only this machine is answered"
            process.send_signal(signal.SIGINT)
            rest, problems = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert (rest, problems) == ("", "")


def test_a_port_in_use_is_one_message(lcplan, server: PlanServer) -> None:
    result = lcplan("serve", "--port", str(server.server_port))
    assert (result.code, result.out) == (2, "")
    assert f"--port {server.server_port} cannot be used" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--port", "70000"], "--port 70000 is no port"),
        (["no-such-model", "--max-length", "4096", "--gpu", "h200"], "no-such-model"),
        (["--preset", "nothing"], "qwen3-8b-1m"),
    ],
)
def test_a_mistake_is_one_message(lcplan, args: list[str], message: str) -> None:
    result = lcplan("serve", *args)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
