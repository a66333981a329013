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

codecs.py     bytes that are being written or read, and codecs of values
frames.py     kinds of records, a record as bytes of its own, and back
index_set.py  sets of row positions and of clients
stored.py     states of roles, and the messages that they name
"""

from tessera.wire.codecs import (
    CHECKSUM_BYTES,
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
    ByKey,
    Codec,
    Converted,
    Exactly,
    Flag,
    HashedBytes,
    Maybe,
    PartUpTo,
    Reader,
    Real,
    Sequence,
    Unsigned,
    UpTo,
    VarUnsigned,
    Words,
    choice,
    part_digest,
)
from tessera.wire.frames import (
    DEFAULT_CAP,
    HEADER,
    Nested,
    OneOf,
    decode,
    decode_known,
    digest,
    digest_of,
    encode,
    first_field,
    framed,
    head_of,
    kind_of,
    layout,
    opened,
    record,
    records,
    tag_of,
    unsigned_digest,
)

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
