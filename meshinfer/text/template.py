"""Chat messages to one prompt, by the Jinja template that came with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshinfer.errors import InputError, SourceError


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's words for training; here it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template in a sandbox, with what templates on the hub expect to find there.

    Without a template the contents of the messages are joined by line breaks, as a base model would have them.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """Raises SourceError where the template is no valid Jinja."""
        self.has_template = source is not None
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                raise SourceError(f"the model's chat template is damaged: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for these messages; `extra` are a template's own switches, such as `enable_thinking`.

        Raises InputError where the template refuses the messages.
        """
        if self._template is None:
            return "\n".join(str(message.get("content") or "") for message in messages)
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **(extra or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise InputError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program, and may fail in any way
            raise InputError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
