"""The chat template of a GGUF, rendered in a sandbox as transformers renders it."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, meta, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specserve.api.answer import AnswerReader, Arguments, Call
from specserve.api.call_formats import FORMATS, formats_of, thinking_tags
from specserve.api.prompt import Prepare
from specserve.api.request_schema import ChatRequest
from specserve.api.tools import Tool
from specserve.engine.llama_model import LlamaModel
from specserve.errors import RequestError
from specserve.grammar.tool_calls import CallSyntax

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Messages = Sequence[Message]

# llama.cpp knows fifty templates by name; only `chatml` is found in files.
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Mistral's templates demand call ids of this length.
_SHORT = 9
# The most loop steps and macro calls of a rendering, which take about a second: nested loops could run for years.
_MAX_STEPS, _STEP = 1_000_000, "specserve_step"
# Stands in for a message's content; no template contains it.
_MARKER = "\ue000last message\ue000"
# Qwen2.5-Coder's template shows the form of a tool call with doubled braces, and its models then write them; that of
# Qwen2.5 has single ones.
_DOUBLED, _SINGLE = (
    f'{begin}\\"name\\": <function-name>, \\"arguments\\": <args-json-object>{end}'
    for begin, end in (("{{", "}}"), ("{", "}"))
)
# What transformers masks for training is a scope like that of Jinja's `with`.
_GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation\b")
# Tools and arguments of calls that a template is tried with; the ids are as Mistral's templates demand.
_PROBES = {"probe_one": {"city": "Rome"}, "probe_two": {"city": "Oslo"}}
# The template variables that switch reasoning, set by `reasoning_effort`.
_THINKING: dict[bool, dict[str, Any]] = {
    thinks: {"enable_thinking": thinks, "thinking": thinks} for thinks in (False, True)
}


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which templates may grow and shrink lists, which are copies, as that of Kimi K2 does."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in {"append", "pop"}) or super().is_safe_attribute(obj, attr, value)


class ChatTemplate:
    """Renders the chat template of a GGUF, which is untrusted code, in Jinja's sandbox.

    `problem` says why it cannot be used; None if it can. `source` may also be a name that llama.cpp knows.
    """

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        # Like the one of transformers.
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
        # Jinja's own filter escapes HTML; chat templates expect this one.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self.problem: str | None = None
        source = _GENERATION.sub(r"\1with", source.replace(_DOUBLED, _SINGLE))
        self._wants_short_ids = f"length != {_SHORT}" in source
        self._no_tools: list[Any] | None = None
        # The name of the format in which the model writes calls, and how many of two in a message the template shows.
        self.format, self._shown = "", len(_PROBES)
        try:
            parsed = environment.parse(_CHATML if source == "chatml" else source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(parsed)
            repeated: list[nodes.For | nodes.Macro] = [*parsed.find_all(nodes.For), *parsed.find_all(nodes.Macro)]
            for node in repeated:
                node.body.insert(0, nodes.ExprStmt(nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)))
            self._template = environment.from_string(parsed)
        except Exception as error:  # noqa: BLE001 - whatever a template raises is its fault
            self.problem = f"it does not compile: {_reason(error)}"
            self.format, self.thinking = "any", None
            return
        history = self._history()
        # Some templates put their tags together.
        marked = source + (history or "")
        self.thinking = thinking_tags(marked)
        self._choose_format(formats_of(marked), history)
        self.problem = self._trial_problem()
        if self.problem:
            # Some templates iterate over tools in any case.
            self._no_tools = []
            if self._trial_problem() is None:
                self.problem = None
            else:
                self._no_tools = None

    @property
    def calls(self) -> CallSyntax:
        """How the model writes tool calls."""
        return FORMATS[self.format][1]

    def _history(self) -> str | None:
        """Return what the template makes of calls of earlier turns, None if it refuses them."""
        calls = [
            {"id": name.replace("_", ""), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in _PROBES.items()
        ]
        messages: list[Message] = [{"role": "user", "content": _MARKER}]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
        messages += [{"role": "tool", "content": "", "tool_call_id": call["id"]} for call in calls]
        tools = [{"type": "function", "function": {"name": name}} for name in _PROBES] if self._knows_tools else []
        with suppress(RequestError):
            shown = [Tool.model_validate(tool).for_template() for tool in tools]
            return self.render(messages, shown).rpartition(_MARKER)[2]
        return None

    def _choose_format(self, formats: list[str], history: str | None) -> None:
        """Choose the format in which the template writes calls of earlier turns, else the first one."""
        self.format = formats[0]
        if history and _PROBES["probe_one"]["city"] in history:
            # Where none reads it, the template writes a form that the table does not have.
            self.format = next((name for name in formats if _reads(name, history)), "any")
        self._shown = len(_PROBES) if history is None else sum(name in history for name in _PROBES)
        # A template's own tool format is used only if the table of formats has it.
        self._knows_tools &= self.format != "any"

    def prompt(self, request: ChatRequest, prepare: Prepare = lambda part: part) -> str:
        """Render the prompt for the assistant's next message; `prepare` is applied to all that comes from the request.

        Raises:
            RequestError: 400; there is no usable template, it refuses these messages, or a field would change it.
        """
        if self.problem is not None:
            raise RequestError(
                f"Chats are off, since the model's chat template cannot be used ({self.problem}); use v1/completions.",
                code="unsupported_value",
            )
        messages = [prepare(message.for_template()) for message in request.messages]
        tools = [prepare(tool.for_template()) for tool in request.tools or [] if request.tool_choice != "none"]
        continues = request.continue_final_message
        variables: dict[str, Any] = {"add_generation_prompt": request.add_generation_prompt and not continues}
        if (effort := request.reasoning_effort) is not None:
            variables |= {"reasoning_effort": effort, **_THINKING[effort != "none"]}
        if request.structure or request.requires_call:
            # Its form holds from the first token on and would forbid the reasoning.
            variables |= _THINKING[False]
        variables |= prepare(request.chat_template_kwargs or {})
        if not continues:
            # A form that holds from the first token on leaves the model no room for a header.
            plain = request.structure and not request.callable_tools and self.thinking and self.thinking.headers
            text = self.render(messages, tools, variables)
            return text + plain[-1] if plain and not text.endswith(plain[-1]) else text
        marked = self.render([*messages[:-1], {**messages[-1], "content": _MARKER}], tools, variables)
        before, found, _ = marked.rpartition(_MARKER)
        if not found:
            sentence = "The chat template leaves out or changes the final message, so it cannot be continued."
            raise RequestError.invalid("continue_final_message", sentence)
        return before + str(messages[-1]["content"])

    def render(self, messages: Messages, tools: Messages = (), variables: Mapping[str, Any] | None = None) -> str:
        """Render messages and tools, and the beginning of the next message unless a variable says otherwise.

        Raises:
            RequestError: 400; the template refuses these messages.
        """
        try:
            return self._rendered(messages, tools, variables or {})
        except Exception as error:
            with suppress(Exception):
                return self._rendered(messages, tools, variables or {}, is_refused=True)
            calls = [call for message in messages for call in message.get("tool_calls") or ()]
            if all(isinstance(call["function"]["arguments"], Mapping) for call in calls):
                reason = _reason(error)
            else:
                reason = "the arguments of a tool call are no JSON object; leave out calls that `max_tokens` cut off"
            sentence = f"The model's chat template refuses these messages: {reason}."
            raise RequestError.invalid("messages", sentence) from error

    def _rendered(
        self, messages: Messages, tools: Messages, variables: Mapping[str, Any], *, is_refused: bool = False
    ) -> str:
        """Render messages; after a refusal with one call a message, or without a system message."""
        if self._wants_short_ids:
            messages = [*map(_with_short_ids, messages)]
        if self.format == "any" or (not self._shown and not self._knows_tools):
            messages = self._as_text(messages)
        elif not self._shown:
            messages = [*map(self._written, messages)]
        elif self._shown == 1 or (is_refused and self._knows_tools):
            messages = _one_call_each(messages)
        if tools and not self._knows_tools:
            messages = self._told(messages, tools, role="user" if is_refused else "system")
        # As transformers calls templates, many of which test `tools is none`.
        shown = (self._knows_tools and tools) or self._no_tools
        fixed = {"messages": messages, "tools": shown, "documents": None, _STEP: _counter(), **self._tokens}
        return self._template.render({"add_generation_prompt": True, **variables, **fixed})

    def _as_text(self, messages: Messages) -> list[Message]:
        """Write calls and results as text."""
        told: list[Message] = []
        after_answer = False
        for message in messages:
            content, is_answer = message["content"], message["role"] == "tool"
            if is_answer:
                content = f"<tool_response>\n{content}\n</tool_response>"
            if (is_answer or (after_answer and message["role"] == "user")) and told and told[-1]["role"] == "user":
                # Many templates demand that roles alternate.
                told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{content}"}
                continue
            after_answer = is_answer
            told.append({"role": "user", "content": content} if is_answer else self._written(message))
        return told

    def _told(self, messages: Messages, tools: Messages, *, role: str) -> list[Message]:
        """List the tools in the first message, which has the role `role`."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = self.calls.forms[0].write([{"name": "the function's name", "arguments": {"argument": "value"}}])
        text = f"These functions can be called:\n{listed}\n\nTo call one, write\n{example}"
        has_first = messages[0]["role"] == role
        both = [messages[0]["content"] if has_first else "", text]
        both = both if role == "system" else both[::-1]
        return [{"role": role, "content": "\n\n".join(filter(None, both))}, *messages[has_first:]]

    def _written(self, message: Message) -> Message:
        """Write the calls of a message as text."""
        calls = self.calls.forms[0].write([call["function"] for call in message.get("tool_calls", ())])
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**kept, "content": "\n".join(filter(None, [message["content"], calls]))}

    def _trial_problem(self) -> str | None:
        """Say why a question cannot be rendered; it is fine if the template demands a system message."""
        try:
            text = self._rendered([{"role": "user", "content": _MARKER}], (), {})
        except Exception as error:  # noqa: BLE001 - as above
            # Errors of Jinja's own have a subclass: this one is the template's `raise_exception`.
            return None if type(error) is TemplateError else f"it fails: {_reason(error)}"
        return None if _MARKER in text else "it leaves out the text of a message"


