"""Grammar constraints: sampled answers match, masks depend on the tokens alone, and a grammar's cost is bounded."""

import json
import random
import re
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import llguidance
import numpy as np
import pytest

from bodies import nested
from constraints import BYTES, END, WORDS, Pieces
from specserve.engine.base import Vocabulary
from specserve.engine.llama_model import LlamaModel
from specserve.errors import ConstraintError, MaskDeferred, RequestError, Unusable
from specserve.grammar import compiler as compiler_module
from specserve.grammar import keywords
from specserve.grammar.compiler import GrammarCompiler
from specserve.grammar.constraint import Constraint
from specserve.grammar.gbnf import gbnf_to_lark
from tiny_models import ARCHITECTURES, write_tiny

PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12, "description": "of a person"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        "boss": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "boss"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["a", "世界", 3, None]}},
}
EXPRESSION = 'root ::= term ([+*] term)*\nterm ::= "x" | [0-9]{1,2} | "(" root ")"'


def text_of(tokens: list[int], vocabulary: Vocabulary = WORDS) -> bytes:
    return b"".join(map(vocabulary.piece, tokens))


def allowed(constraint: Constraint, written: Sequence[int]) -> list[int]:
    mask = constraint.allowed(written)
    assert mask is not None
    return np.flatnonzero(mask).tolist()


