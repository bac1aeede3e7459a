"""Models from the Hugging Face hub: first what a repository holds, then only the files that are needed.

Endpoint, token, proxies and offline mode are huggingface_hub's own (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from meshinfer.config import Folders
from meshinfer.errors import CorruptFileError, SourceError
from meshinfer.files import disk
from meshinfer.files.hashing import digest_file
from meshinfer.files.progress import Progress
from meshinfer.sources.folder import FAST_TOKENIZER, OPENVINO_TOKENIZER, TOKENIZER_SOURCES, check_config, read_json
from meshinfer.sources.resume import fetch_resumable
from meshinfer.sources.source import CONFIG, IR_GRAPH, IR_WEIGHTS, is_checkpoint, is_weights

_DESCRIPTIONS = (CONFIG, "generation_config.json", "chat_template.jinja", "chat_template.json")
_CHECKPOINT_TOKENIZER = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_TIMEOUT_S = 15.0
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file of a repository and the hash its bytes must have: SHA-256 if large, else git's."""

    name: str
    size_bytes: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True, slots=True)
class RepoListing:
    """The files of a repository at one commit that a model needs."""

    repo: str
    commit: str
    kind: Literal["ir", "checkpoint"]
    files: tuple[RepoFile, ...]


def list_repo(repo: str, revision: str, endpoint: str | None = None) -> RepoListing:
    """Ask the hub what a repository holds. Raises SourceError where it cannot be asked or holds no model."""
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        try:
            api = HfApi(endpoint=endpoint)
            info = api.model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
            files = [_file(sibling) for sibling in info.siblings or []]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise SourceError(f"what the hub says of {repo} makes no sense: {error}; check HF_ENDPOINT") from error
    if not _COMMIT.fullmatch(str(info.sha)):
        raise SourceError(f"the hub calls the commit of {repo} '{info.sha}', which is none; check HF_ENDPOINT")
    kind, needed = choose([file.name for file in files], repo)
    return RepoListing(repo, str(info.sha), kind, tuple(file for file in files if file.name in needed))


def choose(names: Iterable[str], repo: str) -> tuple[Literal["ir", "checkpoint"], frozenset[str]]:
    """Which of a repository's files a model needs: those of its IR if it has one, else those of its checkpoint."""
    names = set(names)
    if {IR_GRAPH, IR_WEIGHTS} <= names:
        tokenizer = FAST_TOKENIZER if FAST_TOKENIZER[0] in names else OPENVINO_TOKENIZER
        _demand_tokenizer(names, (FAST_TOKENIZER[0], OPENVINO_TOKENIZER[0]), repo)
        return "ir", frozenset(names & {IR_GRAPH, IR_WEIGHTS, *_DESCRIPTIONS, *tokenizer})
    if is_checkpoint(names):
        _demand_tokenizer(names, TOKENIZER_SOURCES, repo)
        weights = {name for name in names if is_weights(name)}
        safe = {name for name in weights if name.endswith(".safetensors")}
        chosen = safe or weights
        suffix = ".safetensors.index.json" if safe else ".bin.index.json"
        indexes = {name for name in names if name.endswith(suffix) and "/" not in name}
        return "checkpoint", frozenset(
            chosen | indexes | names & {*_DESCRIPTIONS, *FAST_TOKENIZER, *_CHECKPOINT_TOKENIZER}
        )
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    if ggufs:
        raise SourceError(
            f"{repo} holds GGUF files ({', '.join(ggufs[:3])}...): download one ('hf download {repo} {ggufs[0]}') "
            "and give its path"
        )
    raise SourceError(f"{repo} holds neither an OpenVINO IR ({IR_GRAPH}) nor a checkpoint ({CONFIG} and weights)")


def _demand_tokenizer(names: Collection[str], wanted: Sequence[str], repo: str) -> None:
    if not any(name in names for name in wanted):
        raise SourceError(f"{repo} has no tokenizer: it needs one of {', '.join(wanted)}")