def _reads(name: str, text: str) -> bool:
    """Whether a format reads the first probe's call from a text."""
    (probe, arguments), *_ = _PROBES.items()
    for form in (forms := FORMATS[name][1].forms[:2]):
        # Some forms only begin an answer.
        answer = text[max(0, text.find(form.opening[0])) :]
        parts = AnswerReader(forms, {probe: {} for probe in _PROBES}).read(answer, done=True)
        read = "".join(part.text for part in parts if isinstance(part, Arguments) and part.index == 0)
        if isinstance(parts[0], Call) and parts[0].name == probe and read == json.dumps(arguments):
            return True
    return False


def _one_call_each(messages: Messages) -> list[Message]:
    """Split a message with several calls into one message a call, each followed by its result."""
    split: list[Message] = []
    answers = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    moved: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split += [] if id(message) in moved else [message]
            continue
        for index, call in enumerate(calls):
            split.append({**message, "content": "" if index else message["content"], "tool_calls": [call]})
            if (answer := answers.get(call["id"])) is not None:
                moved.add(id(answer))
                split.append(answer)
    return split


def _with_short_ids(message: Message) -> Message:
    """Replace call ids by nine characters each, as Mistral's templates demand."""

    def short(name: str) -> str:
        return name if len(name) == _SHORT and name.isalnum() else sha256(name.encode()).hexdigest()[:_SHORT]

    given = {"tool_call_id": short(message["tool_call_id"])} if "tool_call_id" in message else {}
    calls = [{**call, "id": short(call["id"])} for call in message.get("tool_calls") or ()]
    return {**message, **given, **({"tool_calls": calls} if calls else {})}


def _reason(error: Exception) -> str:
    """Return an error's message as the end of a sentence, without the lines of the template that Jinja adds."""
    text = str(error.message if isinstance(error, TemplateError) else error)
    return text.rstrip(".") or type(error).__name__


def _counter() -> Callable[[], str]:
    """Return a function that raises when it is called too often."""
    steps = iter(range(_MAX_STEPS))

    def step() -> str:
        if next(steps, None) is None:
            raise TemplateRuntimeError(f"it takes more than {_MAX_STEPS:,} steps")
        return ""

    return step


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def chat_template_of(model: LlamaModel) -> ChatTemplate | None:
    """Return a model's chat template, None if it has none; one that cannot be used is logged."""
    source = model.chat_template()
    template = ChatTemplate(source, bos=model.bos_text(), eos=model.eos_text()) if source else None
    if template and template.problem:
        logger.error("specserve: chats are off, since the chat template cannot be used: %s", template.problem)
    return template