def compute_masks(constraint: Constraint, text: bytes) -> None:
    """Compute the mask after every proper prefix of an answer."""
    for length in range(len(text)):
        assert constraint.allowed(text[:length]) is not None


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the text is a complete answer."""
    mask = constraint.allowed(text.encode())
    return mask is not None and bool(mask[END])


def sample_answer(constraint: Constraint, vocabulary: Vocabulary, seed: int, length: int = 60) -> str:
    return text_of(sample_tokens(constraint, vocabulary, seed, length), vocabulary).decode()


def sample_tokens(constraint: Constraint, vocabulary: Vocabulary, seed: int, length: int) -> list[int]:
    """Sample an answer; from `length` tokens on, close what is open and end as soon as possible."""
    generator = random.Random(seed)
    written: list[int] = []
    for _ in range(3000):
        options = allowed(constraint, written)
        ending = [token for token in options if vocabulary.is_end_token(token)]
        assert ending in ([], [*vocabulary.end_tokens()])
        if ending and (len(written) >= length or len(ending) == len(options)):
            return written
        options = [token for token in options if token not in ending]
        closing = [token for token in options if vocabulary.piece(token) in {b'"', b"}", b"]", b")", b"null", b"n"}]
        written.append(generator.choice(closing if closing and len(written) >= length else options))
    raise AssertionError("The answer does not end.")


def check_expression(text: str) -> None:
    while (reduced := re.sub(r"\(x([+*]x)*\)", "x", re.sub(r"[0-9]{1,2}", "x", text))) != text:
        text = reduced
    assert re.fullmatch(r"x([+*]x)*", text)


COMPILER = GrammarCompiler(WORDS)
OBJECT = {"type": "object"}
# How a grammar is compiled, and what checks its answers.
CHECKED: list[tuple[Callable[[GrammarCompiler], Constraint], Callable[[str], None]]] = [
    (lambda compiler: compiler.json_schema(PERSON), lambda text: jsonschema.validate(json.loads(text), PERSON)),
    (lambda compiler: compiler.json_schema(OBJECT), lambda text: jsonschema.validate(json.loads(text), OBJECT)),
    (lambda compiler: compiler.gbnf(EXPRESSION), check_expression),
]


def test_sampled_answer_matches_its_grammar(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        write_tiny(tmp_path / architecture, architecture, "target")
        model = LlamaModel(tmp_path / architecture)
        compiler = GrammarCompiler(model)
        for compiled, check in CHECKED:
            constraint = compiled(compiler)
            for seed in range(8):
                check(sample_answer(constraint.fork(), model, seed))
        character_may_span_tokens_and_must_be_completed(model, compiler)


def character_may_span_tokens_and_must_be_completed(model: LlamaModel, compiler: GrammarCompiler) -> None:
    constraint = compiler.json_schema({"type": "string", "maxLength": 1})
    pieces = {model.piece(token): token for token in reversed(range(model.size))}
    written = [pieces[b'"']]
    for byte in "🙂".encode():
        follows = allowed(constraint, written)
        assert pieces[bytes([byte])] in follows
        assert len(written) == 1 or pieces[b'"'] not in follows
        written.append(pieces[bytes([byte])])
    assert {model.piece(token)[:1] for token in allowed(constraint, written)} == {b'"'}


def test_mask_depends_on_the_tokens_alone() -> None:
    """Earlier calls do not matter, with longer, shorter, different, ended and forbidden answers."""
    for compiled, _ in CHECKED:
        constraint, generator = compiled(COMPILER), random.Random(0)
        answers = [sample_answer(constraint, WORDS, seed, 20).encode() for seed in range(6)]
        for _ in range(200):
            answer = generator.choice(answers)
            written = [*answer[: generator.randint(0, min(len(answer), 12))]]
            written += generator.choice([[], [], [END], [generator.randrange(END)], [END, *answer]])
            mask, fresh = constraint.allowed(written), compiled(COMPILER).allowed(written)
            np.testing.assert_array_equal([] if mask is None else mask, [] if fresh is None else fresh)


def test_memory_of_a_long_answer_is_bounded() -> None:
    """Masks and layouts are cached for the last positions only; each of these tokens opens another array."""
    written = [*b"[ " * 500]
    constraint = COMPILER.json_schema({"type": "array"})
    for ask in (constraint.allowed, partial(constraint.fork().forced, max_tokens=4)):
        tracemalloc.start()
        for length in range(len(written)):
            ask(written[:length])
        memory, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert memory < 100_000


def test_no_mask_after_an_end_token_or_one_that_is_forbidden() -> None:
    constraint = COMPILER.gbnf('root ::= "a"+')
    for last in (END, ord("b")):
        assert constraint.allowed([*b"a", last]) is None
        assert constraint.allowed([*b"a", last, *b"a"]) is None
    assert constraint.allowed(b"a") is not None


def test_end_token_does_not_match_its_name() -> None:
    class Spelled(Pieces):
        """The end token has its name as a text, too."""

        def piece(self, token: int) -> bytes:
            return self.name(token)

    constraint = GrammarCompiler(Spelled(BYTES)).gbnf('root ::= "<end>" "."')
    assert allowed(constraint, []) == [*b"<"]
    assert allowed(constraint, b"<end>.") == [256]


def test_answer_is_complete_when_nothing_can_follow() -> None:
    constraint = COMPILER.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    text = b'{"a": 12}'
    assert [constraint.complete(text[:length]) for length in range(len(text) + 1)] == [False] * len(text) + [True]
    assert not COMPILER.json_schema({"type": "integer"}).complete(b"12")
    assert allowed(COMPILER.gbnf('root ::= ""'), []) == [END]


def check_forced(constraint: Constraint, written: Sequence[int], text: bytes) -> None:
    """The forced tokens spell this text, are allowed, and leave the constraint as it was."""
    before = allowed(constraint, written)
    tokens = constraint.forced(written, 50)
    assert text_of(tokens) == text
    assert constraint.forced(written, 2) == tokens[:2]
    assert allowed(constraint, written) == before
    for position, token in enumerate(tokens):
        assert token in allowed(constraint, [*written, *tokens[:position]])


def test_forced_tokens_spell_the_only_text_that_may_follow() -> None:
    constraint = COMPILER.gbnf('root ::= "{\\"name\\": \\"get_weather\\", " [0-9]+')
    check_forced(constraint, [], b'{"name": "get_weather", ')
    assert COMPILER.gbnf("root ::= [0-9]+").forced([], 8) == []
    assert constraint.forced([END], 8) == []


def test_forced_whitespace_follows_the_answers_layout() -> None:
    names = ["name", "surname", "address"]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    constraint = COMPILER.json_schema(schema)
    check_forced(constraint, [], b"{")
    check_forced(constraint, b'{\n  "name": "x"', b',\n  "surname": "')
    check_forced(constraint, b'{"name":"x"', b',"surname":"')
    # Back to the beginning, from more positions than layouts are cached for.
    long = b'{\n  "name": "' + b"x" * 99
    for length in range(len(long)):
        constraint.forced(long[:length], 4)
    check_forced(constraint, b'{\n  "name": "x"', b',\n  "surname": "')
    # A layout that differs from the predicted one: nothing is forced.
    check_forced(constraint, b'{\n  "name": "x",\t', b"")


def chunks(text: str) -> Pieces:
    """A vocabulary of the five-byte pieces of one text, without tokens of single bytes."""
    return Pieces([text[start : start + 5].encode() for start in range(0, len(text), 5)])


def test_forced_tokens_do_not_need_single_byte_tokens() -> None:
    text = '"25 bytes are 5 tokens."'
    constraint = GrammarCompiler(chunks(text)).json_schema({"const": json.loads(text)})
    assert constraint.forced([], 50) == [0, 1, 2, 3, 4]


def test_grammar_accepts_exactly_its_language() -> None:
    """Longest-match lexing would reject some of the right texts."""
    # A grammar, an alphabet, and a regular expression of those texts of up to five of its characters that are accepted.
    for grammar, alphabet, language in (
        ('root ::= a b\na ::= [a-b]+\nb ::= "b"', "ab", "[ab]+b"),
        ('root ::= a b\na ::= [a-z]+\nb ::= "b" root "!" | "."', "ab.!", r"[ab]+(\.|b[ab]+\.!)"),
        ('root ::= "a" x | "ab" "c"\nx ::= "b" x "b" | "c"', "abc", "abc|ac|abcb"),
        ('root ::= "(" root ")" root | ""', "()", r"|\(\)|\(\)\(\)|\(\(\)\)"),
        ('s ::= s s | "a"\nroot ::= s | "b"', "ab", "a+|b"),
        ('root ::= ( | "a") ("b" | ) x\nx ::=', "ab", "a?b?"),
        ('root ::= "a"{2,} | "b"{1,2} |', "ab", "a{2,}|b{1,2}|"),
        ("root ::= [^ab] .", "abc\n", r"[^ab][\s\S]"),
        ("root ::= [*--] [a&&b^]", "*-.a&", "[*+,-][ab&^]"),
        ("root ::= [\\]\\\\\\x41\\u0042\\-]", "]\\AB-C", r"[\]\\AB-]"),
        ('root ::= "\\"" "\\\\" # "x"\n\n#end', '"\\x', r'"\\'),
        ('root ::= (\n "a" |\n  "b"\n) Item-1\nItem-1 ::= "c"', "abc", "[ab]c"),
        ('root ::= "a"{1000000} | "b" x\nx ::= [^]', "ab", "b."),
    ):
        constraint = COMPILER.gbnf(grammar)
        for length in range(6):
            for text in map("".join, product(alphabet, repeat=length)):
                assert accepts(constraint, text) == bool(re.fullmatch(language, text)), repr(text)


UNUSABLE: list[Any] = [
    ("", "'root' is not defined"),
    ("root ::= x", "'x' is not defined"),
    ('root ::= "a\n"', "line 1 cannot be read"),
    ('root ::= "a"\n\nroot ::= "b"', "line 3 begins no new rule"),
    ('root ::= ("a"', r"Expected token '\)'"),
    ('root ::= "a")', r'at "\)"'),
    ('root ::= *"a"', r'at "\*"'),
    ('root ::= "a"*+', r'at "\+"'),
    ("root ::= []", "line 1 cannot be read"),
    ("root ::= [z-a]", "the start must be <= the end"),
    ('root ::= "\\q"', "line 1 cannot be read"),
    ('root ::= "\\uD800"', "not a Unicode scalar value"),
    ('root ::= "\\UFFFFFFFF"', "not a Unicode scalar value"),
    ("root ::= root", "no text can follow"),
    ('start: "a"', "line 1"),
    ('%llguidance {}\nstart: "a"', "line 1"),
    ('root ::= "a" <tool>', "line 1"),
    ("root ::= " + "(" * 100_000, "longer than"),
    ("root ::= " + chr(34) + "世" * 11_000 + chr(34), "longer than 32 KiB"),
    ("root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000, "too deeply nested"),
    ("root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30)) + '\nr30 ::= "a"', "too big"),
]


def check_refusal(compile_one: Callable[[Any], Constraint], text: Any, reason: str, param: str) -> None:
    with pytest.raises(RequestError, match=reason) as raised:
        compile_one(text)
    assert raised.value.param == param
    assert raised.value.code == "invalid_value"
    assert "\n" not in raised.value.message
    assert len(raised.value.message) < 400


def chain(length: int) -> dict[str, Any]:
    """Definitions that each refer to the next."""
    steps = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{length}": {"type": "null"}}}


# Keywords that are not supported, references that lead nowhere, and other schemas that cannot be used.
ASSERTIONS: dict[str, Any] = {
    "not": {"type": "string"},
    "uniqueItems": True,
    "propertyNames": {"pattern": "a"},
    "dependentSchemas": {"b": {"not": {}}},
    "dependencies": {"b": {"required": ["c"]}},
    "dependentRequired": {f"p{n}": ["q"] for n in range(9)},
    "contains": {},
    "unevaluatedItems": {"type": "string"},
    "unevaluatedProperties": {"type": "string"},
    "propertyDependencies": {"a": {"b": {"maxProperties": 2}}},
}
DANGLING: list[dict[str, Any]] = [
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "#/enum/0", "enum": [{"not": {}}]},
    {"$ref": "file:///etc/passwd"},
    {"$id": "http://localhost/", "$ref": "x.json"},
    {"items": {"$id": "http://localhost/x", "$ref": "#/items/$defs/a", "$defs": {"a": {}}}},
    {"$ref": "#/default", "default": {"type": "null"}},
    {"items": {"$ref": "#/items/x/default", "x": {"default": {"type": "null"}}}},
    {"$ref": "#n", "$defs": {"b": {"$anchor": "n", "const": 1}}},
]
UNSUPPORTED: list[Any] = [
    *(
        ({"$ref": "#/$defs/a", "$defs": {"a": {key: value}}}, f"'{key}' is not supported")
        for key, value in ASSERTIONS.items()
    ),
    *((schema, "leads to no subschema") for schema in DANGLING),
    ({"if": {}, "then": {}}, "'if' is not supported"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "'not' is not supported"),
    ({"type": "strnig"}, "Invalid type"),
    ({"type": "string", "minLength": "a"}, "'minLength' must be a number"),
    ({"type": "number", "multipleOf": True}, "'multipleOf' must be a number"),
    ({"type": 5, "uniqueItems": True}, "'type' must be a string or array"),
    ({"required": [{}], "oneOf": [{}, {}]}, "'required' must be strings"),
    ({"allOf": 5, "dependentRequired": {"a": ["b"]}}, "'allOf' must be a list"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "string", "pattern": r"(a)\1"}, "backreferences are not supported"),
    ({"type": "object", "patternProperties": {r"\bb": {}}}, "lookarounds not supported"),
    ({"type": "string", "format": "regex"}, "the format 'regex' is not supported"),
    ({"type": "object", "minProperties": 2}, "'minProperties' is more than one beyond"),
    ({"prefixItems": [{"const": 1}], "items": [{"const": 2}]}, "exclude each other"),
    ({"enum": [{"a": [2**60]}]}, "beyond 2 to the 53rd"),
    ({"type": "number", "maximum": float("nan")}, "number"),
    ({"const": "\ud800"}, "hex escape"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "Unsatisfiable"),
    ({"$ref": "#"}, "no text can follow"),
    ({"enum": [{"a": ["b\x7f"]}]}, "holds a control character"),
    ({"type": "string", "pattern": r"^a\u007f?b$"}, "holds a control character"),
    (nested(5_000), "too deeply nested|too deep"),
    (nested(100), "too deeply nested"),
    (chain(4_500), "more than 4000 subschemas"),
    # Each subschema would keep the name, in four bytes a character.
    ({"properties": {"\U0001f600" * 5_000: {}}}, "names of its nested properties are too long"),
    # Quadratic time would be minutes.
    ({"type": "string", "pattern": "[^" * 100_000}, "pattern|regex|class"),
    ({"enum": [f"s{i:06}" for i in range(100_000)]}, "longer than 256 KiB"),
    ({"allOf": [{"multipleOf": p} for p in (65521, 65519)]}, "multipleOf"),
    ({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(100)]}, "patterns"),
    ({"patternProperties": {f"^a{i}-": {} for i in range(400)}}, "patternProperties"),
    ({"properties": {f"p{i}": {} for i in range(400)}, "minProperties": 1}, "minProperties"),
]


def test_unusable_grammar_and_unsupported_schema_are_one_line_errors() -> None:
    for grammar, reason in UNUSABLE:
        check_refusal(COMPILER.gbnf, grammar, reason, "grammar")
    for schema, reason in UNSUPPORTED:
        check_refusal(COMPILER.json_schema, schema, reason, "response_format")


def test_deepest_accepted_schemas_do_not_crash() -> None:
    for schema in [nested(29), chain(1_900), {"const": json.loads("[" * 100 + "]" * 100)}]:
        assert COMPILER.json_schema(schema).allowed([]) is not None


A_NEEDS_B = {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}
ACCEPTED: list[Any] = [
    ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, ["5"], ["6"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"const": 5}]}, ["[5]"], ["[6]"]),
    ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, ["[1]"], ["[2]", "[1, 1]"]),
    ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    ({"type": "number", "multipleOf": 0.01}, ["0.05"], ["0.055"]),
    ({"properties": {"title": {"const": 1}, "x-guidance": {}}, "required": ["title"]}, ['{"title":1}'], ["{}"]),
    ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": {"type": "null"}}}, ["null"], ["1"]),
    ({"type": "string", "enum": ["</s>", "é"], "deprecated": True, "x-order": 3}, ['"</s>"', '"é"'], ['"e"']),
    ({"type": "string", "minLenght": 3, "self": {"not": {}}, "_format": "x", "version": 1}, ['""'], ["3"]),
    ({"x-guidance": {"lenient": True}, "type": "string"}, ['"a"'], ["3"]),
    ({"properties": {"a": {"$id": "http://x/y", "$schema": "x", "id": 3, "const": 1}}}, ['{"a":1}'], ['{"a":2}']),
    ({"prefixItems": [{"const": 1}], "additionalItems": False}, ["[1, 2]"], ["[2]"]),
    ({"allOf": [{}], "items": [{}], "additionalItems": {"const": 2}}, ["[1]", "[1, 2]"], ["[1, 3]"]),
    ({"items": [{"const": 1}, {"$ref": "#/items/0"}]}, ["[1, 1, 2]"], ["[1, 2]"]),
    ({"items": {"const": 1}, "additionalItems": False, "type": "array"}, ["[1, 1]"], ["[2]"]),
    ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["{}"]),
    ({"type": "string", "format": "color"}, ['"red"'], ["1"]),
    ({"type": "integer", "format": "regex"}, ["1"], ['"a"']),
    ({"properties": {"a": {"$ref": "#/b"}, "b": {"$id": "x"}}, "b": {"const": 1}}, ['{"a":1}'], ['{"a":2}']),
    ({"$ref": "#/kept here/n~1", "kept here": {"n/": {"const": 1}}}, ["1"], ["2"]),
    ({"$ref": "#/n", "n": {"properties": {"a": {"$ref": "#/m"}}}, "m": {"const": 1}}, ['{"a":1}'], ['{"a":2}']),
    # What a reference leads to is a copy of what stands there, however that is reworded.
    ({"items": [{"const": 1}], "additionalItems": {"$ref": "#/items/0"}}, ["[1, 1]"], ["[1, 2]", "[2]"]),
    ({"items": [{"$ref": "#/additionalItems"}], "additionalItems": {"const": 1}}, ["[1]", "[1, 1]"], ["[2]"]),
    ({"oneOf": [{"const": 1}, {"items": {"$ref": "#/oneOf/0"}, "type": "array"}]}, ["1", "[1]"], ["2", "[2]"]),
    ({"properties": {"default": {"const": 1}, "a": {"$ref": "#/properties/default"}}}, ['{"a":1}'], ['{"a":2}']),
    ({"$defs": {"unused": {"not": {"type": "string"}}}, "const": 1}, ["1"], ["2"]),
    (A_NEEDS_B, ["{}", '{"b":1}', '{"a":1,"b":2}', '{"c":1}'], ['{"a":1}', '{"a":1,"c":1}']),
    ({"dependentRequired": {"a": ["b"]}, "required": ["a"], "type": "object"}, ['{"a":1,"b":1}'], ['{"a":1}', "{}"]),
    # In the order of the schema.
    ({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}, ['{"a":1,"b":1}'], ['{"b":1,"a":1}']),
    ({"allOf": [{"properties": {"b": {}}}], "properties": {"a": {}}}, ['{"b":1,"a":1}'], ['{"a":1,"b":1}']),
    # With escapes it would still be the property "a", with a value that "a" may not have.
    ({"type": "object", "properties": {"a": {"const": 1}}}, ['{"a":1}'], ['{"\\u0061":2}', '{"a":2}']),
    ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    # Whitespace inside JSON is free, but bounded.
    ({"type": "object"}, ['{\n  "a" : [1,\t2]\r\n}'], ["{" + " " * 41 + "}", " {}", "{} "]),
    # As zod-to-json-schema spells optional members of unions.
    *(
        ({"items": {"anyOf": [nothing, {"const": "a"}]}, "type": "array"}, ["[]", '["a"]'], ["[1]"])
        for nothing in [False, {"not": {}}, {"not": True}]
    ),
    ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
    ({"type": "string", "pattern": r"^[^\x00-\x1f]b$"}, ['"ab"'], ['"b"']),
    ({"type": "string", "format": "date", "pattern": "^2"}, ['"2021-01-01"'], ['"1021-01-01"', '"2021-02-29"']),
]
# Strings that have a format, and strings that do not.
LABELS_63, LABELS_64 = ".".join(["abc"] * 63), ".".join(["abc"] * 64)
FORMATS = {
    "date": ("2024-02-29 2000-02-29 2021-12-31", "2021-02-29 2100-02-29 0100-02-29 2021-04-31 2021-13-01 x2021-01-01"),
    "time": ("23:59:59Z 00:00:00.5+01:00", "12:59:60Z 24:00:00Z 12:00:00"),
    "date-time": ("2024-02-29T10:00:00Z", "2023-02-29T10:00:00Z 1990-12-31T22:59:60Z 2024-02-29 2024-02-2910:00:00Z"),
    "hostname": (f"a ab a-b.c1.example a-b-c {'a' * 63} {LABELS_63}", f"{'a' * 64} {LABELS_64} xn--X ab--c -a a- ab-"),
    "host-name": ("a", "-a a_b"),
    "ip-address": ("1.2.3.4", "1.2.3.256"),
}


def test_schema_accepts_valid_and_rejects_invalid_texts_of_any_draft() -> None:
    for schema, valid, invalid in ACCEPTED:
        constraint = COMPILER.json_schema(schema)
        assert [text for text in valid + invalid if accepts(constraint, text)] == valid
    for name, (those, others) in FORMATS.items():
        constraint = COMPILER.json_schema({"type": "string", "format": name})
        strings = f"{those} {others}".split()
        assert [text for text in strings if accepts(constraint, f'"{text}"')] == those.split(), name


def test_what_many_references_lead_to_is_not_copied_beyond_the_longest_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leads to a place around the next one, or is another name of the same."""
    looks = Mock(wraps=keywords.is_rounded)
    monkeypatch.setattr(keywords, "is_rounded", looks)
    inner: dict[str, Any] = {"enum": [f"word {n}" for n in range(10_000)]}
    nested_names = ["#" + "/properties/a" * n for n in range(1, 50)]
    for _ in nested_names:
        inner = {"properties": {"a": inner}}
    for references in (nested_names, ["#/properties/a/anyOf/" + "0" * n for n in range(1, 50)]):
        wide = {"anyOf": [inner]} if "anyOf" in references[0] else inner["properties"]["a"]
        properties = {"a": wide, **{f"b{n}": {"$ref": reference} for n, reference in enumerate(references)}}
        looks.reset_mock()
        check_refusal(COMPILER.json_schema, {"properties": properties}, "longer than 256 KiB", "response_format")
        assert 1 < looks.call_count < 5


