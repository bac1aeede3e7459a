"""Both kinds of tokenizer against the libraries they come from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from meshinfer.config import Folders
from meshinfer.errors import InputError, SourceError
from meshinfer.sources.convert import prepare
from meshinfer.text.template import ChatTemplate
from meshinfer.text.tokenizer import FastTokenizer, OpenVinoTokenizer, Tokenizer, load_tokenizer
from tests.sources.makers import TEMPLATE, make_gguf, make_tokenizer

TEXTS = [
    "hello hello",
    " hello\n\n\n  world ",
    "don't 12345",
    "日本語テキスト 🙂👨\u200d👩\u200d👧",
    "e\u0301 na\u00efve \u00a0nbsp",
    "\r\n\tx",
    "a<|end|>b<|start|>",
    "\x00",
    "",
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, home: Folders) -> Path:
    """What a GGUF model becomes: tokenizer.json of our making, and the OpenVINO tokenizer of openvino-genai's."""
    folder = tmp_path_factory.mktemp("made")
    path = make_gguf(folder / "m.gguf", tokenizer=("gpt2", "smollm"), layers=1)
    with prepare(str(path), home) as model:
        for file in model.folder.glob("*tokenizer*"):
            shutil.copy(file, folder)
    return folder


def openvino_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("openvino_*")}


@pytest.fixture(scope="module", params=["fast", "openvino"])
def tokenizer(request: pytest.FixtureRequest, made: Path, home: Folders) -> Tokenizer:
    return load_tokenizer(made if request.param == "fast" else openvino_files(made), home)


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
        assert tokenizer.decode(ids, skip_special=False) == text


def test_both_kinds_give_the_same_tokens(made: Path, home: Folders) -> None:
    fast, openvino = load_tokenizer(made, home), load_tokenizer(openvino_files(made), home)
    assert isinstance(fast, FastTokenizer)
    assert isinstance(openvino, OpenVinoTokenizer)
    for text in TEXTS:
        assert fast.encode(text, add_special=False) == openvino.encode(text, add_special=False)
    assert (fast.eos_ids, fast.vocab_size) == (openvino.eos_ids, openvino.vocab_size) == ((0,), 264)
    assert openvino.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_a_rendered_chat_has_the_tokens_that_openvino_genai_gives_it(made: Path, tokenizer: Tokenizer) -> None:
    import openvino_genai

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    reference = openvino_genai.Tokenizer(str(made))
    expected = reference.encode(
        reference.apply_chat_template(messages, add_generation_prompt=True), add_special_tokens=False
    )
    prompt = ChatTemplate(TEMPLATE, tokenizer.special_tokens).render(messages)
    assert tokenizer.encode(prompt, add_special=False) == expected.input_ids.data[0].tolist()


def test_special_tokens_are_skipped_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|start|>hello<|end|>", add_special=False)
    assert ids[0] == 1
    assert ids[-1] == 0
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|start|>hello<|end|>"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([tokenizer.vocab_size + 5, 261]) == "hello"


def test_long_prompts_are_never_cut(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("hello" * 20_000, add_special=False)) >= 20_000


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="not valid Unicode: surrogates not allowed at character 3"):
        tokenizer.encode("abc\ud800", add_special=False)


@pytest.mark.parametrize("bos", [False, True])
def test_it_encodes_as_transformers_does(tmp_path: Path, home: Folders, bos: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = make_tokenizer(tmp_path, bos=bos)
    ours = load_tokenizer(folder, home)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in TEXTS:
        for special in (False, True):
            assert ours.encode(text, add_special=special) == theirs.encode(text, add_special_tokens=special)
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_bos_that_only_the_configuration_knows_is_added_once(tmp_path: Path, home: Folders) -> None:
    for bos in (False, True):
        config = make_tokenizer(tmp_path, bos=bos) / "tokenizer_config.json"
        config.write_text(config.read_text().replace("{", '{"add_bos_token": true, ', 1))
        assert load_tokenizer(tmp_path, home).encode("hello", add_special=True) == [1, 261]
        assert load_tokenizer(tmp_path, home).encode("hello", add_special=False) == [261]


def test_files_of_a_store_are_found_by_their_names_in_the_map(made: Path, home: Folders, tmp_path: Path) -> None:
    blobs = {}
    for number, (name, path) in enumerate(sorted(openvino_files(made).items())):
        blobs[name] = Path(shutil.copy(path, tmp_path / f"{number:064x}"))
    assert load_tokenizer(blobs, home).encode("hello", add_special=False) == [261]
    before = sorted((home.tokenizers).iterdir())
    load_tokenizer(blobs, home)
    assert sorted((home.tokenizers).iterdir()) == before


def test_missing_and_damaged_files_are_source_errors(tmp_path: Path, home: Folders, made: Path) -> None:
    with pytest.raises(SourceError, match=r"no tokenizer: neither tokenizer.json nor all of openvino_detokenizer.bin"):
        load_tokenizer({}, home)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path, home)
    (tmp_path / "broken.xml").write_text("<net>")
    with pytest.raises(SourceError, match=r"openvino_tokenizer.xml is damaged"):
        load_tokenizer(openvino_files(made) | {"openvino_tokenizer.xml": tmp_path / "broken.xml"}, home)
    (tmp_path / "empty.xml").write_text('<net name="x" version="11"><layers/><edges/></net>')
    with pytest.raises(SourceError, match="cannot load the OpenVINO tokenizer"):
        load_tokenizer(openvino_files(made) | {"openvino_tokenizer.xml": tmp_path / "empty.xml"}, home)
