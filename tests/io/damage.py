"""Files damaged by chance, and changed by somebody who knows their format."""

from __future__ import annotations

import copy
import io
import json
import struct
import zipfile

from critical_neurons.core.documents import digest_content

ODD_VALUES = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, -1e308, 0.5, "", "0", "nan", "../..", "\x00", [], {}, [[]],
    {"format": 1}, [None], [0] * 1000, "x" * 1000,
]  # fmt: skip
ODD_TEXTS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"0x10", b"1_0", b"[" * 5000, b"\\ud800"]


def mutate(content, generator):
    """One to four bytes changed, inserted, removed, or a piece of the file repeated, cut out or moved."""
    changed = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        at, length = generator.randrange(len(changed) or 1), generator.choice([1, 1, 1, 4, 64])
        piece = changed[at : at + length]
        match generator.randrange(5):
            case 0:
                changed[at : at + length] = generator.randbytes(len(piece))
            case 1:
                changed[at:at] = generator.choice([piece, b"0", b"-", b"1e9", b"[", b'"', b"\xff"])
            case 2:
                del changed[at : at + length]
            case 3:
                elsewhere = generator.randrange(len(changed) or 1)
                changed[elsewhere:elsewhere] = piece
            case 4:
                del changed[at : None if length == 64 else at + 1]
    return bytes(changed)


def forge(content, generator):
    """The same kind of file, whole and with checksums that fit, but with something in it that is not as it was."""
    if content[:4] == b"PK\x03\x04":
        return forge_archive(content, generator)
    if content[8:9] == b"{":
        return forge_tensors(content, generator)
    if content[:1] == b"{":
        return forge_document(content, generator)
    return mutate(content, generator)


def forge_document(content, generator):
    data = json.loads(content)
    data.pop("digest", None)
    for _ in range(generator.randint(1, 3)):
        change_value(data, generator)
    sealed = {**data, "digest": digest_content(data)} if isinstance(data, dict) and generator.random() < 0.8 else data
    text = json.dumps(sealed).encode()
    if generator.random() < 0.1:
        numbers = [at for at, each in enumerate(text) if chr(each).isdigit()]
        at = generator.choice(numbers) if numbers else 0
        text = text[:at] + generator.choice(ODD_TEXTS) + text[at + 1 :]
    return text + b"\n"


def change_value(data, generator):
    """One value somewhere in nested data: another in its place, gone, twice, or under another name."""
    places = list(list_places(data))
    if not places:
        return
    holder, key = generator.choice(places)
    match generator.randrange(5):
        case 0 | 1:
            holder[key] = copy.deepcopy(generator.choice(ODD_VALUES))
        case 2:
            del holder[key]
        case 3 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[generator.randrange(len(holder))]))
        case 3:
            holder[f"{key}_"] = copy.deepcopy(holder[key])
        case 4:
            other, place = generator.choice(places)
            other[place] = copy.deepcopy(holder[key])


def list_places(data):
    for key, value in list(enumerate(data) if isinstance(data, list) else data.items()):
        yield data, key
        if isinstance(value, (list, dict)):
            yield from list_places(value)


def forge_archive(content, generator):
    """An entry of a zip file changed, gone, twice, renamed or compressed."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = [(info, archive.read(info)) for info in archive.infolist()]
    chosen, action, written = generator.randrange(len(parts)), generator.randrange(6), io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for number, (info, part) in enumerate(parts):
            name, kind = info.filename, info.compress_type
            if number == chosen:
                match action:
                    case 0 | 1 | 2:
                        part = mutate(part, generator)
                    case 3:
                        continue
                    case 4:
                        name = generator.choice(["../x", "/etc/x", name + "_", "data.pkl", "inputs.npy", ""]) or "x"
                    case 5:
                        kind, part = zipfile.ZIP_DEFLATED, part + b"\0" * generator.choice([1, 2**16])
            archive.writestr(zipfile.ZipInfo(name), part, compress_type=kind)
    return written.getvalue()


def forge_tensors(content, generator):
    """The header of a safetensors file changed, its length right."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change_value(header, generator)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]
