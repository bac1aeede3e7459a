"""The hub client against a hub on loopback."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshinfer.config import Folders
from meshinfer.errors import CorruptFileError, NoSpaceError, SourceError
from meshinfer.files import disk
from meshinfer.files.progress import silent
from meshinfer.sources import hub, resume
from meshinfer.sources.convert import prepare
from tests.sources.hub_server import COMMIT, Hub, serve, sha256
from tests.sources.makers import make_ir

WEIGHTS = bytes(range(256)) * 2000


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(resume, "CHUNK_BYTES", 50_000)  # what a cut connection loses at most


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "home")


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Hub]:
    """A repository with an IR, its companions, and much else."""
    folder = make_ir(tmp_path / "made")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files |= {"README.md": b"# read me", "model.safetensors": b"x" * 100, "openvino_tokenizer.xml": b"<net/>"}
    files |= {"onnx/model.onnx": b"x", ".gitattributes": b""}
    with serve(Hub(files, large=frozenset({"openvino_model.bin"}))) as server:
        yield server


def test_an_ir_repository_gives_its_needed_files_and_no_others(tiny: Hub, folders: Folders) -> None:
    with prepare("org/tiny", folders, endpoint=tiny.url) as model:
        assert model.revision == COMMIT
        assert model.precision == "f16"
        assert model.context_tokens == 77
        assert model.generation == {"eos_token_id": [0]}
    needed = {"openvino_model.xml", "openvino_model.bin", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert sorted(tiny.downloads()) == sorted(needed)


def test_what_is_there_and_right_is_not_fetched_again(tiny: Hub, folders: Folders) -> None:
    listing = hub.list_repo("org/tiny", "main", tiny.url)
    folder = hub.download(listing, folders, silent, tiny.url)
    before = len(tiny.downloads())
    assert hub.download(listing, folders, silent, tiny.url) == folder
    assert len(tiny.downloads()) == before
    damaged = bytearray((folder / "openvino_model.bin").read_bytes())
    damaged[0] ^= 1
    (folder / "openvino_model.bin").write_bytes(damaged)
    (folder / "config.json").write_bytes(b"{}")
    hub.download(listing, folders, silent, tiny.url)
    assert sorted(tiny.downloads()[before:]) == ["config.json", "openvino_model.bin"]
    assert sha256((folder / "openvino_model.bin").read_bytes()) == sha256(tiny.files["openvino_model.bin"])


def test_progress_ends_at_the_total(tiny: Hub, folders: Folders) -> None:
    steps: list[tuple[str, int, int]] = []
    listing = hub.list_repo("org/tiny", "main", tiny.url)
    hub.download(listing, folders, lambda *step: steps.append(step), tiny.url)
    total = sum(file.size_bytes for file in listing.files)
    done = [step[1] for step in steps]
    assert done == sorted(done)
    assert steps[-1] == ("download", total, total)


def two_files(**wrong: object) -> Hub:
    files = {"config.json": b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}'}
    files |= {"model.safetensors": WEIGHTS, "vocab.json": b"{}"}
    return Hub(files, large=frozenset({"model.safetensors"}), **wrong)  # type: ignore[arg-type]


def test_a_cut_connection_is_resumed_where_it_broke(folders: Folders) -> None:
    with serve(two_files(cut={"model.safetensors": [100_000]})) as server:
        folder = hub.download(hub.list_repo("org/tiny", "main", server.url), folders, silent, server.url)
        assert server.ranges() == ["bytes=100000-"]
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_the_next_try_goes_on_from_what_a_failed_one_left(folders: Folders) -> None:
    with serve(two_files(cut={"model.safetensors": [200_000, -1]})) as server:
        listing = hub.list_repo("org/tiny", "main", server.url)
        with pytest.raises(SourceError, match="the hub answered 500 for org/tiny"):
            hub.download(listing, folders, silent, server.url)
        folder = hub.download(listing, folders, silent, server.url)
        assert server.ranges() == ["bytes=200000-", "bytes=200000-"]
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_stalled_connection_is_given_up_and_tried_again(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(resume, "_PAUSES_S", (0.0,))
    with serve(two_files(stalled={"model.safetensors"})) as server:
        folder = hub.download(hub.list_repo("org/tiny", "main", server.url), folders, silent, server.url)
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_without_ranges_starts_over(folders: Folders) -> None:
    with serve(two_files(cut={"model.safetensors": [100_000]}, has_ranges=False)) as server:
        folder = hub.download(hub.list_repo("org/tiny", "main", server.url), folders, silent, server.url)
        assert server.ranges() == ["bytes=100000-"]
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_that_is_too_long_is_not_believed(folders: Folders) -> None:
    with serve(two_files(cut={"model.safetensors": [100_000, -1]})) as server:
        listing = hub.list_repo("org/tiny", "main", server.url)
        with pytest.raises(SourceError, match="500"):
            hub.download(listing, folders, silent, server.url)
        (part,) = folders.downloads.rglob("*.part")
        part.write_bytes(bytes(len(WEIGHTS) + 1))
        with pytest.raises(CorruptFileError):
            hub.download(listing, folders, silent, server.url)
        folder = hub.download(listing, folders, silent, server.url)
        assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_wrong_bytes_of_the_right_size_are_refused_and_removed(folders: Folders) -> None:
    wrong = bytes(len(WEIGHTS))
    with serve(two_files(served={"model.safetensors": wrong})) as server:
        listing = hub.list_repo("org/tiny", "main", server.url)
        with pytest.raises(CorruptFileError, match="model.safetensors of org/tiny") as caught:
            hub.download(listing, folders, silent, server.url)
        assert (caught.value.expected, caught.value.actual) == (sha256(WEIGHTS), sha256(wrong))
        assert not list(folders.downloads.rglob("model.safetensors"))


def test_wrong_bytes_of_a_small_file_are_refused_too(folders: Folders) -> None:
    config = two_files().files["config.json"]
    with serve(two_files(served={"config.json": config.replace(b"llama", b"lemma")})) as server:
        listing = hub.list_repo("org/tiny", "main", server.url)
        with pytest.raises(CorruptFileError, match="config.json of org/tiny"):
            hub.download(listing, folders, silent, server.url)


def test_a_checkpoint_that_is_no_language_model_costs_no_weights(folders: Folders) -> None:
    files = two_files().files | {"config.json": b'{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'}
    with serve(Hub(files)) as server:
        listing = hub.list_repo("org/tiny", "main", server.url)
        with pytest.raises(SourceError, match=r"not a language model that generates text: it is a bert"):
            hub.download(listing, folders, silent, server.url)
        assert server.downloads() == ["config.json"]


def test_a_gated_repository_says_to_log_in_and_a_token_opens_it(
    tiny: Hub, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.gated = True
    with pytest.raises(SourceError, match=r"org/tiny is gated: accept its terms .* 'hf auth login' or set HF_TOKEN"):
        hub.list_repo("org/tiny", "main", tiny.url)
    monkeypatch.setenv("HF_TOKEN", "good-token")
    with prepare("org/tiny", folders, endpoint=tiny.url) as model:
        assert model.revision == COMMIT


def test_an_unknown_repository_and_an_unknown_revision_are_told_apart(tiny: Hub) -> None:
    with pytest.raises(SourceError, match="no repository 'org/absent' at the hub that you may read"):
        hub.list_repo("org/absent", "main", tiny.url)
    with pytest.raises(SourceError, match="org/tiny has no revision 'v9'"):
        hub.list_repo("org/tiny", "v9", tiny.url)


def test_no_network_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SourceError, match="cannot reach the hub for org/tiny: check the network and HF_ENDPOINT"):
        hub.list_repo("org/tiny", "main", f"http://127.0.0.1:{port}")


def test_offline_mode_is_said(tiny: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    try:
        with pytest.raises(SourceError, match="cannot ask for org/tiny: HF_HUB_OFFLINE is set"):
            hub.list_repo("org/tiny", "main", tiny.url)
    finally:
        monkeypatch.undo()
        close_session()


@pytest.mark.parametrize("commit", ["/tmp/elsewhere", "../../elsewhere", "abc", None, 7, "0" * 41])
def test_a_commit_that_is_none_names_no_folder(folders: Folders, commit: object) -> None:
    with serve(two_files(commit=commit)) as server, pytest.raises(SourceError, match="calls the commit of org/tiny"):
        hub.list_repo("org/tiny", "main", server.url)
    assert not folders.home.exists()


@pytest.mark.parametrize(
    "said",
    [b"", b"<html>", b"[]", b"null", b"{}", b'{"siblings": [7]}', b'{"siblings": [{"rfilename": "a", "size": "b"}]}'],
)
def test_answers_without_sense_are_one_line(said: bytes) -> None:
    with serve(two_files(said=said)) as server, pytest.raises(SourceError, match="the hub"):
        hub.list_repo("org/tiny", "main", server.url)


def test_a_file_without_end_is_not_read_to_its_end(folders: Folders) -> None:
    with serve(two_files(served={"model.safetensors": WEIGHTS * 20})) as server:
        listing = hub.list_repo("org/tiny", "main", server.url)
        with pytest.raises(CorruptFileError, match=f"size in bytes should be {len(WEIGHTS)}, is"):
            hub.download(listing, folders, silent, server.url)


def test_a_full_disk_is_seen_before_the_download(tiny: Hub, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 10)
    with pytest.raises(NoSpaceError) as caught:
        hub.download(hub.list_repo("org/tiny", "main", tiny.url), folders, silent, tiny.url)
    assert caught.value.free_bytes == 10
    assert tiny.downloads() == []


def test_safetensors_win_over_pickles_and_only_the_root_counts() -> None:
    names = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names += ["model.safetensors.index.json", "tokenizer.json", "generation_config.json"]
    extra = [
        "pytorch_model.bin",
        "original/model.safetensors",
        "model-int8/a.safetensors",
        "model/../../x.safetensors",
        "consolidated.safetensors",
        "modeling_x.py",
        "a.md",
    ]
    extra += ["model-int8/a.safetensors", "model/../../x.safetensors"]
    assert hub.choose(names + extra, "org/x") == ("checkpoint", frozenset(names))
    old = ["config.json", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "tokenizer.model"]
    assert hub.choose(old, "org/x") == ("checkpoint", frozenset(old))


def test_an_ir_without_tokenizer_json_brings_the_openvino_tokenizer() -> None:
    names = {"openvino_model.xml", "openvino_model.bin", "config.json"}
    tokenizer = {f"openvino_{kind}.{ending}" for kind in ("tokenizer", "detokenizer") for ending in ("xml", "bin")}
    assert hub.choose(names | tokenizer | {"vocab.json"}, "org/x") == ("ir", frozenset(names | tokenizer))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model-Q4_0.gguf", "README.md"], "holds GGUF files .*hf download org/x model-Q4_0.gguf"),
        (["README.md"], "holds neither an OpenVINO IR"),
        (["config.json", "model-int8/part.safetensors"], "holds neither an OpenVINO IR"),
        (["openvino_model.xml", "openvino_model.bin"], "has no tokenizer: it needs one of tokenizer.json, openvino"),
        (["config.json", "model.safetensors"], "has no tokenizer: it needs one of tokenizer.json, tokenizer.model"),
        (["config.json", "consolidated.00.pth"], "holds neither an OpenVINO IR"),
    ],
)
def test_repositories_without_a_model_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        hub.choose(names, "org/x")


def test_a_disk_that_fails_midway_is_our_error() -> None:
    with pytest.raises(SourceError, match="could not download org/x: No space left"), hub._hub_errors("org/x", "main"):
        raise OSError(errno.ENOSPC, "No space left on device")
