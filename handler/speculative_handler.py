"""The archive's entry point; TorchServe wants exactly one class defined in it."""

from specserve.torchserve.handler import Handler


class SpeculativeHandler(Handler):
    """What TorchServe loads."""
