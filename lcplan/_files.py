"""Writes single files whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from lcplan.errors import EnvironmentProblem, InputError


def check_new_file(path: Path, *, force: bool, flag: str) -> None:
    """Refuse a file that is there already, unless ``force``, and a folder.

    Raises:
        InputError: naming the flag and the path.
    """
    if path.is_dir():
        raise InputError("output-is-a-folder", f"{flag} {path} is a folder. Name a file in it.")
    if path.exists() and not force:
        raise InputError("output-exists", f"{flag} {path} is there already. Name another file, or add --force.")


def write_whole(path: Path, content: bytes, *, flag: str) -> None:
    """Write beside the target, then rename into place.

    Raises:
        EnvironmentProblem: when the folder is missing or cannot be written to.
    """
    unfinished = path.parent / f".{path.name}.{os.getpid()}.unfinished"
    try:
        with unfinished.open("xb") as stream:
            stream.write(content)
        unfinished.replace(path)
    except OSError as error:
        raise EnvironmentProblem(
            "output-not-writable", f"{flag} {path} cannot be written ({error.strerror}). Name another file."
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)
