"""README.md and docs/: every command runs, what is shown is what is printed, and what is generated is current.

A ``console`` block shows commands behind ``$`` and what they print; a line ``...`` stands for any lines. A ``bash``
block has commands alone, a ``python`` block code, and a ``text`` block behind that is what it prints. A block that
cannot run here says why in a comment before it: ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from lcplan.cli.main import COMMANDS
from lcplan.errors import LcplanError
from tests.conftest import Outcome
from tools import error_codes, pages, pictures

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"(?:<!-- (?P<marker>[^>]*) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
REASON = re.compile(r"not run: \S.{9,}", re.DOTALL)
NO = ("DOES NOT FIT", "NOTHING FITS", "DRIFT")
"""What a command whose exit code is 1 has said."""
Cli = Callable[..., Outcome]


class Block(NamedTuple):
    """One fenced block."""

    kind: str
    text: str
    marker: str | None
    line: int

    @property
    def runs(self) -> bool:
        """Whether it is to be run: a marker without a reason does not count."""
        return self.marker is None or REASON.fullmatch(self.marker) is None


def blocks_of(text: str) -> list[Block]:
    return [
        Block(match["kind"], match["text"], match["marker"], text.count("\n", 0, match.start()) + 1)
        for match in BLOCK.finditer(text)
    ]


def commands_of(text: str) -> list[str]:
    """The commands of a bash block, with continued lines joined."""
    joined = text.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def shown_of(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it is shown to print."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert parts[0] == "", "a console block begins with a command"
    pairs = []
    for part in parts[1:]:
        match = re.match(r"((?:.*\\\n)*.*)\n", part)
        assert match is not None
        pairs.append((match[1].replace("\\\n", " "), part[match.end() :]))
    return pairs


def pattern_of(shown: str) -> re.Pattern[str]:
    """``...`` alone on a line is any number of lines."""
    lines = [r"(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()) + r"\n" for line in shown.splitlines()]
    return re.compile("".join(lines))


def run(lcplan: Cli, command: str) -> str:
    """What one command prints; one of lcplan's runs in this process, one of make's is asked what it would do."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        if shutil.which("make") is None:
            pytest.skip("needs make")
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    assert words[0] == "lcplan", f"{command}: run it, or say why not"
    result = lcplan(*words[1:])
    assert result.code in (0, 1), result.err
    assert result.code == 0 or "--explain" in words or any(text in result.out for text in NO), result.out
    return "\n".join(line.rstrip() for line in result.out.splitlines()) + "\n" if result.out else ""


def documents(*kinds: str) -> list[Path]:
    return [path for path in DOCUMENTS if any(block.kind in kinds for block in blocks_of(path.read_text("utf-8")))]


@pytest.fixture
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("path", documents("console", "bash"), ids=lambda path: path.name)
def test_every_command_runs_and_prints_what_is_shown(lcplan: Cli, path: Path) -> None:
    """In the order of the document, so that a command finds the files that an earlier one wrote."""
    for block in blocks_of(path.read_text("utf-8")):
        if block.kind == "console" and block.runs:
            for command, shown in shown_of(block.text):
                printed = run(lcplan, command)
                assert pattern_of(shown).fullmatch(printed), f"{path.name}:{block.line} {command}\n{printed}"
        elif block.kind == "bash" and block.runs:
            for command in commands_of(block.text):
                run(lcplan, command)


@pytest.mark.usefixtures("_in_a_folder")
@pytest.mark.parametrize("path", documents("python"), ids=lambda path: path.name)
def test_python_runs_and_prints_what_is_shown(path: Path) -> None:
    found = blocks_of(path.read_text("utf-8"))
    for block, following in zip(found, [*found[1:], Block("", "", None, 0)], strict=True):
        if block.kind == "python" and block.runs:
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(block.text, f"{path.name}:{block.line}", "exec"), {})
            if following.kind == "text":
                assert printed.getvalue() == following.text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_block_is_of_a_kind_that_is_checked(path: Path) -> None:
    for block in blocks_of(path.read_text("utf-8")):
        assert block.kind in ("console", "bash", "python", "text", "yaml", "json"), f"{path.name}:{block.line}"
        if block.marker is not None and block.marker.startswith("not run"):
            assert not block.runs, f"{path.name}:{block.line} says no reason"
        if block.kind in ("text", "yaml", "json"):
            assert "$ lcplan" not in block.text, f"{path.name}:{block.line} shows a command: make it a console block"
    assert path.read_text("utf-8").count("```") == 2 * len(blocks_of(path.read_text("utf-8")))


def test_the_checks_themselves(lcplan: Cli) -> None:
    """A wrong number, a failing command and a marker without a reason are found."""
    (console,) = blocks_of("```console\n$ lcplan list \\\n    presets\npreset ...\n...\nsmoke is it\n```\n")
    ((command, shown),) = shown_of(console.text)
    assert command.split() == ["lcplan", "list", "presets"]
    assert not pattern_of(shown).fullmatch(run(lcplan, command))
    assert pattern_of("...\n").fullmatch(run(lcplan, command))
    assert pattern_of("a\n...\nd\n").fullmatch("a\nb\nc\nd\n")
    assert not pattern_of("a\nd\n").fullmatch("a\nb\nd\n")
    with pytest.raises(AssertionError, match="unknown-preset"):
        run(lcplan, "lcplan estimate --preset nothing")
    with pytest.raises(AssertionError, match="say why not"):
        run(lcplan, "pip install lcplan")
    assert blocks_of("<!-- not run: -->\n```bash\nx\n```\n")[0].runs
    assert not blocks_of("<!-- not run: needs a GPU for hours -->\n```bash\nx\n```\n")[0].runs


