"""The rows of a job: joined texts, examples as TRL labels them, shards that survive a kill."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lcplan.backends import templates

pytestmark = pytest.mark.train
TEMPLATES = Path(templates.__file__).parent
EOS = 256


@pytest.fixture
def rows(monkeypatch):
    """The job's own module, as the job imports it."""
    monkeypatch.syspath_prepend(str(TEMPLATES))
    return importlib.import_module("rows")


class Bytes:
    """A tokenizer whose tokens are bytes, and which counts how many texts it was given."""

    eos_token_id = EOS
    eos_token = "<eos>"
    chat_template = None

    def __init__(self):
        self.num_texts = 0

    def __call__(self, texts, **options):
        self.num_texts += len(texts)
        return {"input_ids": [list(text.encode()) for text in texts]}


def files(*paths, **more):
    return {"kind": "files", "paths": [str(path) for path in paths], "text_column": "text", **more}


def read(rows, folder):
    found = rows.load_rows(folder).to_dict()
    return found["input_ids"]


def make(rows, source, folder, max_length, tokenizer=None, *, min_rows=1, max_rows=None, **shape):
    shape = rows.RowShape(max_length=max_length, **shape)
    return rows.make_rows(source, tokenizer or Bytes(), folder, shape, min_rows=min_rows, max_rows=max_rows)


# --- texts


