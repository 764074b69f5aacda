"""Shell completion: what each shell is offered, and that the scripts work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lcplan.cli.completion import items
from tests.jobs import ROOT

RUN = [sys.executable, "-m", "lcplan"]


def run(*words: str, home: Path | None = None, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": ROOT, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **environment}
    if home is not None:
        env["HOME"] = str(home)
    done = subprocess.run([*RUN, *words], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


def offered(shell: str, line: str) -> str:
    """What the completion script of a shell is told at the end of ``line``."""
    words = line.split(" ")
    asks = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    return run(**asks[shell], _LCPLAN_COMPLETE=f"complete_{shell}")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_offered_ids(shell: str) -> None:
    found = offered(shell, "lcplan estimate Qwen/Qwen3-0")
    assert "Qwen/Qwen3-0.6B" in found
    assert "Llama" not in found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lcplan ", ["estimate", "recommend", "run", "check", "list"]),
        ("lcplan estimate qwen3-8", ["qwen3-8B"]),
        ("lcplan recommend --gpu h", ["h100-80gb", "h200"]),
        ("lcplan run --preset smo", ["smoke"]),
        ("lcplan estimate --explain mlp.sa", ["mlp.saved"]),
        ("lcplan estimate --attn-implementation fl", ["flash_attention_2"]),
        ("lcplan check --method ", ["formula", "trace"]),
        ("lcplan list ", ["models", "gpus", "presets", "levers"]),
        ("lcplan recommend --objective s", ["smallest"]),
        ("lcplan estimate --offload-act", ["--offload-activations"]),
    ],
)
def test_what_is_completed(line: str, expected: list[str]) -> None:
    found = offered("bash", line).split()
    assert set(expected) <= set(found)
    if not line.endswith(" "):
        last = line.rpartition(" ")[2]
        assert all(word.startswith(last) for word in found)


def test_items_are_those_that_reports_have(lcplan) -> None:
    import json

    report = json.loads(lcplan("estimate", "--preset", "qwen3-8b-1m", "--json").out)
    assert {item["key"] for item in report["items"]} <= set(items(""))


def test_completing_imports_nothing_heavy() -> None:
    script = (
        "import sys; from lcplan.cli.main import main\n"
        "try: main([])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ask = {"COMP_WORDS": "lcplan estimate --explain m", "COMP_CWORD": "3", "_LCPLAN_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ROOT, **ask}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "mlp.saved" in done.stdout


COMPLETE = {
    "bash": "COMP_WORDS=(lcplan estimate --preset smo); COMP_CWORD=3; _lcplan_completion lcplan; echo $COMPREPLY",
    "fish": "complete -C 'lcplan estimate --preset smo'",
    "zsh": "words=(lcplan estimate --preset smo); CURRENT=4; _lcplan_completion",
}
"""What a shell does at TAB, asked for without one."""
BEFORE = {"zsh": "compdef() { : }; _arguments() { print -r -- $@ }\n"}
"""zsh's own completion system shows what it is given; here it is printed."""


@pytest.mark.parametrize("shell", COMPLETE)
def test_the_script_completes_in_the_shell_itself(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "lcplan"
    command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m lcplan \"$@\"\n")
    command.chmod(0o755)
    script = BEFORE.get(shell, "") + run("--show-completion", shell) + "\n" + COMPLETE[shell]
    env = {**os.environ, "PYTHONPATH": ROOT, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run([shell, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert re.sub(r"[^a-z0-9-]", "", done.stdout) == "smoke"


@pytest.mark.parametrize(
    ("shell", "where"),
    [
        ("bash", ".bash_completions/lcplan.sh"),
        ("zsh", ".zfunc/_lcplan"),
        ("fish", ".config/fish/completions/lcplan.fish"),
    ],
)
def test_install_writes_the_shell_s_file(tmp_path: Path, shell: str, where: str) -> None:
    assert "installed" in run("--install-completion", shell, home=tmp_path)
    assert "_LCPLAN_COMPLETE" in (tmp_path / where).read_text()
    assert "_LCPLAN_COMPLETE" in run("--show-completion", shell)