def test_grammar_that_becomes_too_costly_fails_there_and_not_before() -> None:
    """In the second a text of n characters has more than 2 to the n parses, so a mask's time grows with n cubed."""
    steps = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(30))
    nested_rules = f'root ::= r0 | "(" root ")"\n{steps}\nr30 ::= "a"?'
    ambiguous = 'root ::= root root | root root root | "a"'
    for grammar, ask in ((nested_rules, Constraint.allowed), (ambiguous, compute_masks)):
        constraint = COMPILER.gbnf(grammar)
        before = allowed(constraint, [])
        with pytest.raises(ConstraintError, match="cannot be followed further"):
            ask(constraint, b"a" * 200)
        assert allowed(constraint, []) == before


def test_time_budget_is_shared_by_answers_of_a_request_not_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_SECONDS", 0.002)  # a few hundred masks
    constraint, other_request = COMPILER.gbnf(EXPRESSION), COMPILER.gbnf(EXPRESSION)
    other_answer = constraint.fork()
    for answer in (constraint, other_answer):
        with pytest.raises(ConstraintError, match="takes too much time"):
            compute_masks(answer, b"x" + b"+x" * 5_000)
    assert allowed(other_request, [])


def test_masks_beyond_a_rounds_time_are_deferred_to_the_next_round() -> None:
    compiler = GrammarCompiler(WORDS)
    constraint, other = compiler.gbnf(EXPRESSION), compiler.json_schema({"type": "object"})
    before = allowed(constraint, [])
    compiler.limit_masks(0)
    assert allowed(constraint, []) == before
    for ask in (constraint.allowed, other.allowed, partial(constraint.forced, max_tokens=4)):
        with pytest.raises(MaskDeferred):
            ask(b"x")
    compiler.limit_masks(10)
    assert allowed(constraint, b"x") == allowed(COMPILER.gbnf(EXPRESSION), b"x")
    constraint = compiler.gbnf('root ::= "ab" "c"?')
    compiler.limit_masks(0)
    # The end of an answer is known all the same.
    assert [text for text in (b"a", b"ab", b"abc", b"ab", b"b", b"abc") if constraint.complete(text)] == [b"abc"] * 2
    compiler.limit_masks(10)
    assert ord("c") in allowed(constraint, b"ab")
    # A mask that takes longer than a round is an error.
    compiler.limit_masks(1e-9)
    with pytest.raises(ConstraintError, match="takes too much time"):
        compiler.gbnf(EXPRESSION).allowed([])