def download(listing: RepoListing, folders: Folders, progress: Progress, endpoint: str | None = None) -> Path:
    """The folder with the listed files, each checked against its hash; what is there and right is not fetched again.

    Raises SourceError, CorruptFileError (the file is removed) or NoSpaceError.
    """
    target = folders.downloads / "hub" / listing.repo.replace("/", "--") / listing.commit
    with disk.converted(target):
        target.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{listing.commit}.lock"):
            _complete(listing, target, progress, endpoint)
    return target


def _complete(listing: RepoListing, target: Path, progress: Progress, endpoint: str | None) -> None:
    missing = [file for file in listing.files if _wrong_hash(target / file.name, file) is not None]
    disk.require_space(target, sum(file.size_bytes for file in missing))
    total = sum(file.size_bytes for file in listing.files)
    done = total - sum(file.size_bytes for file in missing)
    for file in sorted(missing, key=lambda file: (file.name != CONFIG, file.size_bytes)):
        _fetch(listing, file, target, partial(_report, progress, done, total), endpoint)
        done += file.size_bytes
        if file.name == CONFIG and listing.kind == "checkpoint":
            check_config(read_json(target / CONFIG), listing.repo)
    progress("download", total, total)


def _report(progress: Progress, before: int, total: int, done: int) -> None:
    progress("download", min(before + done, total), total)


def _fetch(
    listing: RepoListing, file: RepoFile, target: Path, report: Callable[[int], None], endpoint: str | None
) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # lazily defined there
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    part = target / f"{file.name}.part"
    url = hf_hub_url(listing.repo, file.name, revision=listing.commit, endpoint=endpoint)
    with _hub_errors(listing.repo, listing.commit):
        fetch_resumable(get_session(), url, build_hf_headers(), part, file.size_bytes, hf_raise_for_status, report)
        wrong = _wrong_hash(part, file)
        if wrong is None:
            disk.replace(part, target / file.name)
            return
        part.unlink(missing_ok=True)
    raise CorruptFileError(f"{file.name} of {listing.repo}", *wrong)


def _file(sibling: Any) -> RepoFile:
    sha256 = getattr(sibling.lfs, "sha256", None) if sibling.lfs else None
    return RepoFile(str(sibling.rfilename), int(sibling.size or 0), sha256, sibling.blob_id)


def _wrong_hash(path: Path, file: RepoFile) -> tuple[str, str, str] | None:
    """(expected, actual, of what) where the file on disk is not the listed one; None where it is."""
    kind = "sha256" if file.sha256 else "git sha1"
    if not path.is_file():
        return file.sha256 or file.git_sha1 or "", "missing", kind
    size = path.stat().st_size
    if size != file.size_bytes:
        return str(file.size_bytes), str(size), "size in bytes"
    expected = file.sha256 or file.git_sha1
    if expected is None:
        return None
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    actual = digest_file(path, digest)
    return None if actual == expected else (expected, actual, kind)


@contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Every way the hub can fail, in one line that says what to do."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise SourceError(
            f"{repo} is gated: accept its terms on its page, then log in with 'hf auth login' or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{repo} has no revision '{revision}'") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(
            f"no repository '{repo}' at the hub that you may read: check the spelling; if it is private, "
            "log in with 'hf auth login' or set HF_TOKEN"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise SourceError(f"cannot ask for {repo}: HF_HUB_OFFLINE is set") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        refused = {401: "log in with 'hf auth login' or set HF_TOKEN", 403: "your account may not read it"}
        what = refused.get(status, "it has no such file" if status == 404 else "try again later")
        raise SourceError(f"the hub answered {status or 'nothing'} for {repo}: {what}") from error
    except (httpx.HTTPError, errors.LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise SourceError(
            f"cannot reach the hub for {repo}: check the network and HF_ENDPOINT, or give a folder or .gguf file"
        ) from error
    except errors.HFValidationError as error:
        raise SourceError(f"'{repo}' is no repository name: {error}") from error
    except OSError as error:
        raise SourceError(f"could not download {repo}: {error.strerror or error}") from error
