"""`scripts/fetch_models` and `scripts/prepare`: download and requantise the models of a configuration."""

from argparse import Namespace

from specserve.weights.models import fetch, models, prepare


def run_fetch(options: Namespace) -> int:
    for model in models(options.config).values():
        print(fetch(model, options.config), flush=True)
    return 0


def run_prepare(options: Namespace) -> int:
    for role, path in prepare(options.config).items():
        print(f"{role}: {path}", flush=True)
    return 0
