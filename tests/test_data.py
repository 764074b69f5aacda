from __future__ import annotations

import pytest

from lcplan.backends import inputs
from lcplan.backends.job import ModelSource
from lcplan.backends.templates import data
from lcplan.errors import DataError, ModelError
from lcplan.job_options import DataSource
from lcplan.model_spec import ModelSpec
from lcplan.train_plan import TrainPlan


def files(*paths, text_column="text"):
    return {"kind": "files", "paths": [str(path) for path in paths], "text_column": text_column}


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


def test_examples_that_would_be_padded_are_refused_before_the_job(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    source = inputs.parse_data(str(tmp_path / "a.jsonl"))
    plan = TrainPlan(max_length=1000, gpu="h200", per_device_train_batch_size=2)
    with pytest.raises(DataError, match="--padding"):
        inputs.check_data(source, plan)
    inputs.check_data(source, plan.model_copy(update={"padding": True}))
    inputs.check_data(source, plan.model_copy(update={"per_device_train_batch_size": 1}))
    (tmp_path / "a.jsonl").write_text("{not json\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1, is not JSON"):
        inputs.check_data(source, plan)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"text": "a"}, "text"),
        ({"body": "a"}, "text"),
        ({"text": "a", "messages": []}, "messages"),
        ({"conversations": []}, "messages"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "prompt-completion"),
        ({"prompt": "a", "text": "c"}, "text"),
        ({"input_ids": [1]}, "input_ids"),
        ({"input_ids": [1], "labels": [1]}, "labelled"),
        ({"input_ids": [1], "completion_mask": [1]}, "labelled"),
        (["text"], "text"),
    ],
)
def test_formats_show_in_the_columns(record, kind):
    assert data.format_of(record) == kind


def test_a_format_that_is_asked_for_is_not_looked_for(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "messages": []}\n', encoding="utf-8")
    assert data.data_format(files(tmp_path)) == "messages"
    assert data.data_format({**files(tmp_path), "format": "text"}) == "text"
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    assert data.data_format(files(tmp_path / "a.txt")) == "text"
    assert data.data_format({"kind": "python-docs"}) == "text"
    with pytest.raises(data.DataError, match=r"a\.txt is plain text"):
        list(data.read_records(files(tmp_path / "a.jsonl", tmp_path / "a.txt")))


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
