"""A user's own measured rows: a JSON-lines file that ``lcplan check --add`` writes and ``lcplan check`` reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lcplan._record import Record
from lcplan.checking import MeasuredRow, RowResult, check_row, load_rows, parse_rows
from lcplan.errors import EnvironmentProblem, InputError
from lcplan.run_rows import read_run

VARIABLE = "LCPLAN_ROWS"
"""Environment variable that names the file."""


class AddReport(Record):
    """A run that was recorded, predicted beside measured; a run that the formulas refuse passes."""

    schema_version: int = 1
    rows_file: str
    tolerance: float
    gpu: str
    versions: dict[str, str]
    step_s: float | None
    row: RowResult
    passed: bool


def record_run(source: Path, path: Path, *, tolerance: float) -> AddReport:
    """Read a finished run, predict it, and append it to a user's file.

    Raises:
        InputError: when ``source`` is no run to learn from, or is recorded already.
        EnvironmentProblem: when the file cannot be written.
    """
    row = read_run(source)
    result = check_row(row)
    marked = append_row(row, path)
    return AddReport(
        rows_file=str(path),
        tolerance=tolerance,
        gpu=marked.gpu,
        versions=marked.versions,
        step_s=marked.measured.step_s,
        row=result.model_copy(update={"id": marked.id}),
        passed=result.error is None or abs(result.error) <= tolerance,
    )


def rows_path() -> Path:
    """``$LCPLAN_ROWS``, or ``lcplan/rows.jsonl`` in the user's data folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    data = Path(os.environ.get("XDG_DATA_HOME") or "")
    # the XDG rules: a relative path is no path
    folder = data if data.is_absolute() else Path("~/.local/share").expanduser()
    return folder / "lcplan" / "rows.jsonl"


def load_user_rows(path: Path) -> tuple[MeasuredRow, ...]:
    """The rows of a user's file, marked u001, u002, ... in its order; none where there is no such file."""
    rows = parse_rows(_read(path), where=str(path))
    return tuple(row.model_copy(update={"id": _mark(number)}) for number, row in enumerate(rows, 1))


def append_row(row: MeasuredRow, path: Path) -> MeasuredRow:
    """Add ``row`` as the file's last line and return it with its id; the file is replaced whole or not at all.

    Raises:
        InputError: when the same row is there already, or ships with lcplan, or the file holds something else.
        EnvironmentProblem: when the file cannot be written.
    """
    path = path.expanduser().resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):
            present = load_user_rows(path)
            _refuse_duplicate(row, present, where=str(path))
            _refuse_duplicate(row, load_rows(), where="lcplan's own rows")
            marked = row.model_copy(update={"id": _mark(len(present) + 1)})
            _replace(path, _read(path), _line(marked))
    except OSError as error:
        raise EnvironmentProblem(
            "rows-not-writable",
            f"{path} cannot be written ({error.strerror}), and nothing was recorded. Name another file with --rows, "
            f"or with {VARIABLE}.",
        ) from None
    return marked


def _mark(number: int) -> str:
    return f"u{number:03d}"


def _read(path: Path) -> str:
    if not path.exists():
        return ""
    if not path.is_file():
        raise InputError("rows-not-a-file", f"{path} is not a file. Name a JSON-lines file with --rows or {VARIABLE}.")
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("bad-rows", f"{path} cannot be read as measured rows: {error}.") from None


def _content(row: MeasuredRow) -> dict[str, Any]:
    return row.model_dump(mode="json", exclude={"id"})


def _refuse_duplicate(row: MeasuredRow, present: tuple[MeasuredRow, ...], *, where: str) -> None:
    same = next((other.id for other in present if _content(other) == _content(row)), None)
    if same is not None:
        raise InputError(
            "duplicate-row",
            f"this run is recorded already, as {same} in {where}: a row counts once. Run the job again for another.",
        )


def _line(row: MeasuredRow) -> str:
    unset = {name for name in ("config",) if getattr(row, name) is None}
    return row.model_dump_json(exclude=unset) + "\n"


def _replace(path: Path, text: str, line: str) -> None:
    """Write beside the file and rename: whoever is killed in between leaves the old file."""
    separator = "" if not text or text.endswith("\n") else "\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text + separator + line)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that of two commands at once neither loses its row; without locks, go on."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
