"""Finds the model files of an archive, which names them, on the machine that it is registered on."""

import os
from pathlib import Path

from specserve.config import HandlerConfig, ModelConfig
from specserve.errors import EnvironmentFailure, ModelLoadError
from specserve.weights import files


def find(model: ModelConfig, config: HandlerConfig) -> Path:
    """Return a model's file: where its path leads, or of that name in `models_directory` or the models directory.

    Where there is none, it is fetched if the operator allows that (`fetch_models`).

    Raises:
        ModelLoadError: there is none, or only one of another checksum.
    """
    if model.path is None:
        raise ModelLoadError(f"{model.hub}: the configuration has no path of this file; build it with scripts/archive.")
    named = model.path.expanduser()
    places = [place / named.name for place in (config.models_directory, files.models_directory()) if place]
    if named.is_absolute():
        places.insert(0, named)
    # A directory may be closed to this user.
    found = [place for place in dict.fromkeys(places) if os.access(place, os.R_OK) and place.is_file()]
    for place in found:
        if model.sha256 in {None, files.sha256(place)}:
            return place
    if config.fetch_models and model.source:
        try:
            # Libraries that a worker which finds its files does not need.
            from specserve.weights import models  # noqa: PLC0415

            return models.prepared(model.source, models.fetch(model.source, Path()), Path())
        except (EnvironmentFailure, ImportError) as error:
            raise ModelLoadError(f"{model.source.hub}: cannot be fetched: {str(error).rstrip('.')}.") from error
    other = "has another sha256 than the archive says: if it should, run scripts/archive again."
    wrong = "".join(f" {place} {other}" for place in found)
    searched = ", ".join(str(place.parent) for place in places)
    fetching = ", or set `fetch_models: true`" if model.source else ""
    raise ModelLoadError(
        f"{named.name}: there is no such model file in {searched}.{wrong} Put it there, or name its directory in "
        f"$SPECSERVE_MODELS{fetching}."
    )
