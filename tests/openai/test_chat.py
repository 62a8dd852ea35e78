"""Chat templates are rendered as by transformers, and in a sandbox."""

from __future__ import annotations

import pytest

from specserve.errors import ModelLoadError, RequestError
from specserve.serving.openai.prompt import ChatTemplate

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <b>"}]


def rendered(source: str) -> str:
    """Two messages rendered with a template."""
    return ChatTemplate(source, bos="<s>", eos="</s>").render(MESSAGES)


def test_messages_are_rendered_as_transformers_does() -> None:
    source = """{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""
    assert rendered("{{ bos_token }}" + source) == "<s><|system|>Be brief.</s><|user|>Hello <b></s><|assistant|>"


def test_functions_that_templates_use_beyond_jinja_are_defined() -> None:
    assert rendered("{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}") == "1"
    assert rendered("{{ strftime_now('%Y') }}").isdigit()
    assert rendered("{{ messages[1] | tojson }}") == '{"role": "user", "content": "Hello <b>"}'


def test_an_exception_raised_by_a_template_is_a_400_with_its_message() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        rendered("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[99].content }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        rendered(source)


def test_an_invalid_template_is_refused_at_load() -> None:
    with pytest.raises(ModelLoadError, match="chat template"):
        ChatTemplate("{% for %}", bos="", eos="")
