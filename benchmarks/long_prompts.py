"""What do prompts of 1,000 to 16,000 tokens cost here, on llama-server and on ik_llama.cpp's server?

Over HTTP, of each length: the first token of a new prompt; the speed of the answer, of which most is in the prompt; the
first token of a second turn; and that of a third one, after other prompts have taken its place in our pool. Prompts are
parts of Python's own library, as the interpreter has it. Servers take turns of a request.

    .venv/bin/python benchmarks/long_prompts.py [--quick] [--config FILE] [--lengths N ...] [--ours]
        [--port P] [--results FILE]
"""

import re
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import yaml

from common import (
    CHAT,
    MAX_INTERFERENCE,
    ResultsFile,
    Row,
    argument_parser,
    loaded,
    print_result,
    print_table,
    with_interference,
)
from load import checked, specserve_modes
from peer_engines import Job, start
from servers import Answer, Endpoint, server_stack, specserve_processes, start_specserve, stream
from specserve.cli.archive import prepared_document, prepared_handler
from specserve.engine.base import Vocabulary
from specserve.engine.llama_model import LlamaModel

LENGTHS, QUICK_LENGTHS = (1024, 4096, 8192, 16384), (1024, 4096)
AUTO = "specserve auto"
# Other servers.
SETTINGS = ("llama-server plain", "ik_llama.cpp plain")
# Tokens of a context, and of our pool.
ROOM = 32_768
# The least tokens of a prompt.
SHORTEST = 128
# Answers and second turns of a conversation.
REPEATS = 3
# New prompts of a length, at most, and their tokens; one may have more.
NEW_PROMPTS, NEW_TOKENS = 3, 8192
# Tokens of an answer whose speed counts, and of one whose first token counts.
ANSWER, SHORT_ANSWER = 128, 4
# Tokens of each prompt that takes the place of the conversations in our pool.
OTHER = 4096
# Tokens that a question and the chat's own take.
QUESTION = 37
FUNCTION = re.compile(r"^ *def ((?!__)\w+)\(", re.MULTILINE)
RENAME = "```python\n{code}\n```\n\nRename `{name}` to `{name}_of_file`. Return this function whole, and nothing else."
IGNORE_END = {"ignore_eos": True}
NEXT = "{before}{answer}<|im_end|>\n" + CHAT.format(prompt="{number} short tests of this function, please.")
NOTES = (
    "prefill: seconds to the first token of a new prompt, by its tokens",
    "speed: tokens of an answer by the seconds from the request to its last chunk, the prompt being cached",
    "greedy, without ends; one sequence, on servers of one slot",
    "a third turn comes after prompts that fill our pool",
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it, and the number of its tokens."""

    text: str
    tokens: int


class Library:
    """The text of Python's own library, largest file first, of which no part is given twice."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        sources = Path(sysconfig.get_path("stdlib")).glob("*.py")
        self._files = iter(sorted(sources, key=lambda path: (-path.stat().st_size, path.name)))
        self._tokens: list[int] = []

    def _take(self, count: int) -> list[int]:
        while len(self._tokens) < count:
            path = next(self._files)
            text = f"# {path.name}\n{path.read_text(encoding='utf-8')}"
            self._tokens += self._vocabulary.encode(text, begin=False)
        taken, self._tokens = self._tokens[:count], self._tokens[count:]
        return taken

    def edit(self, length: int) -> Prompt:
        """A prompt of about `length` tokens that asks for the longest of its functions under another name."""
        code = ""
        # Some parts are one docstring.
        while len(functions := [*FUNCTION.finditer(code)]) < 2:
            # A character may be cut off.
            code = b"".join(map(self._vocabulary.piece, self._take(length - QUESTION))).decode(errors="ignore")
        longest, _ = max(pairwise(functions), key=lambda pair: pair[1].start() - pair[0].start())
        text = CHAT.format(prompt=RENAME.format(code=code, name=longest[1]))
        return Prompt(text, len(self._vocabulary.encode(text, special=True)))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def speed(answer: Answer) -> float:
    """Tokens a second from the request on."""
    return answer.tokens / (answer.chunks[-1] - answer.sent)


def with_room(config: Path, directory: Path) -> Path:
    """Write a model YAML that differs from another in its context and its pool, of ROOM tokens each."""
    document = prepared_document(config)
    document["handler"] |= {"context_length": ROOM, "cache_tokens": ROOM}
    path = directory / config.name
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def first_token(endpoint: Endpoint, text: str) -> float:
    return checked(endpoint, stream(endpoint, text, SHORT_ANSWER)).ttft


def warmed(endpoint: Endpoint) -> Endpoint:
    """A server that has answered."""
    first_token(endpoint, CHAT.format(prompt="Hello!"))
    return endpoint


def second_turn(prompt: Prompt, answer: str, number: int) -> str:
    """A conversation's text with the user's next message, one of several that differ from their first token on."""
    return NEXT.format(before=prompt.text, answer=answer, number=number)


def measure_length(
    length: int, prompts: Sequence[Prompt], auto: Endpoint, off: Endpoint, peers: Sequence[Endpoint]
) -> Row:
    """What one length costs, by server: of the last prompt also the answer, its speed, and second turns."""
    *_, prompt = prompts
    found: Row = {endpoint.name: {"new": [], "speed": [], "second": []} for endpoint in [auto, off, *peers]}

    def measure(what: str, endpoint: Endpoint, value: float | list[float]) -> None:
        found[endpoint.name][what].append(value)
        say(f"{length:6,} tokens, {what}: {value if isinstance(value, float) else value[1]:.2f}, {endpoint.name}")

    for new in prompts:
        for endpoint in [auto, *peers]:
            measure("new", endpoint, [new.tokens, first_token(endpoint, new.text)])
    for _ in range(REPEATS):
        for endpoint in [auto, off, *peers]:
            answer = checked(endpoint, stream(endpoint, prompt.text, ANSWER))
            measure("speed", endpoint, speed(answer))
            found[endpoint.name]["text"] = answer.text
    for number in range(REPEATS):
        for endpoint in [auto, *peers]:
            text = second_turn(prompt, found[endpoint.name]["text"], number)
            measure("second", endpoint, first_token(endpoint, text))
    return found


def measure_return(conversations: dict[int, tuple[Prompt, str]], others: list[Prompt], auto: Endpoint) -> Row:
    """Seconds to the first token of a further turn, by length, after other prompts have filled the pool."""
    for prompt, answer in conversations.values():
        # In the cache already, unless the run was resumed.
        first_token(auto, second_turn(prompt, answer, 0))
    for number, other in enumerate(others):
        first_token(auto, other.text)
        say(f"other prompts: {number + 1} of {len(others)}")
    found = {}
    for length, (prompt, answer) in conversations.items():
        found[str(length)] = first_token(auto, second_turn(prompt, answer, REPEATS))
        say(f"{length:6,} tokens, third: {found[str(length)]:.2f}, {auto.name}")
    return found


def conversation_rows(found: dict[int, Row], third: Row) -> list[Row]:
    rows: list[Row] = []
    for length, servers in found.items():
        for server, values in servers.items():
            row: Row = {"tokens": length, "server": server, "tokens_per_second": round(median(values["speed"]), 2)}
            if values["new"]:
                prefill = median(1000 * seconds / tokens for tokens, seconds in values["new"])
                row |= {"prefill_ms": round(prefill, 2), "second_turn_s": round(median(values["second"]), 3)}
            if server == AUTO:
                # The last new prompt is the first turn of the same conversation.
                _, first_turn = values["new"][-1]
                seconds = third[str(length)]
                row |= {"third_turn_s": round(seconds, 3), "third_turn_share": round(seconds / first_turn, 3)}
            rows.append(row)
    return rows


def main() -> None:
    parser = argument_parser(__doc__, quick="prompts of 1,024 and 4,096 tokens", port=9800, resumable=True)
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help=f"of prompts (default: {LENGTHS})")
    parser.add_argument("--ours", action="store_true", help="without the other servers")
    options = parser.parse_args()
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    if not SHORTEST <= lengths[0] <= lengths[-1] <= ROOM // 2:
        parser.error(f"--lengths: {SHORTEST} to {ROOM // 2} tokens")
    notes, results = list(NOTES), ResultsFile(options.results)
    with server_stack() as stack:
        config = with_room(options.config, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        job = replace(Job.of(config, slots=1), context_length=ROOM)
        model = LlamaModel(job.target)
        library = Library(model)
        prompts = {
            length: [library.edit(length) for _ in range(max(1, min(NEW_PROMPTS, NEW_TOKENS // length)))]
            for length in lengths
        }
        others = [library.edit(OTHER) for _ in range(-(-ROOM // OTHER))]
        model.close()
        ours = specserve_modes(start_specserve(stack, config, options.port))
        auto, off = [warmed(replace(mode, extra=mode.extra | IGNORE_END)) for mode in ours]
        processes = specserve_processes(options.port)
        found: dict[int, Row] = {}
        with server_stack() as of_peers:
            started, failures = start(of_peers, job, () if options.ours else SETTINGS)
            notes += failures
            peers = [warmed(replace(peer, extra=IGNORE_END)) for peer in started]
            names = [peer.name for peer in peers]
            for length in lengths:
                measure = partial(measure_length, length, prompts[length], auto, off, peers)
                timed = partial(with_interference, measure, processes)
                found[length], busy = results.measured(["conversation", length, names], timed)
                if busy > MAX_INTERFERENCE:
                    notes.append(f"{length} tokens: other processes used {busy:.0%} of a core meanwhile")
        conversations = {length: (prompts[length][-1], found[length][AUTO]["text"]) for length in lengths}
        third = results.measured(["third", lengths, names], partial(measure_return, conversations, others, auto))
        rows = conversation_rows(found, third)
        print_table("conversations", rows)
        print(*notes, sep="\n")
        print_result("long_prompts", loaded(prepared_handler(config)), rows, notes)


if __name__ == "__main__":
    main()
