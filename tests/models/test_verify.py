"""What is refused because it computes something else than the unsplit model."""

from __future__ import annotations

import dataclasses
import re

import pytest

from meshinfer.config import Folders
from meshinfer.engine import paged
from meshinfer.errors import DeviceError, InputError, PagedUnsupportedError, VerificationError
from meshinfer.files.progress import silent
from meshinfer.models import verify
from meshinfer.models.check import unsplit_graph, usable_backend
from meshinfer.models.verify import verify_new
from meshinfer.shards.manifest import Manifest, Verification
from meshinfer.shards.store import Store
from meshinfer.types import KvBackend


@pytest.fixture
def tiny(tiny_home: Folders) -> tuple[Store, Manifest]:
    store = Store(tiny_home)
    return store, store.load("tiny")


def test_a_cut_that_does_not_reproduce_its_model_is_refused_with_the_numbers(tiny: tuple[Store, Manifest]) -> None:
    store, manifest = tiny
    embedding, first, second, head = manifest.shards
    swapped = dataclasses.replace(first, graph=second.graph, weights=second.weights)
    wrong = dataclasses.replace(manifest, shards=(embedding, swapped, second, head))
    with (
        unsplit_graph(store, manifest) as graph,
        pytest.raises(VerificationError, match=r"logits differ by \d.*, \d+% of 36 tokens agree"),
    ):
        verify_new(store, wrong, graph, silent)


@pytest.mark.parametrize("error", [DeviceError("CPU: inference failed"), PagedUnsupportedError("no such pass")])
def test_without_paged_attention_the_stateful_back_end_is_enough(
    tiny: tuple[Store, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(paged.PagedStage, "forward", fails)
    store, manifest = tiny
    with unsplit_graph(store, manifest) as graph:
        passed = verify_new(store, manifest, graph, silent)
    assert [entry.kv for entry in passed] == ["stateful"]
    assert re.search(f"tiny runs without paged KV: {error}", caplog.text)


def test_paged_attention_that_is_off_is_not_used_however_equal_its_tokens(
    tiny: tuple[Store, Manifest], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compare = verify.compare

    def off(*arguments: object) -> object:
        return dataclasses.replace(compare(*arguments), max_abs_diff=0.5)  # type: ignore[arg-type]

    monkeypatch.setattr(verify, "compare", off)
    store, manifest = tiny
    with unsplit_graph(store, manifest) as graph:
        assert [entry.kv for entry in verify_new(store, manifest, graph, silent)] == ["stateful"]
    assert "its logits are off by 0.5" in caplog.text


def test_only_what_was_verified_is_used(tiny: tuple[Store, Manifest]) -> None:
    _, manifest = tiny
    assert usable_backend(manifest) == usable_backend(manifest, "paged") == "paged"
    (stateful,) = (entry for entry in manifest.verification if entry.kv == "stateful")
    hybrid = dataclasses.replace(manifest, verification=(stateful,))
    assert usable_backend(hybrid) == "stateful"
    with pytest.raises(InputError, match="tiny does not run with paged KV, .*; use stateful"):
        usable_backend(hybrid, "paged")
    with pytest.raises(InputError, match="was never verified"):
        usable_backend(dataclasses.replace(manifest, verification=()))


def test_equal_tokens_are_not_enough() -> None:
    def result(kv: KvBackend, difference: float, equal: bool = True) -> bool:
        return Verification(2, kv, 36, difference, equal, 1.0, largest_logit=20.0).reproduced

    assert result("stateful", 0.0) and result("paged", 0.001)
    assert not result("stateful", 1e-9) and not result("paged", 0.2) and not result("paged", 0.0, equal=False)
    assert not result("paged", float("inf")) and not result("paged", float("nan"))