def test_dead_end_concerns_only_what_leads_to_it() -> None:
    """No token of this vocabulary is "b"."""
    compiler = GrammarCompiler(chunks("1....2....3....4...."))
    constraint = compiler.gbnf('root ::= "1...." ("2...." "b" | "3....") "4...."')
    other_answer = constraint.fork()
    for _ in range(2):
        assert allowed(constraint, [0]) == allowed(other_answer, [0]) == [1, 2]
        with pytest.raises(ConstraintError, match="no text can follow"):
            constraint.allowed([0, 1])
        assert not constraint.complete([0, 1])
        assert allowed(constraint, [0, 2]) == allowed(other_answer, [0, 2]) == [3]


def test_grammar_exhausted_by_one_answer_fails_for_all_its_forks_but_not_for_the_next_request() -> None:
    """Copies in llguidance share a budget; a copy that finds it exhausted rejects every token without an error."""
    costly = 'root ::= ([a-y ]{1,900} | [b-y ]{1,900} | ([ac-y ] [a-y ]{5,900}){1,90}) "z" [a-y]{900}'
    constraint, generator, written = COMPILER.gbnf(costly), random.Random(0), list[int]()
    other_answer = constraint.fork()

    def sample_all_but_the_end_of_the_costly_part() -> None:
        while len(written) < 900:
            written.append(generator.choice([token for token in allowed(constraint, written) if token != ord("z")]))

    with pytest.raises(ConstraintError):
        sample_all_but_the_end_of_the_costly_part()
    for other, prefix in product((other_answer, constraint.fork(), constraint), (written[:3], [])):
        with pytest.raises(ConstraintError):
            other.allowed(prefix)
    assert COMPILER.gbnf(costly).allowed(b"aaa") is not None


