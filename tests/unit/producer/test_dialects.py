"""How text files are written: encodings, line ends, separators, quotes, and names that stand twice."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from embedctl.corpus.dialect import parse_dialect
from embedctl.corpus.reading import Corpus, open_corpus
from embedctl.corpus.records import Record
from embedctl.corpus.rows import Rows
from embedctl_config.errors import InputError, SettingsError
from embedctl_config.wire import RecordKind

TWO_LINES = "ä one\ntwo\n"
TWO_OBJECTS = '{"text": "ä one"}\n{"text": "two"}\n'
TWO_ROWS = "id,text\n1,ä one\n2,two\n"

WIDE = ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")

Make = Callable[..., Corpus]


@pytest.fixture
def corpus(tmp_path: Path) -> Make:
    def make(name: str, content: bytes, dialect: str = "", keep: tuple[str, ...] = ()) -> Corpus:
        path = tmp_path / name
        path.write_bytes(content)
        return open_corpus(str(path), rows=Rows(1000, keep=keep), dialect=parse_dialect(dialect))

    return make


def texts(corpus: Corpus) -> list[str]:
    return [record.text.decode() for record in corpus.records()]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.txt", TWO_LINES),
        ("c.jsonl", TWO_OBJECTS),
        ("c.csv", TWO_ROWS),
        ("c.tsv", TWO_ROWS.replace(",", "\t")),
        ("c.json", '[{"text": "ä one"},\n"two"]'),
    ],
)
def test_the_first_bytes_tell_the_encoding(corpus: Make, name: str, text: str, encoding: str) -> None:
    assert texts(corpus(name, text.encode(encoding))) == ["ä one", "two"]


def test_an_encoding_that_no_byte_tells_can_be_named(corpus: Make) -> None:
    content = TWO_ROWS.encode("cp1252")
    assert [record.kind for record in corpus("c.csv", content).records()] == [RecordKind.INVALID_UTF8, RecordKind.TEXT]
    assert texts(corpus("c.csv", content, "encoding=windows-1252")) == ["ä one", "two"]


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("text", ["one\ntwo\n", "Привет\nмир", "नमस्ते दुनिया\nदो"])  # noqa: RUF001
def test_wide_characters_without_a_mark_are_read_if_they_are_named(corpus: Make, text: str, encoding: str) -> None:
    assert texts(corpus("c.txt", text.encode(encoding), f"encoding={encoding}")) == text.splitlines()
    with pytest.raises(InputError, match=r"no text in UTF-8.* give --dialect encoding=…, such as utf-16-le"):
        texts(corpus("c.txt", text.encode(encoding)))


@pytest.mark.parametrize(
    ("name", "content", "encoding", "invalid"),
    [
        ("c.txt", b"a\ncaf\xe9\nb\n", "", b"caf\xe9"),
        ("c.jsonl", b'{"text": "a"}\n{"text": "caf\xe9", "id": 1}\n{"text": "b"}\n', "", b"caf\xe9"),
        ("c.jsonl", b'{"text": "a"}\n{"text": "\\ud800", "id": 1}\n{"text": "b"}\n', "", b"\xed\xa0\x80"),
        ("c.json", b'["a", {"text": "caf\xe9", "id": 1}, "b"]', "", b"caf\xe9"),
        ("c.json", b'["a", {"text": "\\ud800", "id": 1}, "b"]', "", b"\xed\xa0\x80"),
        ("c.txt", "a\n\ud800\nb\n".encode("utf-16-le", "surrogatepass"), "encoding=utf-16-le", b"\xed\xa0\x80"),
        ("c.csv", b"text\na\n\x81\nb\n", "encoding=cp1252", b"\x81"),
    ],
)
def test_what_is_no_character_costs_its_record_alone(
    corpus: Make, name: str, content: bytes, encoding: str, invalid: bytes
) -> None:
    label = 1 if b'"id"' in content else None
    assert list(corpus(name, content, encoding).records()) == [
        Record(RecordKind.TEXT, b"a"),
        Record(RecordKind.INVALID_UTF8, invalid, label),
        Record(RecordKind.TEXT, b"b"),
    ]


def test_a_file_that_ends_within_a_character_is_refused(corpus: Make) -> None:
    with pytest.raises(InputError, match=r"c\.txt is not UTF-16"):
        texts(corpus("c.txt", "one\ntwo".encode("utf-16")[:-1]))


def test_nul_bytes_within_utf_8_stay(corpus: Make) -> None:
    assert texts(corpus("c.txt", b"a\0b\nplain text of some words\nc\0\0d\n"))[0] == "a\0b"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("c.txt", b"a\rb\rc", ["a", "b", "c"]),
        ("c.txt", b"a\rb\rc\n", ["a", "b", "c"]),
        ("c.csv", b"id,text\r1,a\r2,b\r", ["a", "b"]),
        ("c.jsonl", b'{"text": "a"}\r{"text": "b"}\r', ["a", "b"]),
        ("c.txt", b"1\n2\n3\n", ["1", "2", "3"]),
        ("c.txt", b"\n\n\na\n", ["", "", "", "a"]),
        ("c.tsv", b"text\tb\na\tb\nc\td\n", ["a", "c"]),
        ("c.txt", b"\xef\xbb\xbf\xef\xbb\xbfa\n", ["a"]),
        ("c.csv", b'id,text\r1,"a\nb"\r2,c\r', ["a\nb", "c"]),
        ("c.json", b'["a"]\n\x1a\x1a', ["a"]),
        ("c.csv", b"id,text\n1,a\n\x1a\x1a\x1a", ["a"]),
        ("c.csv", b"id^text\n1^a, b\n", ["a, b"]),
        ("c.tsv", b"id,text\n1,a\n", ["a"]),
        ("c.csv", b'id,text\n1,"C:\\dir\\"\n2,"5\\"\n', ["C:\\dir\\", "5\\"]),
        ("c.txt", b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "b"]),
        ("c.jsonl", b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n', ["a", "b"]),
        ("c.csv", b"id,text\n1,a\n\x1a", ["a"]),
        ("c.jsonl", b'{"text": "a"}\n\x1a', ["a"]),
        ("c.txt", b"a\n\x1a", ["a"]),
        ("c.csv", b'id;text\n1;a, b\n2;"c; d"\n', ["a, b", "c; d"]),
        ("c.csv", b"id|text\n1|a\n", ["a"]),
        ("c.csv", b"text,note\na,b;c\n", ["a"]),
        ("c.csv", b"sep=,\nid,text\n1,a\n", ["a"]),
        ("c.csv", b'"sep=;"\r\nid;text\r\n1;a\r\n', ["a"]),
        ("c.csv", b"\nid,text\n\n1,a\n", ["a"]),
        (
            "c.tsv",
            b'id\ttext\n1\t"Alien" is a film\n2\t"open\n3\tand closed"\n',
            ['"Alien" is a film', '"open', 'and closed"'],
        ),
    ],
)
def test_what_programs_write_is_read(corpus: Make, name: str, content: bytes, expected: list[str]) -> None:
    assert texts(corpus(name, content)) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.txt", b"a\r\nb\rc\r\nd", "line 2: a carriage return stands within the line"),
        ("c.csv", b"id,text\n1,a\n\xef\xbb\xbfid,text\n2,d\n", "line 3: the names of the columns once more"),
        ("c.csv", b"id,text\n1,a\n2,d\n" + bytes(512), "line 4: NUL bytes alone"),
        ("c.txt", b"a\nd\n" + bytes(512), "line 3: NUL bytes alone"),
    ],
)
def test_what_is_no_line_of_its_file_is_named(corpus: Make, name: str, content: bytes, said: str) -> None:
    bad: list[str] = []
    found = corpus(name, content).records(lambda error, _: bad.append(str(error)))
    assert [record.text for record in found] == [b"a", b"d"]
    assert len(bad) == 1
    assert said in bad[0]


@pytest.mark.parametrize(("name", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_nothing_of_a_compressed_file_is_left_out(corpus: Make, name: str, pack: Callable[[bytes], bytes]) -> None:
    name = f"c.txt.{name}"
    many = ["b" * 199] * 1000
    one, two = pack(b"a\n"), pack("".join(f"{line}\n" for line in many).encode())
    assert texts(corpus(name, one + two + bytes(8))) == ["a", *many]
    for damaged in (one + b"junk" + two, one + two[:-9], b"junk", one + two[:20] + bytes(9) + two[29:]):
        with pytest.raises(InputError, match="can't be read"):
            texts(corpus(name, damaged))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.csv", b"id,text\n1,a\ntext,id\nb,2\n", "line 3: the columns have another order"),
        ("c.txt", b"a few words\n" * 20 + b"\xff\xfeb\0", "line 21: a byte order mark of another encoding"),
        ("c.csv", b"PAR1\x15\x04", "is not csv, but parquet: give --format parquet"),
        ("c.txt", b"PK\x03\x04\x14\0", "but a zip archive"),
        ("c.jsonl", bz2.compress(b"{}"), "but compressed: .*bunzip2"),
        ("c.json", b"a.json" + bytes(251) + b"ustar", "but an archive"),
        ("c.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "no text in UTF-8"),
        ("c.parquet", b"id,text\n", "is not parquet: it begins with"),
        ("c.csv", b"id , text\n1,a\n", "fields seen: ' text', 'id '"),
    ],
)
def test_a_file_of_another_kind_is_refused_whole(corpus: Make, name: str, content: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(corpus(name, content).records(lambda *_: None))


def test_separator_quotes_escapes_and_line_ends_can_be_named(corpus: Make) -> None:
    assert texts(corpus("c.csv", b"text:id\n'a:b':1\n", "separator=:,quote=single")) == ["a:b"]
    rows = b"id\ttext\n1\ta\\tb\\nc\\\\n\n2\t\\N\n"
    first, second = corpus("c.tsv", rows, "escape=backslash").records()
    assert (first.text, second.kind) == (b"a\tb\nc\\n", RecordKind.NOT_TEXT)
    rows = b'id,text\n1,"say \\"hi\\", all \\n"\n2,"a ""b"" \\\\"\n'
    assert texts(corpus("c.csv", rows, "escape=backslash")) == ['say "hi", all \\n', 'a "b" \\']
    with pytest.raises(InputError, match=r"line 2: .* give --dialect escape=backslash"):
        texts(corpus("c.csv", rows))
    assert texts(corpus("c.txt", b"a\rb\n", "line-end=lf")) == ["a\rb"]
    assert texts(corpus("c.txt", b"a\rb\n", "line-end=cr")) == ["a", "b"]
    assert texts(corpus("c.tsv", b'text\tid\n"a\tb\nc"\t1\n', "quote=double")) == ["a\tb\nc"]
    assert texts(corpus("c.csv", b'text|id\n"a|1\n', "separator=pipe, quote=none")) == ['"a']


def test_a_quote_that_is_never_closed_costs_its_own_line_alone(corpus: Make) -> None:
    bad: list[str] = []
    found = corpus("c.csv", b'id,text\n1,a\n2,"b\n3,c\n4,d "e"\n5,"f\ng"\n').records(
        lambda error, _: bad.append(str(error))
    )
    assert [record.text for record in found] == [b"a", b"c", b'd "e"', b"f\ng"]
    (said,) = bad
    assert "line 3: not csv" in said
    with pytest.raises(InputError, match="line 2: not csv: a quote is opened and never closed"):
        texts(corpus("c.csv", b'id,text\n1,"hello\n2,world\n'))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.csv", b"text,text\na,b\n", "line 1: the column 'text' stands twice"),
        ("c.csv", b"id,text,id\n1,a,2\n", "line 1: the column 'id' stands twice"),
        ("c.jsonl", b'{"text": "a", "text": "b"}\n', "line 1: the field 'text' stands twice"),
        ("c.jsonl", b'{"text": "a", "id": 1, "id": 2}\n', "line 1: the field 'id' stands twice"),
        ("c.json", b'[{"text": "a", "text": "b"}]', "element 1: the field 'text' stands twice"),
        ("c.jsonl", b'{"text": "a", "kept": 1, "kept": 1}\n', "line 1: the field 'kept' stands twice"),
        ("c.jsonl", b'{"text": "a", "kept": {"b": 1, "b": 1}}\n', "'kept' can't be kept: .* stands twice"),
    ],
)
def test_a_name_in_use_stands_once(corpus: Make, name: str, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        corpus(name, content, keep=("kept",) if b"kept" in content else ()).check()
    unused = corpus("c.jsonl", b'{"text": "a", "x": 1, "x": {"y": 1, "y": 2}}\n')
    assert texts(unused) == ["a"]


def test_parquet_strings_that_are_not_utf_8(corpus: Make, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = pyarrow.array([b"good", b"caf\xe9", None], pyarrow.binary())
    bad = pyarrow.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    parquet.write_table(pyarrow.table({"text": bad, "twice": bad}), tmp_path / "c.parquet")
    found = list(open_corpus(str(tmp_path / "c.parquet"), rows=Rows(1000)).records())
    assert found == [
        Record(RecordKind.TEXT, b"good"),
        Record(RecordKind.INVALID_UTF8, b"caf\xe9"),
        Record(RecordKind.NOT_TEXT, b"NoneType"),
    ]
    with pytest.raises(InputError, match=r"row 2: the id 'caf\\udce9' is not valid UTF-8"):
        open_corpus(str(tmp_path / "c.parquet"), rows=Rows(1000, id_field="twice")).check()
    twice = pyarrow.Table.from_arrays([bad, bad], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "c.parquet")
    with pytest.raises(InputError, match="the column 'text' stands twice"):
        open_corpus(str(tmp_path / "c.parquet"), rows=Rows(1000)).check()


def test_a_check_tells_how_files_are_read(corpus: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    corpus("a.csv", b"ID,text\n1,a\n").check()
    corpus("b.jsonl", b'{"id ": 1, "text": "a"}\n').check_beginnings()
    corpus("c.csv", b"id,ID,text\n1,2,a\n").check()
    for column in ("ID", "id "):
        assert f"there are no ids; {column!r} is one: name it with --id-field" in caplog.records.pop(0).getMessage()
    corpus("c.csv", TWO_ROWS.replace(",", ";").encode("utf-16")).check()
    corpus("d.txt", b"a\rb").check()
    corpus("e.csv", TWO_ROWS.encode()).check()
    corpus("f.csv", TWO_ROWS.encode("utf-16"), "encoding=utf-16").check()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("c.csv: read with UTF-16, semicolon as the separator")
    assert second.endswith("d.txt: read with carriage returns at the line ends")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cp1252", "'cp1252' is not NAME=VALUE"),
        ("encoding=nope", "'nope' is no encoding"),
        ("encoding=base64", "'base64' is no encoding"),
        ("separator=x", "separator 'x' is none of comma, semicolon, tab, pipe"),
        ("quote=double,quote=none", "each name once"),
        ("escape=x", "escape 'x' is none of backslash"),
        ("end=lf", "'end' is none of encoding, separator, quote, escape, line-end"),
    ],
)
def test_a_dialect_that_is_none_is_refused(words: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_dialect(words)
