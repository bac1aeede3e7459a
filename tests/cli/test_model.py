"""`meshinfer model` on real models."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from meshinfer.config import Folders
from meshinfer.shards.store import Store
from meshinfer.sources.convert import prepare
from tests.cli.calls import command, complaint, flip_byte, listing, meshinfer, succeeded
from tests.sources.hub_server import COMMIT, Hub, serve
from tests.sources.makers import make_gguf, make_ir

MODEL = "smollm2-135m"


def test_a_model_is_listed_and_shown(smollm2_home: Folders) -> None:
    (entry,) = json.loads(succeeded(meshinfer(smollm2_home, "model", "list", "--json")))
    assert (entry["name"], entry["source"], entry["precision"]) == (MODEL, MODEL, "q4_1")
    assert (entry["layers"], entry["shard_count"], entry["kv_backends"]) == (30, 32, ["paged", "stateful"])
    table = succeeded(meshinfer(smollm2_home, "model", "list"))
    assert MODEL in table and " MB " in table
    shown = json.loads(succeeded(meshinfer(smollm2_home, "model", "show", MODEL, "--json")))
    assert shown["fingerprint"] == entry["fingerprint"] == Store(smollm2_home).load(MODEL).fingerprint()
    assert [shard["kind"] for shard in shown["shards"]] == ["embedding", *["layer"] * 30, "head"]
    assert {check["kv"]: check["tokens_equal"] for check in shown["verification"]} == {"stateful": True, "paged": True}
    text = succeeded(meshinfer(smollm2_home, "model", "show", MODEL))
    assert entry["fingerprint"] in text and text.count("hidden_states [-1, -1, 576]") == 31


def test_stateful_stages_are_the_unsplit_model_to_the_last_bit(smollm2_home: Folders) -> None:
    options = ("--stages", "3", "--kv", "stateful")
    result = json.loads(succeeded(meshinfer(smollm2_home, "model", "verify", MODEL, *options, "--json")))
    assert (result["name"], result["stages"], result["kv"]) == (MODEL, 3, "stateful")
    assert (result["max_abs_diff"], result["tokens_equal"], result["top1_agreement"]) == (0.0, True, 1.0)


def test_verify_prints_its_numbers_for_people(tiny_home: Folders) -> None:
    result = meshinfer(tiny_home, "model", "verify", "tiny", "--kv", "stateful")
    assert succeeded(result) == (
        "tiny, 1 stage, stateful: max_abs_diff 0, tokens_equal true, top1_agreement 1 over 36 tokens\n"
    )


def test_adding_again_changes_nothing_and_removing_leaves_nothing(
    tiny_home: Folders, copy_home: Callable[[Folders], Folders]
) -> None:
    folders = copy_home(tiny_home)
    source = str(tiny_home.home.parent / "tiny.gguf")
    before = listing(folders)
    added = json.loads(succeeded(meshinfer(folders, "model", "add", source, "--json")))
    assert added["name"] == "tiny" and added["shard_count"] == 4
    assert listing(folders) == before
    size = sum(size for name, size in before.items() if name.startswith("blobs/"))
    removed = json.loads(succeeded(meshinfer(folders, "model", "rm", "tiny", "--json")))
    assert removed == {"name": "tiny", "freed_bytes": size}
    assert listing(folders) == {}
    assert json.loads(succeeded(meshinfer(folders, "model", "list", "--json"))) == []
    assert "no models yet" in succeeded(meshinfer(folders, "model", "list"))


def test_two_processes_that_add_the_same_model_do_the_work_once(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "home")
    words = command(folders, "model", "add", str(make_gguf(tmp_path / "m.gguf")))
    pair = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert "".join(errors for _, errors in outputs).count("cutting into shards") == 1
    assert all("m: 4 shards" in text for text, _ in outputs)
    for ref in Store(folders).load("m").files:
        Store(folders).check(ref)
    assert list(folders.work.iterdir()) == []


def test_a_repository_is_added_from_the_hub_that_the_environment_names(
    tmp_path: Path, tiny_home: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prepare(str(tiny_home.home.parent / "tiny.gguf"), Folders(tmp_path / "other")) as made:
        names = ("openvino_model.xml", "openvino_model.bin", "tokenizer.json", "tokenizer_config.json")
        files = {name: (made.folder / name).read_bytes() for name in names}
    files["config.json"] = b'{"max_position_embeddings": 512, "model_type": "llama"}'
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve(Hub(files, large=frozenset({"openvino_model.bin"}))) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        folders = Folders(tmp_path / "home")
        added = json.loads(succeeded(meshinfer(folders, "model", "add", "org/tiny", "--json")))
        assert (added["name"], added["source"], added["context_tokens"]) == ("tiny", "org/tiny", 512)
        manifest = Store(folders).load("tiny")
        assert manifest.revision == COMMIT
        succeeded(meshinfer(folders, "model", "verify", "tiny"))
        assert any(f"/revision/{COMMIT}" in path for _, path, _ in hub.requests), "verified as it was when it was added"


def test_a_tokenizer_that_cannot_be_used_is_refused_before_the_cut(tmp_path: Path, tiny_home: Folders) -> None:
    folder = _ir_of_tiny(tmp_path, tiny_home)
    (folder / "tokenizer.json").write_text("{}")
    folders = Folders(tmp_path / "home")
    assert "cannot read the tokenizer in" in complaint(meshinfer(folders, "model", "add", str(folder)))
    assert listing(folders) == {}


@pytest.mark.parametrize("harm", [flip_byte, Path.unlink], ids=["flipped", "missing"])
def test_adding_again_mends_what_is_damaged(
    tiny_home: Folders, copy_home: Callable[[Folders], Folders], harm: Callable[[Path], None]
) -> None:
    folders = copy_home(tiny_home)
    store = Store(folders)
    harm(store.path(store.load("tiny").shards[1].weights))
    assert "add the model again" in complaint(meshinfer(folders, "run", "tiny", "hi"))
    added = meshinfer(folders, "model", "add", str(tiny_home.home.parent / "tiny.gguf"))
    assert "making it anew" in added.stderr and "4 shards" in succeeded(added)
    succeeded(meshinfer(folders, "run", "tiny", "hi", "--max-tokens", "2"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("generation_config.json", '{"temperature": NaN}', "says of itself cannot be kept"),
        ("generation_config.json", '{"temperature": 1e999}', "says of itself cannot be kept"),
        ("chat_template.jinja", "{% for", "chat template is damaged"),
        ("config.json", "[" * 100_000, "cannot read"),
    ],
)
def test_what_a_folder_says_of_its_model_is_checked_before_the_work(
    tmp_path: Path, tiny_home: Folders, name: str, text: str, said: str
) -> None:
    folder = _ir_of_tiny(tmp_path, tiny_home)
    (folder / name).write_text(text)
    folders = Folders(tmp_path / "home")
    assert said in complaint(meshinfer(folders, "model", "add", str(folder)))
    assert listing(folders) == {}


def test_a_piped_table_keeps_its_lines(tiny_home: Folders, copy_home: Callable[[Folders], Folders]) -> None:
    folders = copy_home(tiny_home)
    text = succeeded(meshinfer(folders, "model", "list"))
    assert len(text.splitlines()) == 2 and str(tiny_home.home.parent / "tiny.gguf") in text


def _ir_of_tiny(folder: Path, tiny_home: Folders) -> Path:
    with prepare(str(tiny_home.home.parent / "tiny.gguf"), Folders(folder / "other")) as made:
        shutil.copytree(made.folder, folder / "ir", ignore=shutil.ignore_patterns("*.gguf", "tmp"))
    return folder / "ir"


# --- refused ---------------------------------------------------------------------------------------------------------


def no_source(folder: Path) -> str:
    return "nonesuch"


def no_file(folder: Path) -> str:
    return str(folder / "nowhere.gguf")


def ir_without_tokens(folder: Path) -> str:
    return str(make_ir(folder / "ir", inputs=("pixel_values", "attention_mask")))


def ir_without_state(folder: Path) -> str:
    return str(make_ir(folder / "ir"))


def ir_cut_short(folder: Path) -> str:
    weights = make_ir(folder / "ir") / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:-100])
    return str(weights.parent)


def bert(folder: Path) -> str:
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    (folder / "bert" / "model.safetensors").write_bytes(b"x")
    return str(folder / "bert")


def gguf_cut_short(folder: Path) -> str:
    path = make_gguf(folder / "m.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    return str(path)


def gguf_of_nothing(folder: Path) -> str:
    (folder / "m.gguf").write_bytes(b"GGML and other things")
    return str(folder / "m.gguf")


def gguf_of_another_type(folder: Path) -> str:
    return str(make_gguf(folder / "m.gguf", weights="Q5_K"))


def gguf_of_another_architecture(folder: Path) -> str:
    return str(make_gguf(folder / "m.gguf", architecture="mamba"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (no_source, "unknown model source 'nonesuch'; a source is a .gguf file,"),
        (no_file, "no such file or folder"),
        (ir_without_tokens, "is not a language model that generates text: it has no input_ids"),
        (ir_without_state, "this model keeps no state (KV cache): export it with past"),
        (ir_cut_short, "openvino_model.bin is truncated: 2056 bytes expected, 1956 there"),
        (bert, "is not a language model that generates text: it is a bert (BertForMaskedLM)"),
        (gguf_cut_short, "m.gguf is truncated:"),
        (gguf_of_nothing, "m.gguf is not a GGUF file"),
        (gguf_of_another_type, "has type Q5_K, not one of F16, Q4_0"),
        (gguf_of_another_architecture, "its architecture is 'mamba', the GGUF reader knows llama"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_source_that_cannot_work_is_refused_and_nothing_is_left(
    tmp_path: Path, make: Callable[[Path], str], said: str
) -> None:
    folders = Folders(tmp_path / "home")
    assert said in complaint(meshinfer(folders, "model", "add", make(tmp_path)))
    assert listing(folders) == {} and json.loads(succeeded(meshinfer(folders, "model", "list", "--json"))) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "other.gguf", "--name", "tiny"], "'tiny' is here already, made from"),
        (["add", "other.gguf", "--name", "a/b"], "'a/b' is no model name"),
        (["add", "other.gguf", "--name", ""], "'' is no model name"),
        (["add", "other.gguf", "--bits", "4"], "already is f16: bits applies to Hugging Face checkpoints only"),
        (["show", "nonesuch"], "no model 'nonesuch' here (have: tiny)"),
        (["verify", "nonesuch"], "no model 'nonesuch' here (have: tiny)"),
        (["rm", "nonesuch"], "no model 'nonesuch' here (have: tiny)"),
        (["show", "../tiny"], "'../tiny' is no model name"),
        (["verify", "tiny", "--stages", "0"], "tiny has 4 shards: 1 to 4 stages, not 0"),
        (["verify", "tiny", "--stages", "99"], "tiny has 4 shards: 1 to 4 stages, not 99"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_in_one_line(
    tiny_home: Folders, tmp_path: Path, arguments: list[str], said: str
) -> None:
    other = make_gguf(tmp_path / "other.gguf", weights="F16")
    before = listing(tiny_home)
    words = [str(other) if word == other.name else word for word in arguments]
    assert said in complaint(meshinfer(tiny_home, "model", *words))
    assert listing(tiny_home) == before


def test_a_damaged_shard_is_named_with_its_hash(tiny_home: Folders, copy_home: Callable[[Folders], Folders]) -> None:
    folders = copy_home(tiny_home)
    store = Store(folders)
    ref = store.load("tiny").shards[3].weights
    flip_byte(store.path(ref))
    said = complaint(meshinfer(folders, "model", "verify", "tiny"))
    assert ref.sha256 in said and ref.name in said and "damaged" in said


def test_a_damaged_manifest_is_listed_and_can_be_removed(
    tiny_home: Folders, copy_home: Callable[[Folders], Folders]
) -> None:
    folders = copy_home(tiny_home)
    (folders.models / "tiny.json").write_text("{")
    (entry,) = json.loads(succeeded(meshinfer(folders, "model", "list", "--json")))
    assert entry["name"] == "tiny" and "not a model manifest" in entry["error"]
    assert "tiny" in succeeded(meshinfer(folders, "model", "list"))
    source = str(tiny_home.home.parent / "tiny.gguf")
    for words in (["show", "tiny"], ["add", source]):
        said = complaint(meshinfer(folders, "model", *words))
        assert "tiny: not a model manifest" in said and "meshinfer model rm tiny" in said
    succeeded(meshinfer(folders, "model", "rm", "tiny"))
    assert listing(folders) == {}


def test_a_source_that_changed_since_is_told(tmp_path: Path, tiny_home: Folders) -> None:
    folders = Folders(tmp_path / "home")
    shutil.copyfile(tiny_home.home.parent / "tiny.gguf", tmp_path / "m.gguf")
    succeeded(meshinfer(folders, "model", "add", str(tmp_path / "m.gguf")))
    make_gguf(tmp_path / "m.gguf", weights="Q8_0")
    result = meshinfer(folders, "model", "verify", "m")
    assert result.returncode == 1 and "has changed since m was added: revision" in result.stderr
    (tmp_path / "m.gguf").unlink()
    assert "no such file or folder" in complaint(meshinfer(folders, "model", "verify", "m"))


def test_a_disk_without_space_is_told_before_the_work(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    folders = Folders(small_disk(20) / "home")
    said = complaint(meshinfer(folders, "model", "add", str(make_gguf(tmp_path / "m.gguf"))))
    assert "not enough space in" in said and "MB needed" in said and "MB free" in said
    assert listing(folders) == {}
