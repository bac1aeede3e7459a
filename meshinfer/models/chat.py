"""Ask a stored model a question through stages in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshinfer.config import Folders
from meshinfer.engine.devices import resolve
from meshinfer.engine.generate import answer_room, generate
from meshinfer.engine.pipeline import even_cuts, open_pipeline
from meshinfer.engine.sampling import Sampling
from meshinfer.engine.stage import StageOptions
from meshinfer.errors import InputError, ModelNotFoundError
from meshinfer.files.progress import Progress, silent
from meshinfer.models.add import add_model
from meshinfer.models.check import usable_backend
from meshinfer.shards.manifest import Manifest
from meshinfer.shards.store import Store
from meshinfer.sources.aliases import ALIASES
from meshinfer.text.detokenizer import Detokenizer
from meshinfer.text.template import ChatTemplate
from meshinfer.text.tokenizer import Tokenizer, load_tokenizer
from meshinfer.types import KvBackend, Precision


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to run the model; None chooses for the user."""

    stages: int = 1
    kv: KvBackend | None = None
    precision: Precision = "fast"
    device: str = "cpu"
    threads: int | None = None
    kv_budget_bytes: int | None = None


class Answer:
    """The text of one answer as it comes. `tokens` counts what has been produced so far, of at most `room`."""

    def __init__(self, ids: Iterator[int], tokenizer: Tokenizer, prompt_tokens: int, room: int) -> None:
        self._ids, self._text = ids, Detokenizer(tokenizer)
        self.prompt_tokens, self.tokens, self.room = prompt_tokens, 0, room

    def __iter__(self) -> Iterator[str]:
        for token in self._ids:
            self.tokens += 1
            if piece := self._text.push([token]):
                yield piece
        if rest := self._text.flush():
            yield rest


class Chat:
    """A stored model with its tokenizer and template."""

    def __init__(self, store: Store, manifest: Manifest, options: ChatOptions) -> None:
        self._store, self._manifest, self._options = store, manifest, options
        for ref in manifest.tokenizer:
            store.check(ref)
        self.tokenizer = load_tokenizer({ref.name: store.path(ref) for ref in manifest.tokenizer}, store.folders)
        self.template = ChatTemplate(manifest.chat_template, self.tokenizer.special_tokens)

    @classmethod
    def prepare(cls, folders: Folders, name: str, options: ChatOptions, progress: Progress = silent) -> Chat:
        """Find the model; a known alias is added where it is missing. Raises ModelNotFoundError and all of adding."""
        store = Store(folders)
        if "/" in name or "\\" in name:
            raise InputError(f"'{name}' is a source, not the name of a model here: meshinfer model add {name}")
        try:
            manifest = store.load(name)
        except ModelNotFoundError:
            if name not in ALIASES:
                raise
            manifest = add_model(store, name, progress=progress)
        return cls(store, manifest, options)

    def encode(self, messages: Sequence[Mapping[str, Any]], *, raw: bool = False) -> list[int]:
        """Token ids of a conversation, or of its last message as plain text."""
        if raw:
            return self.tokenizer.encode(str(messages[-1]["content"]), add_special=True)
        rendered = self.template.render(messages)
        return self.tokenizer.encode(rendered, add_special=not self.template.has_template)

    @contextmanager
    def answer(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, max_tokens: int, *, raw: bool = False
    ) -> Iterator[Answer]:
        """Compile the stages and stream one answer. Raises ContextLengthError, KvBudgetError, DeviceError."""
        manifest, options = self._manifest, self._options
        prompt = self.encode(messages, raw=raw)
        room = answer_room(len(prompt), manifest.context_tokens, max_tokens)
        kv = usable_backend(manifest, options.kv)
        device = resolve(options.device)
        positions = len(prompt) + room + 2 * device.kv_block_tokens
        budget = options.kv_budget_bytes or manifest.kv_bytes_per_token * positions
        stage_options = StageOptions(device, kv, options.precision, budget, options.threads)
        cuts = even_cuts(manifest, options.stages)
        with open_pipeline(self._store, manifest, cuts, stage_options) as pipeline:
            eos = {*manifest.generation.get("eos_token_id", ()), *self.tokenizer.eos_ids}
            ids = generate(
                pipeline,
                prompt,
                max_tokens=room,
                context_tokens=manifest.context_tokens,
                sampling=sampling,
                eos_ids=eos,
            )
            yield Answer(ids, self.tokenizer, len(prompt), room)
