"""Where rows come from: formats, directories, globs, shares and limits, the Hub; every row with its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pyarrow
import pyarrow.parquet
import pytest

from mst_core.data import load, rows, sources
from mst_core.data.order import Order
from mst_core.data.records import BadLine, Row
from mst_core.data.sources import Source
from mst_core.errors import InputError, MissingPackage, RowError, SettingsError

ROWS: list[dict[str, Any]] = [
    {"instruction": "q,\n1", "output": 'a "1"', "history": [["x", "y"]]},
    {"instruction": "q2", "output": "ä中"},
    {"instruction": "q3", "output": "a3", "history": []},
]


def put(folder: Path) -> dict[str, Path]:
    """The same rows in every format."""
    made = {kind: folder / f"rows.{kind}" for kind in ("jsonl", "json", "csv", "parquet")}
    made["jsonl"].write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made["json"].write_bytes(b"\xef\xbb\xbf " + json.dumps(ROWS, indent=1).encode() + b"\n")
    made["csv"].write_text(
        'instruction,output,history\n"q,\n1","a ""1""","[[""x"", ""y""]]"\n\nq2,ä中,\nq3,a3,[]\n', encoding="utf-8"
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), made["parquet"])
    return made


@pytest.mark.parametrize(
    ("kind", "lines", "where"),
    [("jsonl", [1, 2, 3], "rows.jsonl:2"), ("json", [1, 2, 3], "rows.json: row 2"), ("csv", [2, 5, 6], "rows.csv:5"),
     ("parquet", [1, 2, 3], "rows.parquet: row 2")],
)  # fmt: skip
def test_the_same_rows_in_every_format(tmp_path: Path, kind: str, lines: list[int], where: str) -> None:
    path = put(tmp_path)[kind]
    found = [row for row in rows.read([path]) if isinstance(row, Row)]
    assert [{name: value for name, value in row.data.items() if value is not None} for row in found] == ROWS
    assert [row.line for row in found] == lines
    assert found[1].where.endswith(where)
    assert rows.count([path]) == (None if kind == "parquet" else 3)


def test_an_array_larger_than_the_buffer_is_read_item_by_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mst_core.data import formats

    monkeypatch.setattr(formats, "_CHUNK", 7)
    path = put(tmp_path)["json"]
    assert [row.data for row in rows.read([path]) if isinstance(row, Row)] == ROWS
    path.write_text('[ {"a": 1}, 12, {"a": 1, "a": 2}, {"a": NaN} ,{"a": 2}]  ')
    found = list(rows.read([path]))
    assert [row.line for row in found if isinstance(row, Row)] == [1, 5]
    assert [(bad.error.where, bad.text) for bad in found if isinstance(bad, BadLine)] == [
        (f"{path}: row 2", "12"), (f"{path}: row 3", '{"a": 1, "a": 2}'), (f"{path}: row 4", '{"a": NaN}'),
    ]  # fmt: skip
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert [row.data for row in rows.read([path]) if isinstance(row, Row)] == [{"a": 1}, {"a": 2}]
    path.write_text("[]")
    assert list(rows.read([path])) == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'[{"a": 1}, {"a": 2', "row 2: is not JSON"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "row 1: is not JSON: a comma or ] is missing"),
        ("a.json", b'[{"a": 1}', "a comma or ] is missing"),
        ("a.json", b'[{"a": 1}] [{"a": 2}]', "more than one array"),
        ("a.json", b'[{"a": "\xff"}]', "is not UTF-8"),
        ("a.json", b"[" * 200_000, "nested too deeply"),
        ("a.csv", b'a,b\n1,2\n"3,4\n', "is not CSV"),
        ("a.csv", b"a,a\n1,2\n", "names a column twice"),
        ("a.csv", b"a,b\n1,\xff\n", r"a.csv:2: is not UTF-8 \(byte 3\)"),
        ("a.parquet", b"PAR1", "is not a Parquet file"),
        ("a.xlsx", b"PK", r"rows come as .*\.parquet.*, not \.xlsx"),
    ],
)
def test_files_that_are_broken(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        list(rows.read([tmp_path / name]))


def test_records_that_are_no_rows(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("prompt,history\np,\nonly one\nq,not a list\n")
    bad = [row.error for row in rows.read([table]) if isinstance(row, BadLine)]
    assert [str(error) for error in bad] == [
        f"{table}:3: has 1 cells, the header has 2",
        f"{table}:4: history is not JSON: Expecting value (column 1)",
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [b"\xff"], "score": [float("nan")]}), path)
    (found,) = rows.read([path])
    assert isinstance(found, BadLine)
    assert "prompt holds what is no JSON value (bytes)" in str(found.error)
    text = tmp_path / "a.txt"
    text.write_bytes(b"a\xff")
    (found,) = rows.read([text])
    assert isinstance(found, BadLine)
    assert str(found.error) == f"{text}: is not UTF-8 (byte 2)"


