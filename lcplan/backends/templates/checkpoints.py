"""Which checkpoints are whole.

The trainer writes one file after another into a checkpoint's own folder; only when every rank is through does rank 0
add a marker with the name and size of each, and a resume takes no checkpoint without it.

Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

CHECKPOINTS = "checkpoints"
MARKER = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def mark_complete(folder: Path, **facts: Any) -> dict[str, Any]:
    """Say that ``folder`` is a whole checkpoint; the marker appears at once or not at all."""
    files = {name: size for name, size in _files(folder).items() if name != MARKER}
    content = {**facts, "files": files}
    unfinished = folder / f"{MARKER}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / MARKER)
    return content


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The marker of a whole checkpoint; None where it is missing, or a file is not as long as it says."""
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = content["files"]
        found = _files(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(sizes, dict) or not sizes or any(found.get(name) != size for name, size in sizes.items()):
        return None
    return dict(content)


def newest_complete(job_folder: Path) -> Path | None:
    """The whole checkpoint of the latest step; None where there is none."""
    whole = (path for _, path in reversed(_numbered(job_folder)) if read_marker(path) is not None)
    return next(whole, None)


def step_of(checkpoint: Path) -> int:
    """Steps that were done when it was written."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named like a checkpoint")
    return int(match.group(1))


def remove_incomplete(job_folder: Path) -> list[str]:
    """Delete checkpoints that are not whole, which a resumed run would otherwise write into; returns their names."""
    broken = [path for _, path in _numbered(job_folder) if read_marker(path) is None]
    for path in broken:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in broken]


def rows_digest(rows: Any) -> str:
    """Tells rows of other data apart: their number, and the first, middle and last of them."""
    count = len(rows)
    digest = hashlib.sha256(str(count).encode())
    for index in sorted({0, count // 2, count - 1}):
        digest.update(json.dumps(list(map(int, rows[index]["input_ids"]))).encode())
    return digest.hexdigest()[:16]


def _numbered(job_folder: Path) -> list[tuple[int, Path]]:
    parent = job_folder / CHECKPOINTS
    if not parent.is_dir():
        return []
    return sorted((step_of(path), path) for path in parent.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def _files(folder: Path) -> dict[str, int]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(found)}
