"""lm-evaluation-harness with `local-completions` reports the log-likelihoods that our engine computes directly."""

import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import ours
from ours import PROJECT
from server import Server

TASKS = PROJECT / "tests" / "clients" / "task"
ITEMS, CHOICES = 12, 32
CONCURRENT = {"batch_size": 2, "num_concurrent": 4}


def settings_for(server: Server, tokenizer: Path, **changes: int) -> dict[str, Any]:
    reading = {"tokenizer": str(tokenizer), "tokenizer_backend": "huggingface", "max_length": 512}
    return {"base_url": f"{server.url}/v1/completions", "model": "tiny", "max_retries": 1, **reading, **changes}


@pytest.fixture(autouse=True)
def _surroundings(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)  # the tasks' paths are relative to it
    monkeypatch.setenv("OPENAI_API_KEY", server.key)


@pytest.fixture(params=[{}, CONCURRENT], ids=["one after another", "two prompts a request, four requests at once"])
def settings(request: pytest.FixtureRequest, server: Server, tokenizer: Path) -> dict[str, Any]:
    """Model arguments for serial and for concurrent requests."""
    return settings_for(server, tokenizer, **request.param)


def evaluate(task: str, settings: dict[str, Any]) -> Any:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model="local-completions", model_args=settings, tasks=[task], task_manager=manager, bootstrap_iters=0
    )
    return results["results"][task], results["samples"][task]


def loglikelihoods(model: Path, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    """For each continuation after its context: its log-likelihood, and whether greedy decoding gives it."""
    # The harness counts spaces between the two as part of the continuation.
    contexts = ours.encode(model, [context.rstrip() for context, _ in pairs])
    scores = ours.score(model, ours.encode(model, [context + continuation for context, continuation in pairs]))
    # The first token has no score.
    own = [score[len(context) - 1 :] for context, score in zip(contexts, scores, strict=True)]
    return [(sum(value for value, _ in score), all(greedy for _, greedy in score)) for score in own]


def test_loglikelihoods_of_choices_equal_the_engines(settings: dict[str, Any], model: Path) -> None:
    metrics, samples = evaluate("specserve_choices", settings)
    assert len(samples) == ITEMS
    pairs = [pair for item in samples for pair in item["arguments"]]
    reported = [answer[0] for item in samples for answer in item["resps"]]
    expected = loglikelihoods(model, pairs)
    assert len(reported) == CHOICES
    assert [value for value, _ in reported] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in reported] == [greedy for _, greedy in expected]
    assert metrics["acc,none"] == pytest.approx(sum(item["acc"] for item in samples) / ITEMS)


def test_is_greedy_is_true_of_the_greedy_continuation_only(server: Server, tokenizer: Path) -> None:
    client = get_model("local-completions")(**settings_for(server, tokenizer))
    question = "The quick brown fox"
    body: Any = {"model": "tiny", "prompt": question, "max_tokens": 1, "temperature": 0}
    greedy_text = server.client().completions.create(**body).choices[0].text
    pairs = [(question, continuation) for continuation in (greedy_text, " \n never said")]
    calls = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]
    assert [greedy for _, greedy in client.loglikelihood(calls)] == [True, False]


def test_rolling_loglikelihoods_equal_the_engines(settings: dict[str, Any], model: Path) -> None:
    metrics, samples = evaluate("specserve_texts", settings)
    # The harness puts the BOS token before the text.
    texts = ["<|endoftext|>" + item["target"] for item in samples]
    expected = [sum(value for value, _ in score) for score in ours.score(model, ours.encode(model, texts))]
    assert len(expected) == ITEMS
    assert [item["resps"][0][0] for item in samples] == pytest.approx(expected, abs=1e-3)
    size = sum(len(item["target"].encode()) for item in samples)
    assert metrics["bits_per_byte,none"] == pytest.approx(-sum(expected) / size / math.log(2))


def test_generated_continuations_equal_decoding_without_speculation(settings: dict[str, Any], server: Server) -> None:
    _, samples = evaluate("specserve_continuations", settings)
    assert len(samples) == ITEMS
    body: Any = {"model": "tiny", "max_tokens": 20, "temperature": 0, "stop": ["\n", "."]}
    plain: Any = {"speculation": {"mode": "off"}}
    for item in samples:
        answer = server.client().completions.create(prompt=item["doc"]["question"], extra_body=plain, **body)
        assert item["resps"][0][0] == answer.choices[0].text