def test_nulls_that_a_nested_column_fills_in_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": True}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), path)
    (row,) = rows.read([path])
    assert isinstance(row, Row)
    assert row.data["messages"] == messages


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path)["parquet"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage) as error:
        list(rows.read([path]))
    assert error.value.hint == "pip install 'mst-tools-core[data]'"


def test_directories_and_globs_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b/two.jsonl", "b/one.csv", "a.json", "notes.md", ".hidden/x.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("[]")
    (source,) = sources.resolve([tmp_path])
    assert [path.relative_to(tmp_path).as_posix() for path in source.files] == ["a.json", "b/one.csv", "b/two.jsonl"]
    assert source.left == (str(tmp_path / ".hidden/x.jsonl"), str(tmp_path / "notes.md"))
    (source,) = sources.resolve([f"{tmp_path}/**/*.[jc]s*"])
    assert [path.name for path in source.files] == ["a.json", "one.csv", "two.jsonl"]
    for name, says in (
        (f"{tmp_path}/*.parquet", "matches no file"),
        (tmp_path / ".hidden" / "none", "no such file"),
        (tmp_path / "notes.md", r"not \.md"),
    ):
        with pytest.raises(InputError, match=says):
            sources.resolve([name])
    with pytest.raises(InputError, match="given twice"):
        sources.resolve([tmp_path, tmp_path / "a.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no file of rows"):
        sources.resolve([tmp_path / "empty"])


def test_shares_and_limits(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c:2.jsonl", "d.jsonl:5"):
        (tmp_path / name).write_text("{}\n")
    a, b = sources.resolve([f"{tmp_path}/a.jsonl:0.7", f"{tmp_path}/b.jsonl#12:.3"])
    assert (a.files, a.weight, a.first) == ((tmp_path / "a.jsonl",), 0.7, None)
    assert (b.files, b.weight, b.first) == ((tmp_path / "b.jsonl",), 0.3, 12)
    assert sources.resolve([f"{tmp_path}/c:2.jsonl"])[0].weight is None
    with pytest.raises(InputError, match=r"not \.jsonl:5"):  # it is there as it is written
        sources.resolve([f"{tmp_path}/d.jsonl:5"])
    for name, says in (("a.jsonl:0", "above 0"), ("a.jsonl#0", "from 1"), ("a.jsonl#1#2", "one number"),
                       ("a.jsonl:1:2", "one number")):  # fmt: skip
        with pytest.raises(SettingsError, match=says):
            sources.resolve([f"{tmp_path}/{name}"])
    with pytest.raises(SettingsError, match=r"b\.jsonl has no share"):
        sources.resolve([f"{tmp_path}/a.jsonl:1", f"{tmp_path}/b.jsonl"])


def test_the_first_rows_of_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n\n{"n": 2}\nbroken\n{"n": 4}\n')

    def take(first: int | None) -> load.Loaded[int]:
        return load.load([Source(str(path), (path,), first)], lambda row: [row.data["n"]])

    assert take(2).samples == [1, 2]
    with pytest.raises(RowError, match="1 of 4 rows cannot be used"):
        take(4)
    path.write_text('{"n": 1}\n')
    short = take(9)
    assert short.counts[0][1] == 1
    short.report("rows")
    assert "it holds 1 rows, fewer than the 9 asked for" in capsys.readouterr().err


def drawn(order: Order, epochs: int) -> list[int]:
    return [index for number in range(epochs) for index in order.epoch(number)]


def test_an_epoch_of_some_rows_goes_on_where_the_last_one_ended() -> None:
    """Nothing is dropped: as often as the rows allow, every row comes equally often."""
    order = Order(10, seed=3, size=4)
    assert drawn(order, 5)[:10] == Order(10, seed=3).epoch(0)
    assert drawn(order, 5)[10:] == Order(10, seed=3).epoch(1)
    assert drawn(Order(3, 0, size=7), 3) == drawn(Order(3, 0), 7)
    batches = [batch for _, batch in zip(range(6), order.batches(3), strict=False)]
    assert [len(batch) for batch in batches] == [3, 1] * 3
    assert next(order.batches(3, start=3)) == batches[3]


def test_a_mixture_holds_its_shares_in_every_epoch_and_sees_all_rows() -> None:
    order = Order(110, seed=1, shares=((100, 1.0), (10, 3.0)))
    assert order.quotas() == [28, 82] or order.quotas() == [27, 83]
    for number in range(3):
        found = order.epoch(number)
        assert [sum(index < 100 for index in found), sum(index >= 100 for index in found)] == order.quotas()
        assert any(index < 100 for index in found[:20])  # mixed, not one after the other
        assert found == order.epoch(number)
    seen = Counter(drawn(order, 4))
    assert all(seen[index] in (1, 2) for index in range(100))
    assert max(seen[index] for index in range(100, 110)) - min(seen[index] for index in range(100, 110)) <= 1
    straight = list(islice(order.batches(8), 40))
    for start in (0, 13, 14, 27, 39):
        assert next(order.batches(8, start=start)) == straight[start]
    assert order.epoch(0) != Order(110, seed=2, shares=order.shares).epoch(0)


HUB = {
    "good": {"train.jsonl": '{"prompt": "q", "completion": "a"}\n', "README.md": "no", "load.py": "raise SystemExit(9)",
             "LICENSE.txt": "no", "dataset_infos.json": "{}"},
    "split": {"data/train-0.jsonl": '{"n": 0}', "data/train-1.jsonl": '{"n": 1}', "data/test-0.jsonl": "{}"},
    "folders": {"main/x.jsonl": "{}\n", "socratic/x.jsonl": "{}\n"},
    "none": {"images.tar": ""},
}  # fmt: skip
RESOLVE = """
import sys
from mst_core.data import sources
from mst_core.errors import InputError
for name in sys.argv[1:]:
    try:
        (found,) = sources.resolve([name])
        print(found.weight, *(path.parts[-1] for path in found.files), found.files[0].parts[-2])
    except InputError as error:
        print(error.what.partition("(")[0], "|", error.hint)
"""
SHA = "0123456789abcdef0123456789abcdef01234567"


class Silent(BaseHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_: Any) -> None:
        pass


def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def hub_address() -> Iterator[str]:
    """A server that answers as the Hub does, for the real client."""

    class Hub(Silent):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            parts = path.strip("/").split("/")
            files = HUB.get([*parts, "", ""][3 if parts[0] == "api" else 2])
            if files is None:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                return
            if parts[0] == "api":
                name = f"{parts[2]}/{parts[3]}"
                found: Any = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in files]}
                if "tree" in parts:
                    found = [
                        {"type": "file", "path": file, "size": len(text), "oid": "0" * 40}
                        for file, text in files.items()
                    ]
                content = json.dumps(found).encode()
            else:
                content = files["/".join(parts[5:])].encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{abs(hash(content)):040x}"')
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()
            if body:
                self.wfile.write(content)

    yield from served(Hub)