# README.md


def figures_with_commands() -> list[tuple[str, str]]:
    """lcplan's numbers in the table of README.md, each with its command."""
    found = []
    command = ""
    for line in (ROOT / "README.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and (cells[3].startswith("`lcplan ") or cells[3] == "the same"):
            command = command if cells[3] == "the same" else cells[3].strip("`")
            found.append((cells[2], command))
    return found


def test_each_number_of_the_readme_is_printed_by_its_command(lcplan: Cli) -> None:
    found = figures_with_commands()
    assert len(found) == 7
    printed = {command: run(lcplan, command) for command in {command for _, command in found}}
    for number, command in found:
        assert re.search(rf"(?<![\d.,]){re.escape(number)}\b", printed[command]), (number, command)


def test_what_the_readme_says_of_other_tools_is_printed_as_well(lcplan: Cli) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    rules = run(lcplan, "lcplan estimate --preset qwen3-8b-1m --compare-rules")
    for rule in ("training using Adam: 4 x model size", "full, bf16 or fp16: 18 GB per billion"):
        size = re.search(rf"{re.escape(rule)} +([\d.]+ GiB)", rules)
        assert size is not None
        assert f"| {size[1]} | 55.16 GiB |" in text
    times = run(lcplan, "lcplan check --time")
    for seconds in ("380", "1,295"):
        assert f"{seconds}.00 s" in times
        assert f"| {seconds} s |" in text


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 85


# Generated pages and pictures


def test_generated_pages_are_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check"])
    assert pages.main() == 0, f"make pages writes them: {capsys.readouterr().out}"


def test_a_stale_page_is_found_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("<!-- figures: x -->\nold\n<!-- end -->\nrest\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", {"a.md": lambda: "new\n"})
    monkeypatch.setattr(pages, "SECTIONS", {"figures": lambda: "of today\n"})
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check"])
    assert pages.main() == 1
    monkeypatch.setattr(sys, "argv", ["pages.py"])
    assert pages.main() == 0
    assert (tmp_path / "docs" / "a.md").read_text() == "new\n"
    assert (tmp_path / "README.md").read_text() == "<!-- figures: x -->\nof today\n<!-- end -->\nrest\n"
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check"])
    assert pages.main() == 0


def test_every_code_that_can_be_printed_has_its_place(lcplan: Cli) -> None:
    from tests.test_cli import MISTAKES

    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    documented = set(re.findall(r"^### ([a-z0-9-]+)$", text, flags=re.MULTILINE))
    for arguments, _ in MISTAKES:
        code = re.search(r"error \[([a-z0-9-]+)\]", lcplan(*arguments).err)
        assert code is not None
        assert code[1] in documented
    quoted = set()
    for file in error_codes.PACKAGE.rglob("*.py"):
        source = file.read_text("utf-8")
        quoted |= set(
            re.findall(r'(?:Error|Problem|refuse|warn|error|_wrong)\(\s*"([a-z0-9]+(?:-[a-z0-9]+)+)",', source)
        )
    assert quoted <= documented
    assert all(issubclass(getattr(sys.modules["lcplan.errors"], name), LcplanError) for name in error_codes.ERRORS)


def test_every_command_and_plan_flag_is_in_the_reference() -> None:
    from lcplan.train_plan import TrainPlan

    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    for name in COMMANDS:
        assert f"## lcplan {name}\n" in text
    for field in TrainPlan.model_fields:
        flag = "--host-memory" if field == "host_memory_bytes" else f"--{field.replace('_', '-')}"
        assert f"`{flag}`" in text


def words_of(svg: str) -> list[str]:
    """Every text that says something; bare numbers are mostly those of an axis."""
    return sorted(text for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg) if re.search("[A-Za-z]", text))


def test_the_pictures_are_those_of_today(tmp_path: Path) -> None:
    """Their words and numbers; where they stand depends on matplotlib's release."""
    pytest.importorskip("matplotlib")
    pictures.draw(tmp_path)
    there = {path.name for path in pictures.FOLDER.iterdir()}
    assert there == set(pictures.COMMANDS)
    for name in there:
        committed, drawn = (words_of((folder / name).read_text("utf-8")) for folder in (pictures.FOLDER, tmp_path))
        assert len(drawn) > 5
        assert committed == drawn, f"make pictures draws {name}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//|<link[^>]+rel="stylesheet"[^>]+href="(?:https?:)?//'
    )
    built = list((tmp_path / "site").rglob("*.html"))
    assert len(built) > 12
    for page in built:
        assert not loaded.search(page.read_text("utf-8")), f"{page.name} loads something from elsewhere"


def test_links_of_the_readme_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text("utf-8")):
            assert (ROOT / target).is_file(), f"{name}: {target}"


def test_the_memory_model_names_phases_that_exist() -> None:
    from lcplan.ledger import PHASE_HELP

    text = (ROOT / "docs" / "memory-model.md").read_text("utf-8")
    instants = text[text.index("| phase |") : text.index("With gradient accumulation")]
    names = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| ([^|]*) \|", instants, flags=re.MULTILINE)))
    assert len(names) > 20
    for name in names:
        general = re.sub(r"\[(?:n-1|0)\]", "[i]", f"backward[i]{name}" if name.startswith(".") else name)
        known = any(phase.startswith(general.removesuffix("…")) for phase in PHASE_HELP)
        assert known if general.endswith("…") else general in PHASE_HELP, name
