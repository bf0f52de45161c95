"""Text files become token sequences."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.unit.checkpoints import save_tokenizer
from tpla.convert.text import load_tokenizer, read_sequences
from tpla.core.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer(folder)


def _save_tokenizer_of_deepseek(folder: Path) -> Path:
    """As DeepSeek-V3's: nothing but a flag says that a text begins with BOS."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", *letters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True,
                "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>"}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    return folder


def test_a_text_begins_with_bos_where_only_a_flag_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_save_tokenizer_of_deepseek(tmp_path / "model"))
    ids = tokenizer("hello")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and len(ids) == 6
    assert tokenizer("hello", add_special_tokens=False)["input_ids"] == ids[1:]


def test_a_tokenizers_own_code_runs_where_it_is_trusted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
    folder = _save_tokenizer_of_deepseek(tmp_path / "model")
    (folder / "own_tokenizer.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    is_own = True\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    with pytest.raises(CheckpointError, match="give --trust-remote-code"):
        load_tokenizer(folder)
    assert load_tokenizer(folder, trust_remote_code=True).is_own


def test_plain_text_is_one_document(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("hello wide world\n\nagain")
    sequences = read_sequences(path, tokenizer, context=10, max_tokens=1000)
    assert [len(ids) for ids in sequences] == [10, 10, 3]
    assert tokenizer.decode([i for ids in sequences for i in ids.tolist()]) == path.read_text()


def test_documents_follow_one_another(tokenizer: Any, tmp_path: Path) -> None:
    path = _jsonl(tmp_path, {"text": "abcd"}, {"text": "efghij"})
    assert _lengths(path, tokenizer, context=8) == [8, 2]
    assert _lengths(path, tokenizer, context=8, per_document=True) == [4, 6]
    assert _lengths(path, tokenizer, context=5, per_document=True) == [4, 5], "one token is no text"


def test_messages_go_through_the_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (ids,) = read_sequences(_jsonl(tmp_path, {"messages": messages}), tokenizer, 99, 99)
    assert tokenizer.decode(ids.tolist()) == "<s>hi</s><s>yo</s>"
    assert ids.tolist().count(tokenizer.bos_token_id) == 2, "not one more by the tokenizer"


@pytest.mark.parametrize("per_document", [False, True])
def test_max_tokens_is_a_limit(tokenizer: Any, tmp_path: Path, per_document: bool) -> None:
    path = _jsonl(tmp_path, *[{"text": "abcdefgh"}] * 50)
    assert sum(_lengths(path, tokenizer, 6, max_tokens=27, per_document=per_document)) <= 27
    assert sum(_lengths(path, tokenizer, 8, max_tokens=27, per_document=per_document)) == 27
    plain = tmp_path / "a.txt"
    plain.write_text("x" * 100_000)
    assert sum(_lengths(plain, tokenizer, 8, max_tokens=27)) == 27


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"text.jsonl:1 is not JSON"),
        ('{"body": "x"}', r'text.jsonl:1 has neither "text" nor "messages"'),
        ("[1]", r"text.jsonl:1 has neither"),
        ('{"text": ["a", "b"]}', r"text.jsonl:1 has neither"),
        ('{"messages": ["hi", "there"]}', r"text.jsonl:1 has neither"),
        ('{"messages": []}', r'text.jsonl:1 has "messages" without any'),
        ('{"text": "a \\ud800 surrogate"}', r"text.jsonl:1: the tokenizer .* fails .*correct"),
        (
            '{"text": "ab"}\n{"messages": [{"role": "user", "content": null}]}',
            r"text.jsonl:2: the tokenizer or its chat template fails",
        ),
        ('{"text": "x"}', r"holds 1 tokens; give a longer text"),
        ("", r"holds 0 tokens"),
    ],
)
def test_bad_files_are_named(tokenizer: Any, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(line + "\n")
    strict = copy(tokenizer)  # as many models', its template adds to what a message says
    strict.chat_template = "{% for m in messages %}{{ m['content'] + 'x' }}{% endfor %}"
    with pytest.raises(ConfigError, match=message):
        read_sequences(path, strict, 8, 100)


def test_messages_count_where_there_is_no_text(tokenizer: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = _jsonl(tmp_path, {"text": None, "messages": messages})
    (ids,) = read_sequences(path, tokenizer, 99, 99)
    assert tokenizer.decode(ids.tolist()) == "<s>hi</s>"


def test_an_absent_file_is_named(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read text .*nowhere.txt"):
        read_sequences(tmp_path / "nowhere.txt", tokenizer, 8, 100)


def test_messages_need_a_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    path = _jsonl(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ConfigError, match="no chat template"):
        read_sequences(path, load_tokenizer(tmp_path), 8, 100)


def _jsonl(folder: Path, *records: dict[str, object]) -> Path:
    path = folder / "text.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


def _lengths(
    path: Path, tokenizer: Any, context: int, max_tokens: int = 1000, per_document: bool = False
) -> list[int]:
    return [len(i) for i in read_sequences(path, tokenizer, context, max_tokens, per_document)]
