"""What the data holds: texts, pre-tokenized texts, chats, prompts with completions.

Texts come in pieces of bounded size, since they are joined end to end; an example comes whole. Which of them a dataset
has shows in the columns of its first record, in the order in which TRL looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
READ_CHARACTERS = 1 << 20
"""A text file is read and tokenized in pieces of about this size, cut at a line end."""
RECORDS_PER_BATCH = 16
JOINED = ("text", "input_ids")
"""Formats whose texts are joined end to end; of the others every example is a row."""

Piece = str | list[int] | None
"""A part of a text, or of one that is tokenized; None marks the end of a text."""


class DataError(Exception):
    """The dataset is missing, unreadable or too short; the message says which and what to do."""


def find_files(paths: Iterable[str]) -> list[Path]:
    """The files that ``paths`` name; a folder stands for every text file below it, in order of name."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES and p.is_file())
            if not inside:
                raise DataError(f"{path} holds no {', '.join(TEXT_SUFFIXES)} file. Point --data at one that does.")
            found += inside
        elif not path.is_file():
            raise DataError(f"{path} does not exist. Give a file, a folder or the name of a Hub dataset.")
        elif path.suffix.lower() not in TEXT_SUFFIXES:
            raise DataError(f"{path} is not a {', '.join(TEXT_SUFFIXES)} file. Convert it, or name one that is.")
        else:
            found.append(path)
    return found


def data_format(source: dict[str, Any]) -> str:
    """The format that was asked for, or that the first record has."""
    asked = source.get("format", "auto")
    if asked != "auto":
        return str(asked)
    if source["kind"] == "python-docs":
        return "text"
    if source["kind"] == "files" and find_files(source["paths"])[0].suffix.lower() == ".txt":
        return "text"
    record = next(read_records(source), None)
    return format_of(record) if record is not None else "text"


def format_of(record: Any) -> str:
    """The format of a record, by its columns."""
    columns = set(record) if isinstance(record, dict) else set()
    if {"prompt", "completion"} <= columns:
        return "prompt-completion"
    if columns & {"messages", "conversations"}:
        return "messages"
    if "input_ids" in columns and not columns & {"labels", "completion_mask", "assistant_masks"}:
        return "input_ids"
    return "labelled" if "input_ids" in columns else "text"


def read_pieces(source: dict[str, Any], kind: str = "text") -> Iterator[Piece]:
    """The texts in pieces of bounded size, or the token ids of pre-tokenized ones."""
    if kind == "input_ids":
        for number, record in enumerate(read_records(source), start=1):
            yield token_ids(record, f"record {number}")
            yield None
    elif source["kind"] == "files":
        for path in find_files(source["paths"]):
            yield from _file_pieces(path, source["text_column"])
    else:
        for number, record in enumerate(read_records(source), start=1):
            yield from _whole_text(
                _text(record, source["text_column"], f"record {number} of {source.get('name') or source['kind']}")
            )


def token_ids(record: Any, where: str, column: str = "input_ids") -> list[int]:
    """A column of token ids or labels."""
    ids = record.get(column) if isinstance(record, dict) else None
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    raise DataError(f"{where} has no list of whole numbers in column {column!r}.")


def _whole_text(text: str) -> Iterator[Piece]:
    if text:
        yield text
        yield None


def _file_pieces(path: Path, column: str) -> Iterator[Piece]:
    if path.suffix.lower() == ".txt":
        try:
            yield from _text_file_pieces(path)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None
        yield None
        return
    for where, record in _file_records(path, [column]):
        yield from _whole_text(_text(record, column, where))


def _text_file_pieces(path: Path) -> Iterator[str]:
    rest = ""
    with path.open(encoding="utf-8") as file:
        while block := file.read(READ_CHARACTERS):
            head, line_end, rest = (rest + block).rpartition("\n")
            if line_end:
                yield head + line_end
            elif len(rest) >= READ_CHARACTERS:
                yield rest
                rest = ""
    if rest:
        yield rest