def test_texts_are_joined_end_to_end_and_the_rest_is_dropped(rows, tmp_path):
    (tmp_path / "a.txt").write_text("first text\nof two lines", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "zweiter \\u00fc"}\n\n{"text": "third"}\n', encoding="utf-8")
    stream = [*b"first text\nof two lines", EOS, *"zweiter ü".encode(), EOS, *b"third", EOS]
    made = make(rows, files(tmp_path / "a.txt", tmp_path / "b.jsonl"), tmp_path / "rows", 7)
    found = read(rows, tmp_path / "rows")
    assert (made["num_rows"], made["num_tokens"]) == (len(stream) // 7, len(stream))
    assert [token for row in found for token in row] == stream[: len(stream) // 7 * 7]
    assert {len(row) for row in found} == {7}
    assert (made["num_texts"], made["text_min"], made["text_median"], made["text_max"]) == (3, 6, 11, 24)
    assert made["num_scored"] == 7 * made["num_rows"]
    assert not list(tmp_path.rglob("*.unfinished"))


def test_shards_hold_the_same_rows_as_one(rows, tmp_path, monkeypatch):
    for number in range(30):
        (tmp_path / f"{number:03}.txt").write_text(f"{number} " * 40, encoding="utf-8")
    whole = make(rows, files(tmp_path), tmp_path / "one", 33)
    monkeypatch.setattr(rows, "SHARD_TOKENS", 200)
    parts = make(rows, files(tmp_path), tmp_path / "many", 33)
    assert parts == whole
    assert len(list((tmp_path / "many").glob("*.arrow"))) > 10
    assert len(list((tmp_path / "many").glob("*.rest"))) == 1
    assert read(rows, tmp_path / "many") == read(rows, tmp_path / "one")


def test_one_long_text_gives_many_rows_and_reading_stops_at_the_last_one_needed(rows, tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.txt").write_text("x" * 99, encoding="utf-8")
    tokenizer = Bytes()
    made = make(rows, files(tmp_path), tmp_path / "rows", 150, tokenizer, max_rows=3)
    assert made["num_rows"] == 3
    assert tokenizer.num_texts <= 100 // 4
    (tmp_path / "long.txt").write_text("y" * 1000, encoding="utf-8")
    made = make(rows, files(tmp_path / "long.txt"), tmp_path / "rows", 100, max_rows=4)
    assert made["num_rows"] == len(read(rows, tmp_path / "rows")) == 4


def test_too_little_text_names_both_numbers_and_leaves_no_file(rows, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 999, encoding="utf-8")
    with pytest.raises(rows.DataError, match=r"1,000 tokens.*needs 1,200 \(3 rows of 400\)"):
        make(rows, files(tmp_path), tmp_path / "rows", 400, min_rows=3)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_tokenized_texts_are_joined_too_and_keep_their_own_end(rows, tmp_path):
    records = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, EOS]}, {"input_ids": [6]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    made = make(rows, files(tmp_path), tmp_path / "rows", 3, vocab_size=300)
    assert read(rows, tmp_path / "rows") == [[1, 2, 3], [EOS, 4, 5], [EOS, 6, EOS]]
    assert made["num_texts"] == 3
    with pytest.raises(rows.DataError, match=r"token id 256 and the model's vocab_size is 200"):
        make(rows, files(tmp_path), tmp_path / "other", 3, vocab_size=200)
    (tmp_path / "a.jsonl").write_text('{"input_ids": "text"}\n', encoding="utf-8")
    with pytest.raises(rows.DataError, match="record 1 has no list of whole numbers in column 'input_ids'"):
        make(rows, files(tmp_path), tmp_path / "other", 3)


# --- the cache


def test_finished_rows_are_used_again_until_something_they_depend_on_changes(rows, tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000, encoding="utf-8")
    first = Bytes()
    made = make(rows, files(tmp_path / "a.txt"), tmp_path / "rows", 100, first)
    again = Bytes()
    assert make(rows, files(tmp_path / "a.txt"), tmp_path / "rows", 100, again) == made
    assert (first.num_texts, again.num_texts) == (1, 0)
    other = Bytes()
    other.eos_token_id = 7
    for changed, length in ((other, 100), (Bytes(), 50)):
        make(rows, files(tmp_path / "a.txt"), tmp_path / "rows", length, changed)
        assert changed.num_texts == 1
    (tmp_path / "a.txt").write_text("y" * 1000, encoding="utf-8")
    touched = Bytes()
    make(rows, files(tmp_path / "a.txt"), tmp_path / "rows", 50, touched)
    assert touched.num_texts == 1


SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import rows
rows.SHARD_TOKENS = 500
class Slow:
    eos_token_id, eos_token, chat_template = 256, "<eos>", None
    num_texts = 0
    def __call__(self, texts, **options):
        time.sleep(float(sys.argv[4]))
        Slow.num_texts += len(texts)
        return {"input_ids": [list(text.encode()) for text in texts]}
source = {"kind": "files", "paths": [sys.argv[2]], "text_column": "text"}
made = rows.make_rows(source, Slow(), Path(sys.argv[3]), rows.RowShape(max_length=77), min_rows=1)
print(Slow.num_texts, made["num_rows"], made["num_texts"], made["num_tokens"])
"""


def test_tokenizing_goes_on_from_the_finished_shards_after_a_kill(rows, tmp_path):
    records = "".join(json.dumps({"text": f"{number} " * 50}) + "\n" for number in range(200))
    (tmp_path / "a.jsonl").write_text(records, encoding="utf-8")

    def command(folder, seconds):
        return [
            sys.executable, "-c", SLOW, str(TEMPLATES), str(tmp_path / "a.jsonl"), str(tmp_path / folder), seconds,
        ]  # fmt: skip

    killed = subprocess.Popen(command("rows", "0.15"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "rows" / "00002.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    finished = len(list((tmp_path / "rows").glob("*.json"))) - 1
    assert 3 <= finished < 25
    # what a kill may leave of the shard that was being written
    (tmp_path / "rows" / f"{finished:05}.arrow").write_bytes(b"half")
    resumed, straight = (
        subprocess.run(command(folder, "0"), capture_output=True, text=True, check=True).stdout.split()
        for folder in ("rows", "straight")
    )
    assert resumed[1:] == straight[1:]
    assert int(straight[0]) == 200
    assert int(resumed[0]) <= 200 - 3 * 500 // 250 + 16
    assert int(resumed[0]) < 200
    assert read(rows, tmp_path / "rows") == read(rows, tmp_path / "straight")


def test_progress_is_lines_where_there_is_no_terminal(rows, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(rows, "LINE_EVERY_S", 0.0)
    (tmp_path / "a.txt").write_text("x" * 1000, encoding="utf-8")
    make(rows, files(tmp_path), tmp_path / "rows", 100, max_rows=5)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Tokenizing: 1,000 of 500 tokens, " in err


# --- examples


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<eos>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = CHATML
    return tokenizer


CHAT = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
EXAMPLES = {
    "messages": [{"messages": CHAT}, {"messages": [*CHAT, {"role": "user", "content": "Sure?"}, CHAT[1]]}],
    "prompts": [{"prompt": "Two and two?", "completion": " Four."}, {"prompt": "x" * 90, "completion": "y"}],
    "chat prompts": [{"prompt": CHAT[:1], "completion": CHAT[1:]}],
    "labelled": [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6], "labels": [-100, -100]},
    ],
    "masks": [{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1], "assistant_masks": [0, 1, 1]}],
}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    "options", [{}, {"assistant_only_loss": True}, {"completion_only_loss": False}, {"completion_only_loss": True}]
)
@pytest.mark.filterwarnings("ignore")
def test_examples_become_the_rows_that_trl_makes_of_them(rows, tokenizer, tmp_path, name, options):
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    if name in ("prompts", "labelled", "masks") and options.get("assistant_only_loss"):
        pytest.skip("TRL knows the assistant's turns in chats alone")
    if name in ("messages", "labelled") and options.get("completion_only_loss"):
        pytest.skip("there is no completion")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(e) + "\n" for e in EXAMPLES[name]), encoding="utf-8")
    training = {"completion_only_loss": None, "assistant_only_loss": False, **options}
    shape = rows.RowShape(max_length=80)
    source = files(tmp_path / "a.jsonl")
    made = rows.make_rows(source, tokenizer, tmp_path / "rows", shape, min_rows=1, training=training)
    mine = rows.load_rows(tmp_path / "rows").to_dict()

    config = Qwen3Config(vocab_size=300, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8,
                         num_key_value_heads=1, intermediate_size=8)  # fmt: skip
    args = SFTConfig(str(tmp_path / "out"), max_length=80, use_cpu=True, bf16=False, report_to="none", **options)
    trainer = SFTTrainer(
        model=Qwen3ForCausalLM(config), args=args, train_dataset=Dataset.from_list(EXAMPLES[name]),
        processing_class=tokenizer,
    )  # fmt: skip
    theirs = trainer.train_dataset.to_dict()
    assert mine["input_ids"] == theirs["input_ids"]
    assert mine["labels"] == theirs["labels"]
    assert made["num_dropped"] == len(EXAMPLES[name]) - len(theirs["labels"])


def test_examples_are_trimmed_to_the_multiple_and_never_padded(rows, tokenizer, tmp_path):
    lengths = (20, 33, 64, 3)
    records = [{"prompt": "", "completion": "z" * (length - 1)} for length in lengths]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(e) + "\n" for e in records), encoding="utf-8")
    made = make(rows, files(tmp_path), tmp_path / "rows", 48, tokenizer, multiple=8)
    assert [len(row) for row in read(rows, tmp_path / "rows")] == [16, 32, 48]
    assert (made["num_trimmed"], made["num_dropped"], made["num_texts"]) == (3, 1, 4)
    text = importlib.import_module("data").describe(made, max_length=48, rows_per_step=1)
    assert "3 rows of one example each, at most 48 tokens; 3 steps an epoch of 1 rows. 4 examples read" in text
    assert "3 trimmed, 1 dropped without a label. 96 tokens have a label." in text


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "a", "completion": [{"role": "user", "content": "x"}]}, "example 1 has no prompt and completion"),
        ({"messages": "a"}, "no list of messages"),
        ({"messages": []}, "no list of messages"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"input_ids": [999, 2], "labels": [1, 2]}, "token id 999"),
        ({"messages": CHAT}, "no chat template"),
    ],
)
def test_examples_that_cannot_be_used_are_named(rows, tmp_path, record, complaint):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    with pytest.raises(rows.DataError, match=complaint):
        make(rows, files(tmp_path), tmp_path / "rows", 48, vocab_size=300)


def test_a_template_that_marks_nothing_is_an_error_where_only_answers_are_scored(rows, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT[:1]}) + "\n", encoding="utf-8")
    training = {"completion_only_loss": None, "assistant_only_loss": True}
    shape = rows.RowShape(max_length=80)
    with pytest.raises(rows.DataError, match="marks no token"):
        rows.make_rows(files(tmp_path), tokenizer, tmp_path / "rows", shape, min_rows=1, training=training)


def test_a_small_tokenizer_is_trained_on_the_docs_of_python(rows):
    tokenization = importlib.import_module("tokenization")
    source = {"kind": "python-docs", "text_column": "text"}
    tokenizer = tokenization.train_tokenizer(source, 600)
    assert len(tokenizer) == 600
    text = "for x in y:\n\treturn \u00fc \U0001f600"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with pytest.raises(rows.DataError, match="needs more than 256 tokens, and the model has room for 256"):
        tokenization.train_tokenizer(source, 256)
