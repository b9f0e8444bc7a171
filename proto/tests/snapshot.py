"""What do the contracts promise on the wire, and does a change break it?

`python -m proto.tests.snapshot` adds what is new to fields.json. It never takes anything out: a number that was once used
stays taken.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

REPOSITORY = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("fields.json")
Promises = dict[str, dict[str, Any]]


def compile_sources() -> FileDescriptorSet:
    """Return the descriptors of proto/*.proto with their comments."""
    sources = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "proto").glob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all.bin"
        arguments = ["protoc", f"-I{REPOSITORY}", "--include_source_info", f"--descriptor_set_out={out}", *sources]
        if protoc.main(arguments) != 0:
            raise RuntimeError("protoc refuses proto/*.proto; its message is above")
        return FileDescriptorSet.FromString(out.read_bytes())


def promises(files: FileDescriptorSet) -> Promises:
    """Return what is promised: fields by message and number, values by enum and number, methods by service."""
    found: Promises = {}
    for file in files.file:
        for name, message in _messages(file):
            found[name] = {str(field.number): _field(field) for field in message.field}
        for name, enum in _enums(file):
            found[name] = {str(value.number): value.name for value in enum.value}
        for service in file.service:
            found[f"{file.package}.{service.name}"] = {
                method.name: " ".join(
                    (
                        "stream " * method.client_streaming + method.input_type,
                        "->",
                        "stream " * method.server_streaming + method.output_type,
                    )
                )
                for method in service.method
            }
    return found


def reserved(files: FileDescriptorSet) -> dict[str, set[int]]:
    """Return the numbers each message and enum has reserved."""
    taken: dict[str, set[int]] = {}
    for file in files.file:
        for name, message in _messages(file):
            taken[name] = {n for span in message.reserved_range for n in range(span.start, span.end)}
        for name, enum in _enums(file):
            taken[name] = {n for span in enum.reserved_range for n in range(span.start, span.end + 1)}
    return taken


def broken(before: Promises, now: Promises, reserved_numbers: dict[str, set[int]]) -> list[str]:
    """Return one line for each promise of `before` that `now` breaks."""
    problems = []
    for name, entries in before.items():
        if name not in now:
            problems.append(f"{name} is gone: peers of the last version still use it")
            continue
        for key, promised in entries.items():
            present = now[name].get(key)
            if present is None:
                if not (key.isdigit() and int(key) in reserved_numbers.get(name, set())):
                    problems.append(f"{name}: {key} ({promised}) was removed; write `reserved {key};`")
            elif present != promised:
                problems.append(f"{name}: {key} was `{promised}` and is `{present}`; take a new number")
    return problems


def missing(before: Promises, now: Promises) -> list[str]:
    """Return what `now` has and the snapshot does not yet."""
    return [f"{name}: {key}" for name, entries in now.items() for key in entries if key not in before.get(name, {})]


def extended(before: Promises, now: Promises) -> Promises:
    """Return the snapshot with what is new added and nothing changed."""
    return {name: {**now.get(name, {}), **before.get(name, {})} for name in sorted({*before, *now})}


def uncommented(files: FileDescriptorSet) -> list[str]:
    """Return every message, field, enum, value, service and method without a comment."""
    problems = []
    for file in files.file:
        commented = {
            tuple(place.path)
            for place in file.source_code_info.location
            if place.leading_comments.strip() or place.trailing_comments.strip()
        }
        problems += [f"{file.name}: {name}" for path, name in _places(file) if path not in commented]
    return problems


def _field(field: FieldDescriptorProto) -> str:
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    label = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else "optional " * field.proto3_optional
    return f"{label}{field.type_name.lstrip('.') or kind} {field.name}"


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    waiting = [(f"{file.package}.{message.name}", message) for message in file.message_type]
    while waiting:
        name, message = waiting.pop(0)
        yield name, message
        waiting += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]


def _enums(file: FileDescriptorProto) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for enum in file.enum_type:
        yield f"{file.package}.{enum.name}", enum
    for name, message in _messages(file):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def _places(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the source path and name of each thing that needs a comment (paths as in descriptor.proto)."""
    for i, message in enumerate(file.message_type):
        yield from _places_in((4, i), message, message.name)
    for i, enum in enumerate(file.enum_type):
        yield (5, i), enum.name
        yield from (((5, i, 2, j), f"{enum.name}.{value.name}") for j, value in enumerate(enum.value))
    for i, service in enumerate(file.service):
        yield (6, i), service.name
        yield from (((6, i, 2, j), f"{service.name}.{method.name}") for j, method in enumerate(service.method))


def _places_in(path: tuple[int, ...], message: DescriptorProto, name: str) -> Iterator[tuple[tuple[int, ...], str]]:
    yield path, name
    yield from (((*path, 2, j), f"{name}.{field.name}") for j, field in enumerate(message.field))
    for j, inner in enumerate(message.nested_type):
        yield from _places_in((*path, 3, j), inner, f"{name}.{inner.name}")


def main() -> None:
    """Extend fields.json; refuse when a promise is broken."""
    files = compile_sources()
    before: Promises = json.loads(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {}
    problems = broken(before, promises(files), reserved(files))
    if problems:
        raise SystemExit("\n".join(problems))
    after = extended(before, promises(files))
    SNAPSHOT.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{SNAPSHOT.name}: {len(missing(before, after))} new entries\n")


if __name__ == "__main__":
    main()
