"""From sources to IR folders, with the real converters."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshinfer.config import Folders
from meshinfer.errors import InputError, MissingExtraError, NoSpaceError, SourceError
from meshinfer.files import disk
from meshinfer.files.hashing import sha256_file
from meshinfer.sources import convert
from meshinfer.sources.convert import condense, prepare
from meshinfer.text.tokenizer import load_tokenizer
from tests.signals import hear_control_c
from tests.sources.makers import TEMPLATE, make_checkpoint, make_gguf, make_ir


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "home")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def enter(source: str, folders: Folders, bits: int | None = None) -> None:
    with prepare(source, folders, bits=bits):
        pass


def logits(folder: Path, ids: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    import openvino as ov

    compiled = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    tokens = np.array([ids])
    inputs = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.arange(len(ids))[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    return np.array(compiled.create_infer_request().infer(inputs)["logits"])


def test_a_gguf_file_becomes_an_ir_and_its_folder_is_left_alone(tmp_path: Path, folders: Folders) -> None:
    (tmp_path / "user").mkdir()
    path = make_gguf(tmp_path / "user" / "m.gguf")
    steps: list[str] = []
    with prepare(str(path), folders, progress=lambda phase, *_: steps.append(phase)) as model:
        assert model.revision == sha256_file(path)
        assert model.precision == "q4_0"
        assert model.context_tokens == 512
        assert model.generation == {"eos_token_id": [0]}
        assert model.chat_template == TEMPLATE
        assert logits(model.folder, [1, 2, 3]).shape == (1, 3, 264)
        files = {file.name: file for file in model.tokenizer_files}
        assert load_tokenizer(files, folders).encode("hello", add_special=False) == [261]
    assert "convert" in steps
    assert list(path.parent.iterdir()) == [path]
    assert list(folders.work.iterdir()) == []


def test_what_the_converter_refuses_is_one_line(tmp_path: Path, folders: Folders) -> None:
    path = make_gguf(tmp_path / "m.gguf", extra={"llama.block_count": 3})  # one more layer than there is
    with pytest.raises(SourceError, match=r"^m.gguf could not be converted: \S[^\n]*$"):
        enter(str(path), folders)
    assert list(folders.work.iterdir()) == []


def fake_converter(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Put a module in the place of openvino_genai in child processes."""
    folder.mkdir()
    (folder / "openvino_genai.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_crash_of_the_converter_is_an_error_and_not_ours(
    tmp_path: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_converter(tmp_path / "fake", monkeypatch, "import os; os.abort()")
    path = make_gguf(tmp_path / "m.gguf")
    with pytest.raises(SourceError, match=r"m.gguf could not be converted: the converter crashed \(exit code -?\d+\)"):
        enter(str(path), folders)
    assert list(folders.work.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_ends_the_converter_and_cleans_up(
    tmp_path: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"import os\nopen({str(pipe)!r}, 'w').write(str(os.getpid()))\nimport threading; threading.Event().wait()"
    fake_converter(tmp_path / "fake", monkeypatch, code)
    path = make_gguf(tmp_path / "m.gguf")
    program = (
        "import sys; from meshinfer.config import folders; from meshinfer.sources.convert import prepare\n"
        "with prepare(sys.argv[1], folders(sys.argv[2])): pass"
    )
    command = [sys.executable, "-c", program, str(path), str(folders.home)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=hear_control_c) as process:
        child = int(pipe.read_text())
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert list(folders.work.iterdir()) == []


def test_an_ir_folder_is_used_where_it_is(tmp_path: Path, folders: Folders) -> None:
    folder = make_ir(tmp_path / "ir")
    with prepare(str(folder), folders) as model:
        assert model.folder == folder
        first = model.revision
        assert [file.parent for file in model.tokenizer_files] == [folder, folder]
    with prepare(str(folder), folders, bits=16) as model:
        assert model.revision == first
    make_ir(folder, inputs=("input_ids", "attention_mask", "position_ids"))
    with prepare(str(folder), folders) as model:
        assert model.revision != first
    assert folder.is_dir()


def test_bits_are_for_checkpoints(tmp_path: Path, folders: Folders) -> None:
    folder, path = make_ir(tmp_path / "ir"), make_gguf(tmp_path / "m.gguf", weights="Q8_0")
    for source, has in ((folder, "f16"), (path, "q8_0"), ("smollm2-135m", "q4_1")):
        with pytest.raises(InputError, match=f"already is {has}: bits applies to Hugging Face checkpoints only"):
            enter(str(source), folders, bits=32)
    with pytest.raises(InputError, match="bits must be one of 4, 8, 16, 32, not 5"):
        enter("x", folders, bits=5)


def test_a_checkpoint_in_32_bits_computes_what_torch_computes(checkpoint: Path, folders: Folders) -> None:
    import torch
    from transformers import LlamaForCausalLM

    ids = [1, 40, 50, 60, 70]
    with torch.no_grad():
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        expected = model(torch.tensor([ids])).logits.numpy()
    with prepare(str(checkpoint), folders, bits=32) as made:
        assert np.abs(logits(made.folder, ids) - expected).max() < 1e-4
        assert (made.precision, made.context_tokens) == ("f32", 96)
        assert made.generation["eos_token_id"] == [0]
        assert made.chat_template == TEMPLATE
        assert {file.parent for file in made.tokenizer_files} == {checkpoint}
    assert list(folders.work.iterdir()) == []


def test_4_bits_work_for_a_width_that_no_group_of_64_fits(tmp_path: Path, folders: Folders) -> None:
    with prepare(str(make_checkpoint(tmp_path / "ck", width=96)), folders) as made:
        assert made.precision == "int4"
        assert np.isfinite(logits(made.folder, [1, 2, 3])).all()


def test_a_checkpoint_that_optimum_cannot_export_is_one_line(
    checkpoint: Path, tmp_path: Path, folders: Folders
) -> None:
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "config.json").write_text('{"model_type": "nonesuch", "architectures": ["NonesuchForCausalLM"]}')
    with pytest.raises(SourceError, match=r"^broken could not be converted: [^\n]*nonesuch[^\n]*$"):
        enter(str(broken), folders)


def test_a_checkpoint_without_a_tokenizer_is_refused_before_the_export(checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(SourceError, match="has no tokenizer: it needs one of tokenizer.json"):
        enter(str(bare), Folders(tmp_path / "home"))


@pytest.mark.parametrize("package", ["torch", "nncf", "optimum"])
def test_without_the_extra_a_checkpoint_says_what_to_install(
    checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"needs the 'export' extra: pip install '\.\[export\]'"):
        enter(str(checkpoint), folders)


def test_a_full_disk_is_seen_before_the_work(
    tmp_path: Path, checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 10)
    for source in (checkpoint, make_gguf(tmp_path / "m.gguf")):
        with pytest.raises(NoSpaceError):
            enter(str(source), folders)
    assert list(folders.work.iterdir()) == []


def test_a_disk_that_fills_up_while_converting_is_said(
    tmp_path: Path, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_gguf(tmp_path / "m.gguf", weights="Q4_1", layers=16)
    monkeypatch.setattr(disk, "require_space", lambda *_: None)  # as if somebody else took what it had seen
    for size_mb in (1, 4, 7):
        home = Folders(small_disk(size_mb) / "home")
        with pytest.raises(NoSpaceError):
            enter(str(source), home)
        assert list(home.work.iterdir()) == []


def test_a_file_is_copied_where_the_disk_has_no_links(
    tmp_path: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "symlink", refuse)
    (tmp_path / "a").write_text("content")
    convert._place(tmp_path / "a", tmp_path / "b", folders)
    assert (tmp_path / "b").read_text() == "content"


def test_a_long_error_becomes_one_line() -> None:
    text = "Exception from src/x.cpp:716:\nUnsupported quantization type\n\n"
    assert condense(text) == "Unsupported quantization type"
    assert (
        condense("Check 'model == \"gpt2\"' failed at src/y.cpp:550")
        == "Check 'model == \"gpt2\"' failed at src/y.cpp:550"
    )
    assert len(condense("x " * 1000)) == 300
