"""Digest of recorded answers: what was asked, and the shape of what came back. No texts.

    python -m tests.wire.golden_sglang.digest FOLDER VERSION

`FOLDER` holds one file for each answer of a server of that version, and `INDEX.md`, a table of
file, status, content type, key (none, wrong, USER, ADMIN) and request. A prompt becomes `a*N`, as
many letters. Of metrics, the names, types and labels are kept once for all answers of a kind, and
for each the values of `TELLING` gauges. An answer of many members is told by what sets it apart
from the first of its kind.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).parent
ROW = re.compile(r"\| (\S+) \| (\d+) \| ([^|]+) \| (\S+) \| (\w+) (\S+)(?: `(.*?)`?)? \|")
#: Gauges whose value while idle, off or fresh is a fact of SGLang, not of a load.
TELLING = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:gen_throughput",
    "sglang:token_usage",
    "sglang:num_used_tokens",
    "sglang:spec_accept_length",
    "sglang:spec_accept_rate",
    "sglang:spec_num_steps",
    "sglang:spec_num_draft_tokens",
)
#: Members whose short value is a fact of the protocol, kept as `=VALUE`.
FIXED = frozenset({"object", "type", "code", "detail", "error", "finish_reason", "role"})
#: Characters of the prompts that were too long; the index shows their beginning.
TOO_LONG = 5000
#: Members from which on an answer counts as one of many.
MANY = 50
#: Where a recorded path was taken out of a text, together with the mark that ended it.
CLEANED = '"/opt/engine", line'


def main() -> None:
    """Write the digest of one version."""
    folder, version = Path(sys.argv[1]), sys.argv[2]
    entries = [
        entry
        for line in (folder / "INDEX.md").read_text(encoding="utf-8").splitlines()
        if (entry := _entry(folder, line)) is not None
    ]
    families: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for entry in entries:
        _intern(entry["answer"], families, first)
    document = {"families": families, "answers": entries}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    # A line for each answer and each family, so that a change can be read.
    text = re.sub(r',(?="sglang[^"]*":\{"labels)', ",\n", text).replace(
        '},{"answer"', '},\n{"answer"'
    )
    (HERE / f"{version}.json").write_text(f"{text}\n", encoding="utf-8")


def _intern(answer: dict[str, Any], families: dict[str, Any], first: dict[str, Any]) -> None:
    """Leave out of an answer what an earlier one has told."""
    if "metrics" in answer:
        for name, family in answer["metrics"].items():
            known = families.setdefault(name, {"type": family["type"], "labels": []})
            known["labels"] = sorted({*known["labels"], *family["labels"]})
        answer["metrics"] = {
            name: family.get("value") for name, family in answer["metrics"].items()
        }
        shown = {name: value for name, value in answer["metrics"].items() if value is not None}
        answer["metrics"] = shown
    body = answer.get("json")
    if isinstance(body, dict) and len(body) > MANY:
        # The state of a scheduler repeats all arguments.
        body["internal_states"] = [
            {key: kind for key, kind in state.items() if key not in body}
            for state in body.get("internal_states", [])
        ]
        told = first.setdefault("json", body)
        if told is not body:
            answer["json"] = {key: kind for key, kind in body.items() if told.get(key) != kind}
            answer["lacks"] = sorted(told.keys() - body.keys())


def _entry(folder: Path, line: str) -> dict[str, Any] | None:
    found = ROW.fullmatch(line)
    if found is None:
        return None
    file, status, kind, key, method, path, body = found.groups()
    text = (folder / file).read_text(encoding="utf-8")
    text = text.replace(CLEANED, CLEANED.replace('",', '\\",'))
    entry: dict[str, Any] = {
        "name": Path(file).stem,
        "method": method,
        "path": path,
        "key": key.lower(),
        "status": int(status),
        "answer": answer(text, kind.strip()),
    }
    if body is not None:
        entry["body"] = _body(body)
    return entry


def _body(text: str) -> Any:
    """A request's body; a text that is no JSON stays one, a cut one is made whole."""
    if re.search(r"a{100}$", text):
        text += '"}]}' if '"messages"' in text else '"}'
        document = json.loads(text)
        return _muted(document, TOO_LONG)
    try:
        return _muted(json.loads(text))
    except ValueError:
        return text


def _muted(value: Any, length: int | None = None) -> Any:
    """The body with the length of its prompts in their place."""
    if isinstance(value, dict):
        spoken = {"text", "prompt", "content"}
        return {
            key: f"a*{length or len(item)}"
            if key in spoken and isinstance(item, str)
            else _muted(item, length)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            f"a*{len(item)}"
            if isinstance(item, str) and " " in item.strip()
            else _muted(item, length)
            for item in value
        ]
    return value


def answer(text: str, kind: str) -> dict[str, Any]:
    """What is kept of an answer, by what it is."""
    if kind.startswith("text/event-stream"):
        return {"events": _events(text)}
    if "\n# TYPE" in text or text.startswith("# "):
        return {"metrics": metrics(text)}
    try:
        return {"json": shape(json.loads(text))}
    except ValueError:
        return {"text": bool(text)}


def _events(text: str) -> list[Any]:
    """Shapes of a stream's events; equal ones in a row are told once."""
    shapes: list[Any] = []
    for event in filter(None, text.split("\n\n")):
        data = event.removeprefix("data: ").strip()
        made = data if data == "[DONE]" else shape(json.loads(data))
        if not shapes or shapes[-1] != made:
            shapes.append(made)
    return shapes


def metrics(text: str) -> dict[str, Any]:
    """Type and label names of each family, with the value of those that tell."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        kept: dict[str, Any] = {
            "type": family.type,
            "labels": sorted({",".join(sorted(sample.labels)) for sample in family.samples}),
        }
        if family.name in TELLING:
            kept["value"] = round(sum(sample.value for sample in family.samples), 3)
        found[family.name] = kept
    return found


def shape(value: Any) -> Any:
    """Members and types of a JSON value; a list is told by the shapes that occur in it."""
    if isinstance(value, dict):
        return {
            key: f"={item}"
            if key in FIXED and isinstance(item, str | int) and not isinstance(item, bool)
            else shape(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        shapes: list[Any] = []
        for item in map(shape, value):
            if item not in shapes:
                shapes.append(item)
        return shapes
    names = {str: "str", bool: "bool", int: "int", float: "float", type(None): "null"}
    return names[type(value)]


if __name__ == "__main__":
    main()
