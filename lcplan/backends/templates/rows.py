"""Rows of token ids, made once and kept in shards that survive a kill.

Texts are joined end to end and cut into rows of exactly ``max_length`` tokens: each is followed by one end-of-text
token, and a row may hold the end of one text and the start of the next. Examples (chats, prompts with completions) are
rows of their own, trimmed to ``max_length`` and to the multiple that the ranks of a sequence need. Nothing is padded.
What does not fill a row, or has no label, is dropped.

``rows/`` has, for each shard, an Arrow file and a JSON file with how far the data has been read; a shard counts once
its JSON file is there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from data import (
    JOINED,
    RECORDS_PER_BATCH,
    DataError,
    check_batches,
    data_format,
    find_files,
    length_summary,
    read_pieces,
    read_records,
    too_short,
)
from tokenization import IGNORED, encode_example

SHARD_TOKENS = 1 << 22
"""A shard is closed after about this many tokens: some seconds of work, which is what a kill loses."""
LINE_EVERY_S = 10.0
"""How often progress is said where there is no terminal."""


@dataclass(frozen=True)
class RowShape:
    """What a row has to be."""

    max_length: int
    multiple: int = 1
    """Rows of examples are trimmed to it."""
    padded: bool = False
    """Examples of one batch may differ in length."""
    batch_size: int = 1
    vocab_size: int | None = None


@dataclass
class Reading:
    """How far the data has been read, and what was found."""

    position: int = 0
    """Pieces or examples that were taken."""
    num_rows: int = 0
    num_tokens: int = 0
    num_scored: int = 0
    num_trimmed: int = 0
    num_dropped: int = 0
    open_text: int = 0
    """Tokens of the text that is not over."""
    done: bool = False
    lengths: list[int] = field(default_factory=list)
    """Of the texts that ended in this shard."""


class Shard:
    """The rows that are gathered for the next file."""

    def __init__(self) -> None:
        self.ids, self.labels, self.ends = array("i"), array("i"), array("i", [0])

    def add(self, ids: array[int], labels: list[int] | None = None) -> None:
        """Add one row."""
        self.ids.extend(ids)
        self.labels.extend(labels or ())
        self.ends.append(len(self.ids))

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self.ends) - 1

    def write(self, path: Path) -> None:
        """An Arrow file that datasets can map."""
        import pyarrow as pa

        def lists(values: array[int]) -> Any:
            numbers = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
            return pa.ListArray.from_arrays(pa.array(self.ends, type=pa.int32()), numbers)

        columns = {"input_ids": lists(self.ids), **({"labels": lists(self.labels)} if self.labels else {})}
        batch = pa.RecordBatch.from_pydict(columns)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)


class RowFolder:
    """The shards of one choice of data, tokenizer and length; those of another choice are removed."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self.folder = folder
        text = json.dumps(key, sort_keys=True)
        mark = folder / "key.json"
        if not mark.is_file() or mark.read_text(encoding="utf-8") != text:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            mark.write_text(text, encoding="utf-8")
        self.states = [json.loads(path.read_text(encoding="utf-8")) for path in self._finished()]

    def _finished(self) -> Iterator[Path]:
        number = 0
        while (path := self.folder / f"{number:05}.json").is_file():
            yield path
            number += 1

    def last(self) -> Reading:
        """Where to go on."""
        return Reading(**{**self.states[-1], "lengths": []}) if self.states else Reading()

    def rest(self) -> array[int]:
        """Tokens after the last row of the last shard."""
        tokens = array("i")
        if self.states:
            tokens.frombytes((self.folder / f"{len(self.states) - 1:05}.rest").read_bytes())
        return tokens

    def close_shard(self, shard: Shard, reading: Reading, rest: array[int]) -> None:
        """Write one shard; it is there when its JSON file is."""
        name = self.folder / f"{len(self.states):05}"
        if shard.num_rows:
            shard.write(name.with_suffix(".arrow"))
        name.with_suffix(".rest").write_bytes(rest.tobytes())
        state = dict(vars(reading))
        unfinished = name.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(state), encoding="utf-8")
        unfinished.replace(name.with_suffix(".json"))
        self.states.append(state)
        if len(self.states) > 1:
            (self.folder / f"{len(self.states) - 2:05}.rest").unlink(missing_ok=True)
        reading.lengths = []


