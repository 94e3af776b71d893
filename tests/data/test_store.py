"""Token files: byte for byte, and nothing that is not one."""

import struct
from itertools import chain

import numpy as np
import pytest

from steelyard.data import store
from steelyard.data.store import CODES, Dataset, Writer, dtype_for

DOCUMENTS = [[[1, 2, 3]], [[4]], [[5, 6], [7, 8, 9]], []]  # the last one has no sequence


def index_bytes(code, itemsize, lengths, boundaries, version=1, modes=b""):
    """The .idx written out from its description in the format's documentation."""
    offsets = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(boundaries))
    return (
        head
        + struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(boundaries)}q", *lengths, *offsets, *boundaries)
        + modes
    )


@pytest.fixture
def files(tmp_path):
    """files(code, letter) writes the pair for DOCUMENTS by hand; returns (prefix, .bin, .idx)."""

    def write(code=8, letter="H", name="hand"):
        tokens = struct.pack(f"<9{letter}", *range(1, 10))
        index = index_bytes(code, struct.calcsize(letter), [3, 1, 2, 3], [0, 1, 2, 4, 4])
        (tmp_path / f"{name}.bin").write_bytes(tokens)
        (tmp_path / f"{name}.idx").write_bytes(index)
        return tmp_path / name, tokens, index

    return write


INTEGERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


@pytest.mark.parametrize("code", INTEGERS)
def test_files_are_equal_byte_for_byte_both_ways(code, files, tmp_path):
    prefix, tokens, index = files(code, INTEGERS[code])
    with Writer(tmp_path / "written", CODES[code]) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    with Writer(tmp_path / "copied", CODES[code]) as writer:
        writer.add_dataset(Dataset(prefix))
    for name in ("written", "copied"):
        assert (tmp_path / f"{name}.bin").read_bytes() == tokens
        assert (tmp_path / f"{name}.idx").read_bytes() == index
    dataset = Dataset(tmp_path / "written")
    assert len(dataset) == 4 and dataset.num_documents == 4
    assert [dataset.document(d).tolist() for d in range(4)] == [list(chain(*d)) for d in DOCUMENTS]
    assert sorted(p.name for p in tmp_path.glob("written*")) == ["written.bin", "written.idx"]


@pytest.mark.parametrize(("code", "letter"), [(6, "d"), (7, "f"), (7, "d")], ids=["float64", "float32", "2021"])
def test_floats_are_read_and_code_7_was_double_in_2021(code, letter, files):
    prefix, _, _ = files(code, letter)
    dataset = Dataset(prefix)
    assert dataset.dtype.itemsize == struct.calcsize(letter) and dataset[3].tolist() == [7.0, 8.0, 9.0]


