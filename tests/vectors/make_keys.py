"""Write hkdf.json, x25519.json, ed25519.json, boxes.json and hpke.json beside this file.

    python tests/vectors/make_keys.py

The standard vectors are typed in below; the others are computed from them with `hmac` and with
`cryptography`'s plain ciphers, never with tessera, so that they are a second opinion on it. Each
vector to refuse is a good one changed in one place. The format is in README.md.
"""

from __future__ import annotations

import hmac
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HERE = Path(__file__).parent
Vector = dict[str, object]


def write(file: str, about: str, hexed: list[str], vectors: list[Vector]) -> None:
    document = {"about": about, "hex": hexed, "vectors": vectors}
    (HERE / file).write_text(json.dumps(document, indent=1) + "\n")


def flipped(text: str, position: int) -> str:
    """The same hexadecimal string with the lowest bit of one byte changed."""
    content = bytearray.fromhex(text)
    content[position] ^= 1
    return content.hex()


def expand(key: bytes, info: bytes, size: int) -> bytes:
    """HKDF-Expand, RFC 5869, 2.3."""
    output = block = b""
    for i in range(1, -(-size // 32) + 1):
        block = hmac.digest(key, block + info + bytes([i]), "sha256")
        output += block
    return output[:size]


def item(value: int | str | bytes) -> bytes:
    """One item of a derivation's context: type, length in 8 bytes, content."""
    if isinstance(value, int):
        size = next(n for n in range(1, 100) if -(1 << 8 * n - 1) <= value < 1 << 8 * n - 1)
        tag, content = b"i", value.to_bytes(size, "big", signed=True)
    elif isinstance(value, str):
        tag, content = b"s", value.encode()
    else:
        tag, content = b"b", value
    return tag + len(content).to_bytes(8, "big") + content


def derived(key: bytes, size: int, *items: int | str | bytes) -> bytes:
    info = b"tessera-1\0" + b"".join(item(i) for i in (size, *items))
    return expand(key, info, size)


def hkdf() -> list[Vector]:
    count_up = bytes(range(256)).hex()
    standard: list[Vector] = [
        {
            "name": "RFC 5869 A.1",
            "ikm": "0b" * 22,
            "salt": "000102030405060708090a0b0c",
            "info": "f0f1f2f3f4f5f6f7f8f9",
            "prk": "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "okm": "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
            "34007208d5b887185865",
        },
        {
            "name": "RFC 5869 A.2, longer",
            "ikm": count_up[: 2 * 0x50],
            "salt": count_up[2 * 0x60 : 2 * 0xB0],
            "info": count_up[2 * 0xB0 :],
            "prk": "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
            "okm": "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
            "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
            "cc30c58179ec3e87c14c01d5c1f3434f1d87",
        },
        {
            "name": "RFC 5869 A.3, no salt, no info",
            "ikm": "0b" * 22,
            "salt": "",
            "info": "",
            "prk": "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "okm": "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
            "9d201395faa4b61a96c8",
        },
    ]
    for vector in standard:
        vector |= {"kind": "rfc5869", "expect": "ok"}
    key = bytes(range(32))
    ours: list[Vector] = [
        {
            "kind": "derive",
            "name": name,
            "expect": "ok",
            "key": key.hex(),
            "label": label,
            "context": context,
            "size": size,
            "output": derived(key, size, label, *context).hex(),
        }
        for name, label, context, size in [
            ("a label alone", "pair-mask", [], 32),
            ("the same, shorter, is not its beginning", "pair-mask", [], 24),
            ("integers", "pair-mask", [0, 1, 127, 128, 255, 256, 2**64 - 1], 32),
            ("negative integers", "pair-mask", [-1, -128, -129], 32),
            ("a number as text", "pair-mask", ["1"], 32),
            ("two strings", "pair-mask", ["ab", "c"], 32),
            ("the same letters, cut elsewhere", "pair-mask", ["a", "bc"], 32),
            ("an empty string", "pair-mask", [""], 32),
            ("beyond ASCII", "Maß", ["μ"], 32),
            ("several blocks", "noise", [7], 100),
        ]
    ]
    good = ours[0]
    refuse: list[Vector] = [
        {**good, "name": "a key of 31 bytes", "expect": "MisuseError", "key": key[:31].hex()},
        {**good, "name": "no bytes", "expect": "MisuseError", "size": 0},
        {**good, "name": "over 255 blocks", "expect": "MisuseError", "size": 255 * 32 + 1},
        {**good, "name": "a truth value", "expect": "MisuseError", "context": [True]},
        {**good, "name": "a fraction", "expect": "MisuseError", "context": [0.5]},
    ]
    return standard + ours + refuse


def x25519() -> list[Vector]:
    salt, label, context = b"tessera-1 x25519", "channel", [3, "union"]

    def agreement(name: str, private: str, peer: str, shared: str) -> Vector:
        key = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
        public = key.public_key().public_bytes_raw()
        extracted = hmac.digest(salt, bytes.fromhex(shared), "sha256")
        both = sorted((public, bytes.fromhex(peer)))
        return {
            "name": name,
            "expect": "ok",
            "private": private,
            "public": public.hex(),
            "peer": peer,
            "shared": shared,
            "label": label,
            "context": context,
            "agreed": derived(extracted, 32, label, *both, *context).hex(),
        }

    alice = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
    alice_public = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    bob = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
    bob_public = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    both = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    first = agreement(
        "RFC 7748 5.2, first",
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
        "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
    )
    good = agreement("RFC 7748 6.1, Alice", alice, bob_public, both)
    other = agreement("RFC 7748 6.1, Bob", bob, alice_public, both)

    p = 2**255 - 19
    order_8 = (
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    )
    low = {"zero": 0, "one": 1, "-1": p - 1, "order 8": order_8[0], "order 8, too": order_8[1]}
    refuse: list[Vector] = [
        {**good, "name": f"small order: {name}", "says": "small order", "peer": little(u)}
        for name, u in low.items()
    ]
    top_bit = int.from_bytes(bytes.fromhex(bob_public), "little") | 1 << 255
    again = {"the prime": p, "the prime plus nine": p + 9, "top bit set": top_bit}
    refuse += [
        {**good, "name": f"another spelling: {name}", "says": "reduced", "peer": little(u)}
        for name, u in again.items()
    ]
    refuse += [
        {**good, "name": "31 bytes", "says": "has 32 bytes", "peer": bob_public[:-2]},
        {**good, "name": "33 bytes", "says": "has 32 bytes", "peer": bob_public + "00"},
        {**good, "name": "no bytes", "says": "has 32 bytes", "peer": ""},
        {**good, "name": "a private part of 31 bytes", "says": "has 32", "private": alice[:-2]},
    ]
    for vector in refuse:
        vector["expect"] = "CryptoError"
    return [first, good, other, *refuse]


def little(value: int) -> str:
    return value.to_bytes(32, "little").hex()


def ed25519() -> list[Vector]:
    standard: list[Vector] = [
        {
            "name": "RFC 8032 7.1, test 1",
            "private": "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "public": "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "message": "",
            "signature": "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        },
        {
            "name": "RFC 8032 7.1, test 2",
            "private": "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "public": "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "message": "72",
            "signature": "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        },
        {
            "name": "RFC 8032 7.1, test 3",
            "private": "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "public": "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "message": "af82",
            "signature": "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        },
    ]
    for vector in standard:
        vector["expect"] = "ok"
    good = standard[2]
    public, signature = str(good["public"]), str(good["signature"])
    group_order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(bytes.fromhex(signature)[32:], "little")
    refuse: list[Vector] = [
        {**good, "name": "R changed", "signature": flipped(signature, 0)},
        {**good, "name": "S changed", "signature": flipped(signature, 32)},
        {
            **good,
            "name": "S plus the group's order",
            "signature": signature[:64] + little(s + group_order),
        },
        {**good, "name": "message changed", "message": "af83"},
        {**good, "name": "message longer", "message": "af8200"},
        {**good, "name": "another's key", "public": standard[1]["public"]},
        {**good, "name": "key not on the curve", "public": little(2)},
        {**good, "name": "signature of 63 bytes", "signature": signature[:-2]},
        {**good, "name": "signature of 65 bytes", "signature": signature + "00"},
        {**good, "name": "no signature", "signature": ""},
        {**good, "name": "key of 31 bytes", "public": public[:-2]},
        {**good, "name": "no key", "public": ""},
    ]
    for vector in refuse:
        vector["expect"] = "False"
    return standard + refuse


def boxes() -> list[Vector]:
    key = "feffe9928665731c6d6a8f9467308308" * 2
    full: Vector = {
        "name": "GCM specification, test case 16",
        "expect": "ok",
        "key": key,
        "nonce": "cafebabefacedbaddecaf888",
        "associated": "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        "plaintext": "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        "box": "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
        "76fc6ece0f4e1768cddf8853bb2d551b",
    }
    zero = {"expect": "ok", "key": "00" * 32, "nonce": "00" * 12, "associated": ""}
    good: list[Vector] = [
        {
            **zero,
            "name": "GCM specification, test case 13",
            "plaintext": "",
            "box": "530f8afbc74536b9a963b4f1c4cb738b",
        },
        {
            **zero,
            "name": "GCM specification, test case 14",
            "plaintext": "00" * 16,
            "box": "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919",
        },
        full,
    ]
    box, nonce, associated = str(full["box"]), str(full["nonce"]), str(full["associated"])
    opens = "cannot be unsealed"
    refuse: list[Vector] = [
        {**full, "name": "ciphertext changed", "says": opens, "box": flipped(box, 0)},
        {**full, "name": "tag changed", "says": opens, "box": flipped(box, -1)},
        {**full, "name": "box cut", "says": opens, "box": box[:-2]},
        {**full, "name": "box shorter than a tag", "says": opens, "box": box[:20]},
        {**full, "name": "no box", "says": opens, "box": ""},
        {**full, "name": "another key", "says": opens, "key": flipped(key, 31)},
        {**full, "name": "another nonce", "says": opens, "nonce": flipped(nonce, 0)},
        {**full, "name": "another context", "says": opens, "associated": flipped(associated, 0)},
        {**full, "name": "no context", "says": opens, "associated": ""},
        {**full, "name": "key of 16 bytes", "says": "key has 32 bytes", "key": key[:32]},
        {**full, "name": "nonce of 11 bytes", "says": "nonce has 12", "nonce": nonce[:-2]},
        {**full, "name": "no nonce", "says": "nonce has 12", "nonce": ""},
    ]
    for vector in refuse:
        vector["expect"] = "CryptoError"
    return good + refuse


def hpke() -> list[Vector]:
    # The RFC seals with associated data, which single-shot HPKE in `cryptography` does not have.
    # What there is to agree on before that (KEM, key schedule) ends in the RFC's key and nonce;
    # "sealed" is the RFC's plaintext under these without associated data.
    enc = "37fda3567bdbd628e88668c3c8d7e97d1d1253b6d4ea6d44c150f741f1bf4431"
    key, nonce = "4531685d41d65f03dc48f6b8302c05b0", "56d890e5accaaf011cff4b7d"
    plaintext = "4265617574792069732074727574682c20747275746820626561757479"
    box = AESGCM(bytes.fromhex(key)).encrypt(bytes.fromhex(nonce), bytes.fromhex(plaintext), b"")
    good: Vector = {
        "name": "RFC 9180 A.1.1, sequence number 0",
        "expect": "ok",
        "private": "4612c550263fc8ad58375df3f557aac531d26850903e55a9f23f21d8534e8ac8",
        "public": "3948cfe0ad1ddb695d780e59077195da6c56506b027329794ab02bca80815c4d",
        "info": "4f6465206f6e2061204772656369616e2055726e",
        "key": key,
        "base_nonce": nonce,
        "plaintext": plaintext,
        "aad": "436f756e742d30",
        "ct": "f938558b5d72f1a23810b4be2ab4f84331acc02fc97babc53a52ae8218a355a9"
        "6d8770ac83d07bea87e13c512a",
        "sealed": enc + box.hex(),
    }
    sealed = str(good["sealed"])
    refuse: list[Vector] = [
        {**good, "name": "ephemeral key changed", "sealed": flipped(sealed, 0)},
        {**good, "name": "ephemeral key of small order", "sealed": "00" * 32 + sealed[64:]},
        {**good, "name": "ciphertext changed", "sealed": flipped(sealed, 32)},
        {**good, "name": "tag changed", "sealed": flipped(sealed, -1)},
        {**good, "name": "box cut", "sealed": sealed[:-2]},
        {**good, "name": "ephemeral key alone", "sealed": enc},
        {**good, "name": "part of the ephemeral key", "sealed": enc[:40]},
        {**good, "name": "no box", "sealed": ""},
        {**good, "name": "another info", "info": flipped(str(good["info"]), 0)},
        {**good, "name": "no info", "info": ""},
        {**good, "name": "another's key", "private": flipped(str(good["private"]), 5)},
    ]
    for vector in refuse:
        vector |= {"expect": "CryptoError", "says": "cannot be unsealed"}
    return [good, *refuse]


if __name__ == "__main__":
    write(
        "hkdf.json",
        "HKDF with SHA-256 (RFC 5869, appendix A), and Secret.derive on top of it",
        ["ikm", "salt", "info", "prk", "okm", "key", "output"],
        hkdf(),
    )
    write(
        "x25519.json",
        "X25519 (RFC 7748, 5.2 and 6.1), and AgreementKey.agree on top of it",
        ["private", "public", "peer", "shared", "agreed"],
        x25519(),
    )
    write(
        "ed25519.json",
        "Ed25519 (RFC 8032, 7.1)",
        ["private", "public", "message", "signature"],
        ed25519(),
    )
    write(
        "boxes.json",
        "AES-256-GCM (McGrew and Viega, the GCM specification, appendix B)",
        ["key", "nonce", "associated", "plaintext", "box"],
        boxes(),
    )
    write(
        "hpke.json",
        "HPKE base mode, DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-128-GCM (RFC 9180, A.1.1)",
        ["private", "public", "info", "key", "base_nonce", "plaintext", "aad", "ct", "sealed"],
        hpke(),
    )