class RowMaker:
    """Takes rows, closes a shard when it is full, and says how far it is."""

    def __init__(self, kept: RowFolder, shape: RowShape, max_rows: int | None, *, full_rows: bool) -> None:
        self.kept, self.shape, self.max_rows = kept, shape, max_rows
        self.reading = kept.last()
        self.shard = Shard()
        self._shard_from = self.reading.num_tokens
        total = max_rows * shape.max_length if max_rows is not None and full_rows else None
        self.progress = Progress(self.reading.num_tokens, total)

    def add(self, ids: array[int], labels: list[int] | None = None) -> None:
        """Add one row."""
        self.shard.add(ids, labels)
        self.reading.num_rows += 1
        self.reading.num_scored += len(ids) if labels is None else sum(label != IGNORED for label in labels)

    def taken(self, num_tokens: int, rest: array[int]) -> bool:
        """Count what was read into rows and ``rest``; whether there are rows enough."""
        self.reading.position += 1
        self.reading.num_tokens += num_tokens
        self.progress.say(self.reading.num_tokens)
        enough = self.reading.num_rows == self.max_rows
        if enough or self.reading.num_tokens - self._shard_from >= SHARD_TOKENS:
            self.close(rest, done=enough)
        return enough

    def close(self, rest: array[int], *, done: bool) -> None:
        """Close the shard."""
        self.reading.done = done
        self.kept.close_shard(self.shard, self.reading, rest)
        self.shard, self._shard_from = Shard(), self.reading.num_tokens
        if done:
            self.progress.close()