def test_data_sets_of_the_hub(hub_address: str, tmp_path: Path) -> None:
    names = ("hf://org/good:0.5", f"hf://org/good@{SHA}", "hf://org/split", "hf://org/split/data/train-*",
             "hf://org/folders", "hf://org/folders/socratic", "hf://org/none", "hf://org/absent",
             "hf://good")  # fmt: skip
    environment = {**os.environ, "HF_ENDPOINT": hub_address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", RESOLVE, *names], capture_output=True, text=True, env=environment)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert said[:2] == [f"0.5 train.jsonl {SHA}", f"None train.jsonl {SHA}"]
    assert said[2].startswith("holds several parts: data/test-0.jsonl, data/train-0.jsonl")
    assert said[2].endswith("hf://org/split/data/test-0.jsonl")
    assert said[3] == "None train-0.jsonl train-1.jsonl data"
    assert said[4].startswith("holds several parts: main/x.jsonl, socratic/x.jsonl")
    assert said[5] == "None x.jsonl socratic"
    assert said[6].startswith("holds no file of rows there")
    assert "HF_TOKEN" in said[7]
    assert said[8].startswith("is no data set's name")
    assert not list(tmp_path.rglob("load.py"))


@pytest.fixture
def modelscope_address() -> Iterator[str]:
    """A server that answers as ModelScope's does, for the real client."""

    class Hub(Silent):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            parts, asked = path.strip("/").split("/"), parse_qs(query)
            files = HUB.get(parts[4]) if parts[:3] == ["api", "v1", "datasets"] and len(parts) > 5 else None
            if files is None:
                self.answer(404, json.dumps({"Code": 10010205001, "Message": "not found", "Success": False}).encode())
            elif parts[-1] == "tree":
                found = [
                    {"Path": file, "Type": "blob", "Size": len(text), "Sha256": sha256(text.encode()).hexdigest()}
                    for file, text in files.items()
                ]
                self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": found}}).encode())
            else:
                self.answer(200, files[asked["FilePath"][0]].encode())

        def answer(self, code: int, content: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    yield from served(Hub)


def test_data_sets_of_modelscope(modelscope_address: str, tmp_path: Path) -> None:
    names = ("ms://org/good:0.5", "ms://org/good@master#7", "ms://org/split", "ms://org/split/data/train-*",
             "ms://org/none", "ms://org/absent")  # fmt: skip
    environment = {**os.environ, "MODELSCOPE_ENDPOINT": modelscope_address, "MODELSCOPE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RESOLVE, *names], capture_output=True, text=True, env=environment)
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert said[0].startswith("0.5 train.jsonl ")
    assert said[1].startswith("None train.jsonl ")
    assert said[2].startswith("holds several parts: data/test-0.jsonl, data/train-0.jsonl")
    assert said[2].endswith("ms://org/split/data/test-0.jsonl")
    assert said[3] == "None train-0.jsonl train-1.jsonl data"
    assert said[4].startswith("holds no file of rows there")
    assert said[5].startswith("ModelScope did not give it")
    assert not list(tmp_path.rglob("load.py"))


def test_what_is_not_read_is_told(tmp_path: Path) -> None:
    """Hidden rows of a directory, and directories that a pattern matches."""
    (tmp_path / "sub").mkdir()
    for name in ("a.jsonl", ".hidden.jsonl", "sub/b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "b.metadata").write_text("")
    (source,) = sources.resolve([str(tmp_path)])
    assert [path.name for path in source.files] == ["a.jsonl", "b.jsonl"]
    assert source.left == (str(tmp_path / ".hidden.jsonl"),)
    (source,) = sources.resolve([f"{tmp_path}/*"])
    assert (source.files, source.left) == ((tmp_path / "a.jsonl",), (str(tmp_path / "sub"),))