def test_grammar_is_compiled_once_and_eight_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one = Mock(wraps=llguidance.LLMatcher)
    monkeypatch.setattr(llguidance, "LLMatcher", compile_one)
    compiler = GrammarCompiler(WORDS)
    first, second = (compiler.json_schema(PERSON) for _ in range(2))
    assert sample_answer(first, WORDS, 1) == sample_answer(second, WORDS, 1)
    assert compile_one.call_count == 1
    for number in [*range(8), *range(8)]:
        compiler.gbnf(f'root ::= "{number}"')
    assert compile_one.call_count == 9
    compiler.json_schema(PERSON)
    assert compile_one.call_count == 10


def test_a_grammar_has_500_rules_at_most() -> None:
    """llguidance expands this one until it refuses, and 2,300 rules of it take 50 seconds."""
    doubling = [f"a{n} ::= a{n + 1} a{n + 1}" for n in range(500)]
    with pytest.raises(Unusable, match="it has more than 500 rules"):
        gbnf_to_lark("\n".join(["root ::= a0", *doubling, 'a500 ::= "a"']))


def test_grammar_without_recursion_is_one_lexeme() -> None:
    assert "rule_" not in gbnf_to_lark('root ::= a a\na ::= "x"+')
    assert "rule_" in gbnf_to_lark('root ::= a a\na ::= "x" a | "y"')


def test_a_regular_expression_matches_the_whole_answer_and_is_refused_if_invalid_or_too_large() -> None:
    for pattern, matched, others in (
        (r"a+b?", ["a", "aab"], ["", "b", "aabb"]),
        (r"^\d{2}/[a-z]\/x$", ["12/a/x"], ["1/a/x", "^12/a/x$"]),
        ("a\nb|c\\.d", ["a\nb", "c.d"], ["a", "cxd"]),
        (r"cost: \$", ["cost: $"], ["cost: "]),
        (r"(?:yes|no)\\", ["yes\\", "no\\"], ["yes"]),
        ("é/é", ["é/é"], ["e/e"]),
        ('a/\n| "b"\nx: /', ["a/\n"], ["b"]),
    ):
        constraint = COMPILER.regex(pattern)
        assert [text for text in [*matched, *others] if accepts(constraint, text)] == matched
    for pattern in ["(", "abc" * 50_000, r"(?=a)", "(" * 9999 + ")" * 9999, "[", "*", "\\"]:
        check_refusal(COMPILER.regex, pattern, "The regular expression cannot be used", "regex")
