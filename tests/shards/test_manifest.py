"""The manifest survives JSON, and nothing but a manifest is read as one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import RangeError, SourceError
from meshinfer.shards.manifest import FileRef, Manifest, ShardSpec, TensorSpec, Verification, from_json
from meshinfer.types import Sha256

names = st.text(min_size=1, max_size=12)
sizes = st.integers(0, 1 << 50)
file_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
refs = st.builds(FileRef, file_names, st.text("0123456789abcdef", min_size=64, max_size=64).map(Sha256), sizes)
tensors = st.builds(
    TensorSpec, names, st.sampled_from(["f32", "i64"]), st.lists(st.integers(-1, 9000), max_size=4).map(tuple)
)
shards = st.builds(
    ShardSpec,
    index=st.integers(0, 200),
    kind=st.sampled_from(["embedding", "layer", "head"]),
    graph=refs,
    weights=refs,
    inputs=st.lists(tensors, max_size=2).map(tuple),
    outputs=st.lists(tensors, max_size=2).map(tuple),
    kv_bytes_per_token=sizes,
    fixed_state_bytes=sizes,
)


def in_order(middle: list[ShardSpec]) -> tuple[ShardSpec, ...]:
    """The same shards as an embedding, layers and a head."""
    kinds = ["embedding", *["layer"] * (len(middle) - 2), "head"]
    return tuple(replace(shard, index=i, kind=kind) for i, (shard, kind) in enumerate(zip(middle, kinds, strict=True)))


finite = st.floats(allow_nan=False, allow_infinity=False)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
verifications = st.builds(
    Verification,
    st.integers(1, 9),
    st.sampled_from(["paged", "stateful"]),
    sizes,
    finite,
    st.booleans(),
    finite,
    finite,
)
manifests = st.builds(
    Manifest,
    name=names,
    source=st.text(max_size=20),
    revision=st.text(max_size=8),
    precision=st.sampled_from(["int4", "fp16"]),
    context_tokens=st.integers(1, 1 << 50),
    shards=st.lists(shards, min_size=2, max_size=4).map(in_order),
    tokenizer=st.lists(refs, max_size=2).map(tuple),
    chat_template=st.none() | st.text(max_size=30),
    generation=st.dictionaries(st.text(max_size=8), json_values, max_size=3),
    verification=st.lists(verifications, max_size=2).map(tuple),
    bits=st.none() | st.integers(2, 16),
    versions=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2),
)
manifests |= st.builds(lambda made, ref: replace(made, golden=(ref,) * len(made.shards)), manifests, refs)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, inner in items for path in paths(inner, (*at, key)))]


@given(manifests)
def test_round_trip(manifest: Manifest) -> None:
    back = from_json(manifest.to_json())
    assert back == manifest
    assert back.fingerprint() == manifest.fingerprint()
    assert from_json(manifest.to_json().encode()) == manifest


@given(manifests, names)
def test_the_fingerprint_is_that_of_the_model_not_of_its_name_or_place(manifest: Manifest, name: str) -> None:
    elsewhere = replace(
        manifest, name=name, source=f"/home/{name}", revision=name, verification=(), versions={}, golden=()
    )
    assert elsewhere.fingerprint() == manifest.fingerprint()
    changed = replace(manifest, context_tokens=manifest.context_tokens + 1)
    assert changed.fingerprint() != manifest.fingerprint()


@given(manifests, st.data())
def test_a_manifest_that_lacks_something_is_a_source_error(manifest: Manifest, data: st.DataObject) -> None:
    document = json.loads(manifest.to_json())
    fixed = [path for path in paths(document) if path and isinstance(path[-1], str) and not _OPTIONAL & set(path)]
    *where, key = data.draw(st.sampled_from(fixed))
    parent = document
    for step in where:
        parent = parent[step]
    del parent[key]
    with pytest.raises(SourceError):
        from_json(json.dumps(document))


@given(manifests, st.data())
def test_a_truncated_manifest_is_a_source_error(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_json()
    with pytest.raises(SourceError):
        from_json(text[: data.draw(st.integers(0, len(text) - 1))])


@given(json_values)
def test_other_json_is_a_source_error(value: Any) -> None:
    with pytest.raises(SourceError):
        from_json(json.dumps(value))


@given(manifests, st.data(), json_values)
def test_a_changed_manifest_is_read_or_refused_but_never_crashes(
    manifest: Manifest, data: st.DataObject, value: Any
) -> None:
    document = json.loads(manifest.to_json())
    *where, key = data.draw(st.sampled_from([path for path in paths(document) if path]))
    parent = document
    for step in where:
        parent = parent[step]
    parent[key] = value
    try:
        read = from_json(json.dumps(document))
    except SourceError:
        return
    assert isinstance(read, Manifest)


@given(st.binary(max_size=40))
def test_bytes_that_are_not_json_are_a_source_error(content: bytes) -> None:
    with pytest.raises(SourceError):
        from_json(content)


@given(manifests, st.integers(-2, 5), st.integers(-2, 5))
def test_ranges(manifest: Manifest, start: int, stop: int) -> None:
    if 0 <= start < stop <= len(manifest.shards):
        assert manifest.range(start, stop) == manifest.shards[start:stop]
    else:
        with pytest.raises(RangeError):
            manifest.range(start, stop)


_OPTIONAL = {"generation", "versions", "bits", "golden", "fixed_state_bytes"}
"""Keys that have a default, or whose content is free."""


@given(manifests, refs)
def test_golden_activations_of_some_shards_only_are_a_source_error(manifest: Manifest, ref: FileRef) -> None:
    with pytest.raises(SourceError, match="of some shards only"):
        from_json(replace(manifest, golden=(ref,)).to_json())


@given(manifests)
def test_shards_out_of_order_are_a_source_error(manifest: Manifest) -> None:
    with pytest.raises(SourceError):
        from_json(replace(manifest, shards=manifest.shards[::-1]).to_json())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size_bytes", "abc"),
        ("size_bytes", -1),
        ("sha256", "0" * 63),
        ("sha256", "../../etc/passwd"),
        ("name", "../openvino_tokenizer.xml"),
        ("name", ""),
    ],
)
@given(manifests)
def test_a_file_that_cannot_be_is_a_source_error(key: str, value: Any, manifest: Manifest) -> None:
    document = json.loads(manifest.to_json())
    document["shards"][0]["graph"][key] = value
    with pytest.raises(SourceError):
        from_json(json.dumps(document))


def test_json_nested_too_deep_is_a_source_error() -> None:
    with pytest.raises(SourceError):
        from_json("[" * 100_000)
