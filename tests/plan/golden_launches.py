"""The recorded launches and host queries under tests/golden, and the first difference of two."""

import functools
import gzip
import json
from collections.abc import Iterator, Mapping
from typing import Any

from golden_records import FOLDER

Record = dict[str, Any]

LAUNCHES = tuple(sorted(path.name for path in FOLDER.glob("launches_*.jsonl.gz")))
HOSTS = tuple(sorted(path.name for path in FOLDER.glob("host_*.jsonl.gz")))


def read(file: str) -> Iterator[Record]:
    """The records of a file, one at a time."""
    with gzip.open(FOLDER / file, "rt") as lines:
        yield from map(json.loads, lines)


@functools.cache
def launch_records() -> Mapping[str, tuple[str, Record]]:
    """The file and the record of every launch, by the record's id. Read once; not to be changed."""
    return {record["inputs"]["id"]: (file, record) for file in LAUNCHES for record in read(file)}


def first_difference(want: Any, got: Any, path: str = "") -> str:
    """Where two JSON values differ first, with both; empty when they are equal."""
    if isinstance(want, dict) and isinstance(got, dict) and want.keys() == got.keys():
        pairs = [(f"{path}.{key}", want[key], got[key]) for key in want]
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(want, got, strict=True))]
    else:
        return "" if want == got else f"{path}: expected {want!r}, got {got!r}"
    return next(filter(None, (first_difference(*pair[1:], pair[0]) for pair in pairs)), "")
