"""The formats of strings that JSON Schema defines, as the compiler knows them or as patterns."""

from __future__ import annotations

from typing import Any

# Formats that JSON Schema defines and llguidance 1.9 does not support; other unknown formats are annotations.
UNSUPPORTED_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template"}
) | {
    "json-pointer",
    "relative-json-pointer",
    "regex",
}
KNOWN_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
# Names of the third draft.
RENAMED_FORMATS = {"host-name": "hostname", "ip-address": "ipv4"}
# Those that llguidance 1.9 takes too widely, as patterns: it knows no leap years, and allows a leap second at any hour
# (here there is none), host names of any length, and labels that only IDNA could judge ("xn--").
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_LONG, _SHORT = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = f"(?:[0-9]{{4}}-(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?{_ZONE}"
_END, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = f"{_END}(?:{_INNER}?{_END}|{_INNER}{_END}{_INNER}{{0,59}}{_END}|{_INNER}-{_END}(?:{_INNER}{{0,58}}{_END})?)?"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "time": f"^{_TIME}$",
    "hostname": f"^{_LABEL}(?:\\.{_LABEL})*$",
}
MAX_HOSTNAME = 253


def narrow_format(schema: dict[str, Any]) -> int:
    """Turn a format that the compiler takes too widely into a pattern, and remove one that is an annotation.

    Args:
        schema: of strings; changed.

    Returns:
        How many patterns its `allOf` has more than before.
    """
    form = schema.pop("format", None)
    if not isinstance(form, str):
        return 0
    form = RENAMED_FORMATS.get(form, form)
    if form not in FORMAT_PATTERNS:
        if form in KNOWN_FORMATS:
            schema["format"] = form
        return 0
    max_length = schema.get("maxLength", MAX_HOSTNAME)
    if form == "hostname" and isinstance(max_length, int):
        schema["maxLength"] = min(MAX_HOSTNAME, max_length)
    if "pattern" not in schema:
        schema["pattern"] = FORMAT_PATTERNS[form]
    elif isinstance(schema.get("allOf", []), list):
        schema["allOf"] = [*schema.get("allOf", []), {"pattern": FORMAT_PATTERNS[form]}]
        return 1
    return 0
