"""Chat templates as models bring them."""

from __future__ import annotations

import re

import pytest

from meshinfer.errors import InputError, SourceError
from meshinfer.text.template import ChatTemplate

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b> & 'you'"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str | None, **options: object) -> str:
    return ChatTemplate(source, TOKENS).render(MESSAGES, **options)  # type: ignore[arg-type]


CHATML = """
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}
"""

LLAMA = """{{- bos_token }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(n=0) %}
{%- for m in messages if m.role != 'tool' %}
    {% set ns.n = ns.n + 1 %}
[{{ ns.n }}] {{ m['content'] | trim }}{{ eos_token }}
{%- endfor %}"""


def test_a_chatml_template() -> None:
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> & 'you'<|im_end|>\n"
    assert render(CHATML).startswith(chat + "<|im_start|>assistant\n")
    assert render(CHATML, add_generation_prompt=False).startswith(chat)


@pytest.mark.parametrize("source", [CHATML, LLAMA])
@pytest.mark.parametrize("prompt", [False, True])
def test_it_renders_as_transformers_does(source: str, prompt: bool) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    tools = [{"type": "function", "function": {"name": "é", "parameters": {"a": [1, 2]}}}]
    expected = theirs.apply_chat_template(
        MESSAGES, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False
    )
    assert render(source, tools=tools, add_generation_prompt=prompt) == expected


def test_without_a_template_the_contents_are_the_prompt() -> None:
    assert render(None) == "Be brief.\nHi <b> & 'you'"
    assert not ChatTemplate(None, {}).has_template


def test_special_tokens_and_switches_are_variables() -> None:
    assert (
        render("{{ bos_token }}{{ enable_thinking }}{{ eos_token }}", extra={"enable_thinking": False})
        == "<s>False</s>"
    )
    assert render("{{ unk_token is defined }}{{ tools is none }}") == "FalseTrue"


def test_json_is_plain() -> None:
    tools = [{"name": "é<", "n": [1, None]}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "é<", "n": [1, null]}]'
    assert (
        render("{{ tools[0] | tojson(indent=2) }}", tools=tools)
        == '{\n  "name": "é<",\n  "n": [\n    1,\n    null\n  ]\n}'
    )


def test_loop_controls_dates_and_generation_blocks_are_known() -> None:
    assert render("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}x{% endfor %}") == "x"
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert (
        render("{% for m in messages %}{% generation %}{{ m.role }};{% endgeneration %}{% endfor %}") == "system;user;"
    )


def test_a_refusal_of_the_template_is_an_input_error() -> None:
    with pytest.raises(InputError, match="the model's chat template refuses these messages: No system role"):
        render("{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}")


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ absent.x }}", "{{ messages | tojson(indent='x', a=1) }}"],
)
def test_a_failure_of_the_template_is_one_line(source: str) -> None:
    with pytest.raises(InputError, match="the model's chat template") as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ range(10**9) | length }}"],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(InputError, match="the model's chat template"):
        render(source)


def test_a_damaged_template_is_the_sources_fault() -> None:
    with pytest.raises(SourceError, match="the model's chat template is damaged"):
        ChatTemplate("{% for %}", {})