def _not_utf8(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{path} is not UTF-8 text ({error.reason}). Convert it first.")


def _text(record: Any, column: str, where: str) -> str:
    text = record.get(column) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    keys = ", ".join(map(str, record)) if isinstance(record, dict) else "none"
    raise DataError(f"{where} has no text in column {column!r} (columns: {keys}). Name the column with --text-column.")


def read_records(source: dict[str, Any]) -> Iterator[Any]:
    """The records of a dataset, whole."""
    if source["kind"] == "python-docs":
        from pydoc_data.topics import topics

        yield from ({"text": topics[name]} for name in sorted(topics))
    elif source["kind"] == "hub":
        yield from _hub_records(source)
    else:
        for path in find_files(source["paths"]):
            if path.suffix.lower() == ".txt":
                raise DataError(f"{path} is plain text, and the data before it are records. Give them apart.")
            yield from (record for _, record in _file_records(path, None))


def _file_records(path: Path, columns: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Each record with the words that say where it is; of parquet only ``columns``."""
    if path.suffix.lower() == ".jsonl":
        yield from _jsonl_records(path)
    else:
        yield from _parquet_records(path, columns)


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        record = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise DataError(f"{path}, line {number}, is not JSON: {error.msg}.") from None
                    yield f"{path}, line {number},", record
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None


def _parquet_records(path: Path, columns: list[str] | None) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from None
    for column in columns or ():
        if column not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise DataError(f"{path} has no column {column!r} (columns: {names}). Name the column with --text-column.")
    for batch in file.iter_batches(batch_size=RECORDS_PER_BATCH, columns=columns):
        for record in batch.to_pylist():
            yield f"a row of {path}", record


def _hub_records(source: dict[str, Any]) -> Iterator[Any]:
    from datasets import load_dataset

    name, split = source["name"], source["split"]
    try:
        stream = load_dataset(name, source.get("config"), split=split, streaming=True)
    except Exception as error:
        raise DataError(f"the dataset {name!r} (split {split!r}) cannot be opened: {error}") from error
    yield from stream


def check_batches(kind: str, *, batch_size: int, padded: bool) -> None:
    """Refuse batches of examples that would be padded where the plan has no padding."""
    if kind not in JOINED and batch_size > 1 and not padded:
        raise DataError(
            f"the data are examples of different lengths, and batches of {batch_size} would be padded, for which "
            "attention needs a mask. Plan with --per-device-train-batch-size 1, or with --padding."
        )


def too_short(num_tokens: int, *, max_length: int, min_rows: int, bound: str = "") -> str:
    """What to say when the texts do not fill one step's rows; an upper bound says ``bound="at most "``."""
    rows = "row" if min_rows == 1 else "rows"
    return (
        f"the data holds {bound}{num_tokens:,} tokens, and one step needs {min_rows * max_length:,} "
        f"({min_rows:,} {rows} of {max_length:,}). Add text, or lower --max-length."
    )


def length_summary(lengths: Sequence[int], *, max_length: int) -> dict[str, int]:
    """How long texts or examples are that were read whole, in tokens."""
    ordered = sorted(lengths)
    count = len(ordered)
    return {
        "num_texts": count,
        "text_min": ordered[0] if count else 0,
        "text_median": ordered[(count - 1) // 2] if count else 0,
        "text_p99": ordered[-(-99 * count // 100) - 1] if count else 0,
        "text_max": ordered[-1] if count else 0,
        "num_longer_texts": sum(length > max_length for length in ordered),
    }


def describe(made: dict[str, Any], *, max_length: int, rows_per_step: int) -> str:
    """Rows, steps of one epoch, and how the texts compare with a row."""
    steps = made["num_rows"] // rows_per_step
    rows = f"Data: {made['num_rows']:,} rows of "
    if made["format"] not in JOINED:
        return (
            f"{rows}one example each, at most {max_length:,} tokens; {steps:,} steps an epoch of {rows_per_step:,} "
            f"rows. {made['num_texts']:,} examples read: median {made['text_median']:,} tokens, 99% at most "
            f"{made['text_p99']:,}, the longest {made['text_max']:,}; {made['num_trimmed']:,} trimmed, "
            f"{made['num_dropped']:,} dropped without a label. {made['num_scored']:,} tokens have a label."
        )
    text = (
        f"{rows}{max_length:,} tokens; {steps:,} steps an epoch of {rows_per_step:,} rows "
        f"({rows_per_step * max_length:,} tokens). {made['num_texts']:,} texts read whole"
    )
    if not made["num_texts"]:
        return text + "."
    text += f", median {made['text_median']:,} tokens"
    text += f", 99% of at most {made['text_p99']:,}, the longest {made['text_max']:,}"
    if made["num_longer_texts"]:
        return text + f"; {made['num_longer_texts']:,} are longer than a row and are cut."
    return text + "; every row joins several: no text is as long as max_length."
