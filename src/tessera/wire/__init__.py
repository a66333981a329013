"""Messages and stored states <-> bytes: one versioned binary encoding, with a cap on every length.

A record is a frozen dataclass whose fields are annotated with a codec; the class is its own
specification, and the order of its fields is the order on the wire::

    @record(tag=0x0105)
    @dataclass(frozen=True, slots=True, kw_only=True)
    class MaskedVector:
        round_id: Annotated[RoundId, U64]
        sender: Annotated[ClientId, U32]

The encoding is canonical: what `decode` accepts, `encode` gives back byte for byte. A length is
compared with its cap and with the bytes that are really there before anything is allocated for it.
There is no pickle, and nothing in the bytes names a Python class.

cursor.py      bytes that are being written or read, and how they are hashed
fields.py      codecs of single values
containers.py  codecs of sequences, dictionaries and arrays
kinds.py       kinds of records: tags, fields in order, records inside records
frame.py       a record as bytes of its own, and back
"""

from tessera.wire.containers import ByKey, Maybe, Sequence, Words
from tessera.wire.cursor import CHECKSUM_BYTES, HashedBytes, Reader, part_digest
from tessera.wire.fields import (
    F64,
    FLAG,
    GROUP,
    KEY,
    SECRET,
    SIGNATURE,
    TAG,
    TEXT,
    U8,
    U16,
    U32,
    U64,
    VARINT,
    Codec,
    Converted,
    Exactly,
    Flag,
    PartUpTo,
    Real,
    Unsigned,
    UpTo,
    VarUnsigned,
    choice,
)
from tessera.wire.frame import (
    DEFAULT_CAP,
    HEADER,
    decode,
    decode_known,
    digest,
    digest_of,
    encode,
    first_field,
    framed,
    head_of,
    kind_of,
    opened,
    unsigned_digest,
)
from tessera.wire.kinds import Nested, OneOf, layout, record, records, tag_of

__all__ = [
    "CHECKSUM_BYTES",
    "DEFAULT_CAP",
    "F64",
    "FLAG",
    "GROUP",
    "HEADER",
    "KEY",
    "SECRET",
    "SIGNATURE",
    "TAG",
    "TEXT",
    "U8",
    "U16",
    "U32",
    "U64",
    "VARINT",
    "ByKey",
    "Codec",
    "Converted",
    "Exactly",
    "Flag",
    "HashedBytes",
    "Maybe",
    "Nested",
    "OneOf",
    "PartUpTo",
    "Reader",
    "Real",
    "Sequence",
    "Unsigned",
    "UpTo",
    "VarUnsigned",
    "Words",
    "choice",
    "decode",
    "decode_known",
    "digest",
    "digest_of",
    "encode",
    "first_field",
    "framed",
    "head_of",
    "kind_of",
    "layout",
    "opened",
    "part_digest",
    "record",
    "records",
    "tag_of",
    "unsigned_digest",
]
