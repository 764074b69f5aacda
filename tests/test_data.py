from __future__ import annotations

import json
import subprocess

import pytest

from lcplan.backends import inputs
from lcplan.backends.job import ModelSource
from lcplan.backends.templates import data
from lcplan.errors import DataError, ModelError
from lcplan.job_options import DataSource
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan

EOS = 256


class Bytes:
    """A tokenizer whose tokens are bytes, and which counts how many texts it was given."""

    eos_token_id = EOS

    def __init__(self):
        self.num_texts = 0

    def __call__(self, texts, **options):
        self.num_texts += len(texts)
        return {"input_ids": [list(text.encode()) for text in texts]}


def files(*paths, text_column="text"):
    return {"kind": "files", "paths": [str(path) for path in paths], "text_column": text_column}


def read_rows(path):
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all().column("input_ids").to_pylist()


def write(folder, **sizes):
    return data.write_rows(files(folder), Bytes(), folder / "rows.arrow", **{"min_rows": 1, "max_rows": None, **sizes})


@pytest.mark.train
def test_texts_are_joined_end_to_end_and_the_rest_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_text("first text\nof two lines", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "zweiter \\u00fc"}\n\n{"text": "third"}\n', encoding="utf-8")
    stream = [
        *b"first text\nof two lines", EOS, *"zweiter ü".encode(), EOS, *b"third", EOS
    ]  # fmt: skip
    made = write(tmp_path, max_length=7)
    rows = read_rows(tmp_path / "rows.arrow")
    assert (made["num_rows"], made["num_tokens"]) == (len(stream) // 7, len(stream))
    assert [token for row in rows for token in row] == stream[: len(stream) // 7 * 7]
    assert {len(row) for row in rows} == {7}
    assert not list(tmp_path.glob("*unfinished*"))


@pytest.mark.train
def test_one_long_text_gives_many_rows_and_reading_stops_at_the_last_one_needed(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text("x" * 99, encoding="utf-8")
    tokenizer = Bytes()
    made = data.write_rows(files(tmp_path), tokenizer, tmp_path / "rows.arrow", max_length=150, min_rows=1, max_rows=3)
    assert made["num_rows"] == 3
    assert tokenizer.num_texts <= 100 // 4
    (tmp_path / "long.txt").write_text("y" * 1000, encoding="utf-8")
    made = data.write_rows(
        files(tmp_path / "long.txt"), Bytes(), tmp_path / "rows.arrow", max_length=100, min_rows=1, max_rows=4
    )
    assert made["num_rows"] == 4
    assert len(read_rows(tmp_path / "rows.arrow")) == 4


@pytest.mark.train
def test_too_little_text_names_both_numbers_and_leaves_no_file(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 999, encoding="utf-8")
    with pytest.raises(data.DataError, match=r"1,000 tokens.*needs 1,200 \(3 rows of 400\)"):
        write(tmp_path, max_length=400, min_rows=3)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.train
def test_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.table({"body": ["one", "", "two"], "number": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    pieces = list(data.read_pieces(files(tmp_path, text_column="body")))
    assert pieces == ["one", None, "two", None]
    with pytest.raises(data.DataError, match=r"no column 'text' \(columns: body, number\).*--text-column"):
        list(data.read_pieces(files(tmp_path)))
    with pytest.raises(data.DataError, match=r"number"):
        list(data.read_pieces(files(tmp_path, text_column="number")))
    (tmp_path / "b.parquet").write_bytes(b"not parquet")
    with pytest.raises(data.DataError, match=r"b\.parquet is not a readable parquet file"):
        list(data.read_pieces(files(tmp_path, text_column="body")))


def test_a_text_file_is_read_in_pieces_that_give_it_back(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "READ_CHARACTERS", 16)
    for text in ("", "a\n", "no line end", "many\nshort\nlines\n" * 20, "x" * 100, "x" * 50 + "\n" + "ü" * 50):
        (tmp_path / "a.txt").write_text(text, encoding="utf-8")
        pieces = list(data.read_pieces(files(tmp_path / "a.txt")))
        assert pieces[-1] is None
        assert "".join(pieces[:-1]) == text
        assert all(len(piece) <= 32 for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2, is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1, has no text in column 'text' \(columns: body\)"),
        ("a.jsonl", b'{"text": 3}\n', "no text in column 'text'"),
        ("a.jsonl", b'["text"]\n', "columns: none"),
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', "not UTF-8"),
        ("a.csv", b"x", "is not a .txt, .jsonl, .parquet file"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(data.DataError, match=complaint) as caught:
        list(data.read_pieces(files(tmp_path / name)))
    assert name in str(caught.value)


def test_folders_are_walked_in_order_and_must_hold_text(tmp_path):
    for name in ("b/two.TXT", "a/one.jsonl", "a/skipped.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert [path.name for path in data.find_files([str(tmp_path)])] == ["one.jsonl", "two.TXT"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(data.DataError, match="holds no .txt"):
        data.find_files([str(tmp_path / "empty")])


def test_what_data_may_name(tmp_path):
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    assert inputs.parse_data(str(tmp_path)).paths == (str(tmp_path.resolve()),)
    assert inputs.parse_data(str(tmp_path / "a.txt"), text_column="body").text_column == "body"
    assert inputs.parse_data("python-docs").kind == "python-docs"
    assert inputs.parse_data("emozilla/pg19") == DataSource(kind="hub", name="emozilla/pg19")
    for missing in (
        "missing.txt",
        "./missing",
        "a/b/c",
        "/nowhere",
        "",
        " ",
        "$(touch x)",
        "a b",
        "x" * 5000,
        "~no-such-user/x",
        "a\0b",
    ):
        with pytest.raises(DataError, match="does not exist") as caught:
            inputs.parse_data(missing)
        assert caught.value.code == "data-not-found"


def test_text_that_is_too_short_in_any_tokenizer_is_refused_before_the_job(tmp_path):
    plan = TrainPlan(max_length=1000, gpu="h200", per_device_train_batch_size=1, gradient_accumulation_steps=2)
    (tmp_path / "a.txt").write_text("x" * 1998, encoding="utf-8")
    source = inputs.parse_data(str(tmp_path))
    with pytest.raises(DataError, match=r"at most 1,999 tokens.*needs 2,000 \(2 rows of 1,000\)") as caught:
        inputs.check_data(source, plan)
    assert caught.value.code == "data-too-short"
    (tmp_path / "a.txt").write_text("x" * 1999, encoding="utf-8")
    inputs.check_data(source, plan)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match="holds no"):
        inputs.check_data(source, plan)


def model(id, vocab_size=1000):
    return ModelSpec.model_construct(id=id, vocab_size=vocab_size, config={"model_type": "qwen3"})


def test_a_folder_of_weights_must_hold_some(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="--init random") as caught:
        inputs.model_source(model(str(tmp_path)), init="pretrained")
    assert caught.value.code == "weights-missing"
    assert inputs.model_source(model(str(tmp_path)), init="random").init == "random"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert inputs.model_source(model(str(tmp_path)), init="pretrained").id == str(tmp_path.resolve())
    from_file = inputs.model_source(model(str(tmp_path / "config.json")), init="pretrained")
    assert from_file.id == str(tmp_path.resolve())
    assert inputs.model_source(model("Qwen/Qwen3-8B"), init="pretrained").id == "Qwen/Qwen3-8B"


def test_which_tokenizer_a_job_gets(tmp_path):
    pretrained = ModelSource(id="Qwen/Qwen3-8B", revision="abc")
    own = inputs.tokenizer_source(pretrained, asked=None, vocab_size=1000)
    assert (own.kind, own.id, own.revision) == ("pretrained", "Qwen/Qwen3-8B", "abc")
    random = ModelSource(id="x", init="random", config={})
    assert inputs.tokenizer_source(random, asked=None, vocab_size=1000).vocab_size == 1000
    assert inputs.tokenizer_source(random, asked=None, vocab_size=151936).vocab_size == 8192
    assert inputs.tokenizer_source(random, asked="gpt2", vocab_size=1000).id == "gpt2"
    assert inputs.tokenizer_source(random, asked=str(tmp_path), vocab_size=1).id == str(tmp_path.resolve())


@pytest.mark.train
def test_a_small_tokenizer_is_trained_on_the_docs_of_python(tmp_path):
    import sys

    script = f"""
import json, sys
sys.path.insert(0, {json.dumps(str(data.__file__.rsplit("/", 1)[0]))})
import data
source = {{"kind": "python-docs"}}
tokenizer = data.train_tokenizer(source, 600)
assert len(tokenizer) == 600, len(tokenizer)
text = "for x in y:\\n\\treturn \\u00fc \\U0001f600"
assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
try:
    data.train_tokenizer(source, 256)
except data.DataError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "needs more than 256 tokens, and the model has room for 256" in done.stdout