def test_the_index_is_written_in_blocks(monkeypatch, files, tmp_path):
    _, _, index = files()
    monkeypatch.setattr(store, "COPY_BYTES", 8)
    with Writer(tmp_path / "written", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    assert (tmp_path / "written.idx").read_bytes() == index
    with Writer(tmp_path / "copied", np.uint16) as writer:
        writer.add_dataset(Dataset(tmp_path / "written"), 1, 3)
    copied = Dataset(tmp_path / "copied")
    assert copied.documents.tolist() == [0, 1, 3] and copied.document(1).tolist() == [5, 6, 7, 8, 9]


def test_parts_of_sequences_and_their_documents(files):
    dataset = Dataset(files()[0])
    assert dataset.read(3, 1).tolist() == [8, 9] and dataset.read(3, 1, 1).tolist() == [8]
    assert [dataset.document_of(s) for s in range(4)] == [0, 1, 2, 2]
    with pytest.raises(IndexError):
        dataset.read(0, 2, 2)


def test_modes_of_multimodal_files_are_passed_over(tmp_path):
    (tmp_path / "m.bin").write_bytes(bytes(6))
    (tmp_path / "m.idx").write_bytes(index_bytes(8, 2, [1, 2], [0, 2], modes=b"\x00\x01"))
    assert Dataset(tmp_path / "m").lengths.tolist() == [1, 2]


def test_offsets_beyond_four_gibibytes(tmp_path):
    """The token file is a hole but for its last document."""
    lengths = [2**31 - 1, 2**31 - 1, 3]
    (tmp_path / "big.idx").write_bytes(index_bytes(8, 2, lengths, [0, 1, 2, 3]))
    with open(tmp_path / "big.bin", "wb") as file:
        file.seek(2 * sum(lengths[:2]))
        file.write(struct.pack("<3H", 11, 12, 13))
    dataset = Dataset(tmp_path / "big")
    assert dataset.offsets[2] > 2**32 and dataset[2].tolist() == [11, 12, 13]


def broken(index):
    at = store.HEADER.size
    return {
        "cut": (index[:-1], "D002"),
        "longer": (index + b"\0\0\0\0\0", "D002"),
        "empty": (b"", "D002"),
        "only a header": (index[:at], "D002"),
        "foreign": (b"PK\x03\x04" + index[4:], "D002"),
        "old kind": (b"TNTIDX\x00\x00" + index[8:], "D002"),
        "version 2": (index[:9] + struct.pack("<Q", 2) + index[17:], "D002"),
        "code 9": (index[:17] + b"\x09" + index[18:], "D002"),
        "other dtype": (index[:17] + b"\x04" + index[18:], "D003"),
        "lengths of others": (index[:at] + struct.pack("<4i", 3, 1, 2, 4) + index[at + 16 :], "D003"),
        "negative": (index[:at] + struct.pack("<4i", -3, 1, 2, 3) + index[at + 16 :], "D002"),
        "documents beyond": (index[:-8] + struct.pack("<q", 9), "D002"),
        "no documents": (index[:26] + struct.pack("<Q", 0) + index[34:-40], "D002"),
    }


@pytest.mark.parametrize("kind", broken(bytes(200)))
def test_a_broken_index_is_refused_with_its_place(kind, files, code_of):
    prefix, _, index = files()
    content, expected = broken(index)[kind]
    prefix.with_suffix(".idx").write_bytes(content)
    code, text = code_of(Dataset, prefix)
    assert code == expected and str(prefix) in text and "hint" in text


@pytest.mark.parametrize("change", [-2, -1, 1, 2, -18])
def test_a_token_file_of_another_size_is_refused(change, files, code_of):
    prefix, tokens, _ = files()
    prefix.with_suffix(".bin").write_bytes((tokens + bytes(2))[: len(tokens) + change])
    code, text = code_of(Dataset, prefix)
    assert code == "D003" and f"{18 + change} bytes" in text and "describes 18" in text


def test_missing_files_are_named_and_the_likely_mistake_too(files, code_of, tmp_path):
    """Field report H02."""
    prefix, _, _ = files()
    code, text = code_of(Dataset, tmp_path / "nothing")
    assert code == "D001" and "nothing.bin" in text and "nothing.idx" in text
    assert "without its ending" in code_of(Dataset, f"{prefix}.bin")[1]
    assert f"did you mean {prefix}?" in code_of(Dataset, str(prefix)[:-1])[1]
    prefix.with_suffix(".idx").unlink()
    code, text = code_of(Dataset, prefix)
    assert code == "D001" and "hand.idx" in text and "hand.bin" not in text
    (tmp_path / "cut.bin.partial").touch()
    assert "run the same command again" in code_of(Dataset, tmp_path / "cut")[1]


def test_an_id_that_the_dtype_cannot_hold_is_refused(tmp_path, code_of):
    """Field report F03: it would come back as another token."""
    ids = [1, 65535, 65536, 70000]

    def write(dtype, name):
        with Writer(tmp_path / name, dtype) as writer:
            writer.add_document([[1]])
            writer.add_document([ids])

    code, text = code_of(write, np.uint16, "narrow")
    assert code == "D005" and "document 1" in text and "70000" in text
    assert not list(tmp_path.iterdir())
    write(dtype_for(70001), "wide")
    assert Dataset(tmp_path / "wide")[1].tolist() == ids
    assert code_of(lambda: Writer(tmp_path / "x", "uint16").add_document([[-1]]))[0] == "D005"


def test_the_dtype_is_megatrons_choice():
    assert [dtype_for(v).name for v in (257, 65499, 65500, 65536, 70001)] == ["uint16", "uint16", *["int32"] * 3]


def test_an_exception_leaves_what_was_there_before(files, tmp_path):
    prefix, tokens, index = files()
    with pytest.raises(ZeroDivisionError), Writer(prefix, np.uint16) as writer:
        writer.add_document([[1, 2]])
        raise ZeroDivisionError
    assert (prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()) == (tokens, index)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_sequence_too_long_for_the_format_is_refused(tmp_path, code_of):
    writer = Writer(tmp_path / "long", np.uint16)
    assert code_of(writer.add_sequences, np.empty(0, np.uint16), np.array([2**31]))[0] == "D018"


def test_an_empty_file_is_a_file(tmp_path):
    with Writer(tmp_path / "none", np.uint16):
        pass
    assert len(Dataset(tmp_path / "none")) == 0
