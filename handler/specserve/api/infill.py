"""The route infill as llama.cpp's editor plug-ins use it: what stands between two texts, in llama.cpp's shape.

The prompt and the response are those of llama.cpp's server (tools/server of ggml-org/llama.cpp: `format_prompt_infill`,
`process_token`, `server_task_result_cmpl_final`). Its sampler `infill` keeps little but the most probable token, so a
request without a temperature is greedy here; which samplers run, and in which order, is not chosen by `samplers`.
"""

import json
import re
from typing import Annotated, Any, ClassVar

from pydantic import Field

from specserve.api.body import Body, Items, Text
from specserve.api.prompt import Prompt, Tokenizer
from specserve.api.request_schema import CompletionRequest, GenerationRequest
from specserve.api.response import GenerationResponse
from specserve.engine.base import Vocabulary
from specserve.errors import RequestError

# Tokens of prefix, prompt and suffix together, as many as llama.cpp's `n_batch` by default; three quarters are the
# prefix's. A smaller context leaves a quarter of itself to the answer and other files.
_LOCAL_TOKENS = 2048
# Indentation beyond it is not told apart, in characters.
_MAX_INDENT = 1024


class File(Body):
    also_known: ClassVar[frozenset[str]] = frozenset({"time"})

    text: Text = ""
    filename: Text = "tmp"


class InfillRequest(GenerationRequest):
    """The body of infill: the text before and after the gap, `prompt` being the beginning of its line."""

    also_known: ClassVar[frozenset[str]] = frozenset({"samplers", "t_max_prompt_ms"})

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Items[File] | None = None
    prompt: Text = ""
    n: int | None = Field(default=None, ge=1, le=1)
    n_indent: int | None = None
    response_fields: Annotated[Items[str], Field(max_length=64)] | None = None

    def completion(self) -> CompletionRequest:
        defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": -1, "prompt": ""}
        return CompletionRequest.model_construct(**defaults | self.shared_fields)


def infill_prompt(request: InfillRequest, tokenizer: Tokenizer, vocabulary: Vocabulary) -> Prompt:
    """Return the prompt: other files, then the text around the gap, each cut at the end that is far from the gap."""
    context = tokenizer.context_length
    local = min(_LOCAL_TOKENS, context * 3 // 4)
    prefix, prompt, suffix = (
        tokenizer.part(text, local, keeps_end=keeps_end)
        for text, keeps_end in ((request.input_prefix, True), (request.prompt, True), (request.input_suffix, False))
    )
    before = [*prefix, *prompt][-(3 * (local // 4)) :]
    # The tokens that the model has for it, and maybe a BOS token, are four.
    around = vocabulary.infill(before, suffix[: local // 4 - 4])
    if around is None:
        raise RequestError("This model has no tokens for filling in the middle.", code="unsupported_value")
    room = context - local - min(context if request.limit is None else 2 * request.limit, context // 4)
    others = _other_files(request.input_extra or [], tokenizer, vocabulary, room)
    return Prompt([*others[len(others) - min(room, len(others)) :], *around], "")


def _other_files(files: list[File], tokenizer: Tokenizer, vocabulary: Vocabulary, room: int) -> list[int]:
    """Return the tokens of other files, each after its name; the last ones if not all have room."""
    repository, separator = vocabulary.file_separators()

    def text(content: str) -> list[int]:
        return tokenizer.part(content, room, keeps_end=True)

    if separator is None:
        # Without tokens for it llama.cpp separates them so.
        return [token for file in files for token in [*text("\n\n--- snippet ---\n\n"), *text(file.text)]]
    tokens = [separator, *text("filename\n")]
    for file in reversed(files):
        if len(tokens) > room:
            return tokens
        tokens = [separator, *text(f"{file.filename}\n"), *text(file.text), *tokens]
    return tokens if repository is None else [repository, *text("myproject\n"), *tokens]


class InfillResponse(GenerationResponse):
    def __init__(self, request: InfillRequest, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        [self._sequence] = self.sequences
        self._sequence.warm_cache()
        self._request = request
        self._content = ""
        self._sent = 0
        self._is_cut = False

    @property
    def done(self) -> bool:
        """Whether it is complete, also by a line that is indented too little; then the sequence is cancelled."""
        if not (self._is_cut or self.error) and (new := self._sequence.take_text()):
            content = self._content + new
            self._content = indented(content, self._request.n_indent or 0, len(self._content))
            self._is_cut = len(self._content) < len(content)
        return self._is_cut or super().done

    def _whole(self) -> dict[str, Any]:
        whole, fields = self._final(self._content), self._request.response_fields
        if fields is None:
            return whole
        # By their paths; what does not exist is left out.
        chosen: dict[str, Any] = {}
        for path in fields:
            value: Any = whole
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                chosen[path] = value
        return chosen

    def next_events(self) -> str:
        if self.error:
            return f"data: {self.text()}\n\n"
        done = self.done
        new, self._sent = self._content[self._sent :], len(self._content)
        counts = {"tokens_predicted": self._sequence.generated, "tokens_evaluated": self._sequence.prompt_length}
        events = [{"index": 0, "content": new, "tokens": [], "stop": False, "id_slot": -1, **counts}] if new else []
        events += [self._final("")] if done else []
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events)

    def _final(self, content: str) -> dict[str, Any]:
        """Return the last event of a stream, or with the whole content the response."""
        sequence, stats = self._sequence, self._sequence.stats
        predicted, prompt = sequence.generated, sequence.prompt_length - sequence.cached_tokens
        by_reason = {"length": "limit", "stop": "eos" if sequence.ended_by_eos and not sequence.stop else "word"}
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": predicted,
            "tokens_evaluated": sequence.prompt_length,
            "has_new_line": "\n" in self._content,
            # As llama.cpp means it: of the answer, by the context's end.
            "truncated": False,
            "stop_type": by_reason.get(sequence.finish_reason or "length"),
            "stopping_word": "",
            "tokens_cached": len(sequence.tokens),
            "timings": {
                "cache_n": sequence.cached_tokens,
                **_rates("prompt", prompt, stats.prefill_seconds),
                **_rates("predicted", predicted, stats.decode_seconds),
                "draft_n": stats.drafted,
                "draft_n_accepted": stats.accepted,
            },
        }


def indented(text: str, indent: int, checked: int) -> str:
    """Return a text up to its first line after the first that is indented by less, with that indentation.

    None of the first `checked` characters is cut off; `indent` counts spaces and tabs.
    """
    indent = min(indent, _MAX_INDENT)
    if indent <= 0:
        return text
    less = re.compile(f"\n[ \t]{{0,{indent - 1}}}(?=[^ \t])").search(text, max(0, checked - indent))
    return text[: less.end()] if less else text


def _rates(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(1000 * seconds, 3),
        f"{name}_per_token_ms": round(1000 * seconds / tokens, 3) if tokens else 0.0,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds else 0.0,
    }