def make_rows(
    source: dict[str, Any],
    tokenizer: Any,
    folder: Path,
    shape: RowShape,
    *,
    min_rows: int,
    max_rows: int | None = None,
    training: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Make the rows, or what is missing of them, and say what they are; a training needs ``min_rows`` of them.

    Reading stops at ``max_rows``, so a large dataset is not tokenized beyond what the run will use.

    Raises:
        DataError: the data cannot be read, is too short, or does not go with the plan.
    """
    training = training or {"completion_only_loss": None, "assistant_only_loss": False}
    kind = data_format(source)
    check_batches(kind, batch_size=shape.batch_size, padded=shape.padded)
    kept = RowFolder(folder, cache_key(source, kind, tokenizer, shape, max_rows, training))
    maker = RowMaker(kept, shape, max_rows, full_rows=kind in JOINED)
    if not maker.reading.done:
        if kind in JOINED:
            _join(source, kind, tokenizer, maker)
        else:
            _take_examples(source, kind, tokenizer, maker, training)
    made = kept.states[-1]
    if made["num_rows"] < min_rows:
        shutil.rmtree(folder)
        if kind in JOINED:
            raise DataError(too_short(made["num_tokens"], max_length=shape.max_length, min_rows=min_rows))
        raise DataError(
            f"the data holds {made['num_rows']:,} usable examples ({made['num_dropped']:,} have no label within "
            f"{shape.max_length:,} tokens), and one step needs {min_rows:,}. Add examples, or lower the batch size."
        )
    counts = {name: made[name] for name in ("num_rows", "num_tokens", "num_scored", "num_trimmed", "num_dropped")}
    lengths = [length for state in kept.states for length in state["lengths"]]
    return {"format": kind, **counts, **length_summary(lengths, max_length=shape.max_length)}


def load_rows(folder: Path) -> Any:
    """The rows as a dataset that lies in its files."""
    from datasets import Dataset, concatenate_datasets

    return concatenate_datasets([Dataset.from_file(str(path)) for path in sorted(folder.glob("*.arrow"))])


def cache_key(
    source: dict[str, Any],
    kind: str,
    tokenizer: Any,
    shape: RowShape,
    max_rows: int | None,
    training: dict[str, Any],
) -> dict[str, Any]:
    """Everything that the rows depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else type(tokenizer).__name__
    written = f"{vocabulary}\n{getattr(tokenizer, 'chat_template', None)}\n{tokenizer.eos_token_id}"
    files = find_files(source["paths"]) if source["kind"] == "files" else []
    return {
        "source": source,
        "format": kind,
        "files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "tokenizer": hashlib.sha256(written.encode()).hexdigest(),
        "shape": vars(shape),
        "max_rows": max_rows,
        "labels": [training["completion_only_loss"], training["assistant_only_loss"]],
    }


def _join(source: dict[str, Any], kind: str, tokenizer: Any, maker: RowMaker) -> None:
    """Cut the joined texts into rows."""
    reading, length, end = maker.reading, maker.shape.max_length, tokenizer.eos_token_id
    pending = maker.kept.rest()
    for ids, ends in _tokens(source, kind, tokenizer, reading.position):
        if ends and kind == "input_ids" and pending and pending[-1] == end:
            ids = []  # this text brought its own
        if kind == "input_ids":
            _check_ids(ids, maker.shape.vocab_size)
        pending.extend(ids)
        reading.open_text += len(ids)
        if ends:
            reading.lengths.append(reading.open_text)
            reading.open_text = 0
        full = len(pending) // length
        if maker.max_rows is not None:
            full = min(full, maker.max_rows - reading.num_rows)
        for row in range(full):
            maker.add(pending[row * length : (row + 1) * length])
        pending = pending[full * length :] if full else pending
        if maker.taken(len(ids), pending):
            return
    maker.close(pending, done=True)


def _tokens(source: dict[str, Any], kind: str, tokenizer: Any, skip: int) -> Iterator[tuple[list[int], bool]]:
    """Token ids of the pieces after the first ``skip``, and whether a text ends with them."""
    pieces = islice(read_pieces(source, kind), skip, None)
    end = [tokenizer.eos_token_id]
    while batch := list(islice(pieces, RECORDS_PER_BATCH)):
        texts = [piece for piece in batch if isinstance(piece, str)]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        tokens = iter(encoded)
        for piece in batch:
            yield (end, True) if piece is None else (next(tokens) if isinstance(piece, str) else piece, False)


def _take_examples(
    source: dict[str, Any], kind: str, tokenizer: Any, maker: RowMaker, training: dict[str, Any]
) -> None:
    """Make every example a row, without what is too long; those without a label in it are dropped, as TRL does."""
    reading, nothing = maker.reading, array("i")
    for number, record in enumerate(islice(read_records(source), reading.position, None), start=reading.position + 1):
        ids, labels = encode_example(record, kind, tokenizer, training, f"example {number}")
        if kind == "labelled":
            _check_ids(ids, maker.shape.vocab_size)
        reading.lengths.append(len(ids))
        keep = min(len(ids), maker.shape.max_length)
        keep -= keep % maker.shape.multiple
        if any(label != IGNORED for label in labels[1:keep]):
            reading.num_trimmed += keep < len(ids)
            maker.add(array("i", ids[:keep]), labels[:keep])
        else:
            reading.num_dropped += 1
        if maker.taken(len(ids), nothing):
            return
    maker.close(nothing, done=True)


def _check_ids(ids: Sequence[int], vocab_size: int | None) -> None:
    if vocab_size is not None and ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise DataError(
            f"the data has token id {wrong:,} and the model's vocab_size is {vocab_size:,}: it was tokenized for "
            "another model. Give it as text, or name the model it was made for."
        )


class Progress:
    """How many tokens have been made: a bar on a terminal, else a line now and then."""

    def __init__(self, done: int, total: int | None) -> None:
        from tqdm import tqdm

        self.total, self._done, self._from, self._started = total, done, done, time.monotonic()
        self._said = self._started
        self._bar = tqdm(
            total=total,
            initial=done,
            unit=" tokens",
            unit_scale=True,
            desc="Tokenizing",
            leave=False,
            disable=not sys.stderr.isatty(),
        )

    def say(self, done: int) -> None:
        """Show it, not too often."""
        self._bar.update(done - self._done)
        self._done = done
        if self._bar.disable and time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            of = f" of {self.total:,}" if self.total else ""
            speed = (done - self._from) / (self._said - self._started)
            print(f"Tokenizing: {done:,}{of} tokens, {speed:,.0f} a second", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
