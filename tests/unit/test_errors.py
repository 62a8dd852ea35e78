"""What is raised for one request ends that request alone."""

import pytest

from specserve.errors import Contained, RequestError


def test_a_request_fails_alone_and_only_what_ends_the_process_goes_on() -> None:
    failed: list[RequestError] = []
    contained = Contained("r1", failed.append)
    refusal = RequestError("No.", param="n")
    # The panics of llguidance are no Exception.
    for error in (refusal, ValueError("secret"), BaseException("panic")):
        with contained:
            raise error
    assert failed[0] is refusal
    for error in failed[1:]:
        assert (error.status, error.kind, "secret" in str(error)) == (500, "server_error", False)
    for ending in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(ending)), contained:
            raise ending
    assert len(failed) == 3
