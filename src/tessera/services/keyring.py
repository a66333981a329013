"""Keys of a deployment: a folder per party, and a directory of everybody's public keys, signed.

    authority/    the key that signs the directory, and that of certificates; keep it away
    leader/       sign.key, tls.key, tls.pem
    helper/       sign.key, box.key
    client-N/     sign.key
    (each)        directory.json, authority.pub, ca.pem

A party takes the directory only with a signature by the authority whose public key is in its own
folder. Files with secrets are readable by their owner only. Where there are fixed groups a client's
directory has no key of a client but its own: beside it is the proof of its group
(`membership.py`).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tessera.crypto.entropy import Entropy
from tessera.crypto.keys import Identity, SealingKey, SigningKey, identities, verify
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret, encode_context
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, ClientId, Party
from tessera.plan import Plan
from tessera.protocols.epochs.group import FixedGroup
from tessera.protocols.membership.draw import Draw
from tessera.protocols.membership.proof import LEAST_GROUPS, CheckedGroup, Pinned, left_over
from tessera.protocols.two_server.params import Servers
from tessera.rounds.schedule import Schedule
from tessera.runs.folder import write_owner_only
from tessera.services.membership import (
    PROOF,
    Snapshots,
    checked_group,
    leaves_of,
    read_draws,
    write_once,
)
from tessera.simulation.two_server import TwoServerSetup

SIGN, BOX, TLS_KEY, TLS = "sign.key", "box.key", "tls.key", "tls.pem"
DIRECTORY, AUTHORITY, CA = "directory.json", "authority.pub", "ca.pem"
REGISTERED: Final = "registered"
"""A note of a client's that it has begun a journal, once in its life."""
AUTHORITYS: Final = "authority"
"""The folder of whoever ran `tessera keys`."""
YEARS: Final = 5


def folder_of(party: Party) -> str:
    """A party's folder among the keys."""
    if isinstance(party, str):
        return "leader" if party == SERVER else party
    return f"client-{party}"


@dataclass(frozen=True, slots=True)
class Directory:
    """Everybody's public keys, for one bundle."""

    bundle: bytes
    servers: Servers
    clients: Mapping[ClientId, bytes] = field(repr=False)
    anchor: bytes = field(default=b"", repr=False)
    """The digest of the latest snapshot before a client's first one, and of snapshot 0 for servers;
    b"" without fixed groups."""
    anchor_number: int = 0
    order: bytes = field(default=b"", repr=False)
    """The seed of a schedule's order: drawn by who signs this, once all keys are there."""

    def key_of(self, party: Party) -> bytes | None:
        """The public signing key of a party; None for a stranger."""
        if party == SERVER:
            return self.servers.leader
        if party == HELPER:
            return self.servers.helper
        return None if isinstance(party, str) else self.clients.get(party)

    def text(self) -> str:
        return json.dumps(
            {
                "bundle": self.bundle.hex(),
                "leader": self.servers.leader.hex(),
                "helper": self.servers.helper.hex(),
                "box": self.servers.box.hex(),
                "clients": {str(c): key.hex() for c, key in sorted(self.clients.items())},
                "anchor": self.anchor.hex(),
                "anchor_number": self.anchor_number,
                "order": self.order.hex(),
            },
            sort_keys=True,
        )

    def of(self, party: Party) -> Directory:
        """What goes into a party's folder: a client's group has the keys of its peers."""
        if not self.anchor or isinstance(party, str):
            return self
        return replace(self, clients={party: self.clients[party]})

    @classmethod
    def parse(cls, text: str) -> Directory:
        found = json.loads(text)
        return cls(
            bytes.fromhex(found["bundle"]),
            Servers(
                leader=bytes.fromhex(found["leader"]),
                helper=bytes.fromhex(found["helper"]),
                box=bytes.fromhex(found["box"]),
            ),
            {ClientId(int(c)): bytes.fromhex(key) for c, key in found["clients"].items()},
            bytes.fromhex(found["anchor"]),
            int(found["anchor_number"]),
            bytes.fromhex(found["order"]),
        )

    def schedule(self, plan: Plan) -> Schedule | None:
        """The place of every client, on the word of who signed this; None: the plan has no places.

        Registration closes with the signature, and the order was drawn then.
        """
        if not plan.cohorts.scheduled:
            return None
        if not self.order:
            raise ConfigError(
                "the directory has no order for a schedule",
                hint="make the keys with this version: tessera keys",
            )
        return Schedule.drawn(self.clients.keys(), plan.cohort, Secret(self.order))


@dataclass(frozen=True, slots=True)
class Keyring:
    """One party's keys and the directory, read from its folder."""

    folder: Path
    party: Party
    directory: Directory
    signing: SigningKey = field(repr=False)
    authority: bytes = field(repr=False)
    box: SealingKey | None = field(default=None, repr=False)

    @property
    def identity(self) -> Identity:
        return Identity(self.signing, self.directory.clients)

    @property
    def waits(self) -> bool:
        """Whether this client was left over so far, and has no group."""
        return not (self.folder / PROOF).exists()

    def group(self, plan: Plan, joined: FixedGroup | None = None) -> CheckedGroup:
        """A client's fixed group, by the proof in its folder; `joined` is the one it has already.

        `GroupFault`: it does not follow from what was signed.
        """
        assert not isinstance(self.party, str)
        if not self.directory.anchor:
            raise ConfigError(
                f"{self.folder}: keys without groups, and the plan has fixed groups",
                hint="`tessera keys` draws them",
            )
        pinned = Pinned(
            federation=plan.federation,
            plan=plan.lasting_digest,
            size=plan.group_size,
            authority=self.authority,
            parties=(self.directory.servers.leader, self.authority),
            anchor=self.directory.anchor,
            anchor_number=self.directory.anchor_number,
            small=plan.groups.small,
            one_operator=True,
        )
        return checked_group(self.folder, pinned, self.party, self.signing.public, joined)

    def draws(self, plan: Plan) -> list[Draw]:
        """All snapshots, as the leader has them."""
        draws, keys = read_draws(self.folder, plan.group_size), self.directory.clients
        if any(keys.get(leaf.client) != leaf.key for draw in draws for leaf in draw.leaves):
            raise ConfigError(
                f"{self.folder}: snapshots of other clients than those of the directory",
                hint="take both from one folder",
            )
        return draws

    @classmethod
    def read(cls, folder: Path, party: Party, bundle: bytes) -> Keyring:
        """`ConfigError` if a file is missing, somebody else's, or not signed by the authority."""
        with _reading(folder):
            signing = SigningKey.from_secret(_secret(folder / SIGN))
            box = SealingKey.from_secret(_secret(folder / BOX)) if party == HELPER else None
        directory, authority = _read_directory(folder, bundle)
        if directory.key_of(party) != signing.public:
            raise ConfigError(
                f"{folder / SIGN}: not the key that the directory has for {folder_of(party)}",
                hint="every party has a folder of its own",
            )
        return cls(folder, party, directory, signing, authority, box)


def make_keys(
    out: Path,
    bundle: bytes,
    federation: str,
    clients: Iterable[ClientId],
    entropy: Entropy,
    hosts: Collection[str],
    *,
    group: int = 0,
) -> Directory:
    """Write a folder of keys for everybody, and draw fixed groups of so many, if any.

    `ConfigError` if there are keys already: they are not touched.
    """
    if (out / AUTHORITYS / SIGN).exists():
        more = "--add N adds clients to these; " if group else ""
        raise ConfigError(
            f"{out}: there are keys already, and they are left as they are",
            hint=f"{more}another --out begins anew",
        )
    authority = SigningKey.from_secret(entropy.secret(Label.AUTHORITY, federation))
    both = TwoServerSetup.of(entropy, federation)
    leader, helper, box = both.leader, both.helper.signing, both.helper.box
    own = {client: each.key for client, each in identities(clients, entropy, federation).items()}
    public = {client: key.public for client, key in own.items()}
    certifier = _Certifier()
    secrets: dict[str, dict[str, bytes]] = {
        AUTHORITYS: {SIGN: authority.secret.reveal(), "ca.key": certifier.key_pem},
        folder_of(SERVER): {SIGN: leader.secret.reveal()},
        folder_of(HELPER): {SIGN: helper.secret.reveal(), BOX: box.secret.reveal()},
        **{folder_of(client): {SIGN: key.secret.reveal()} for client, key in own.items()},
    }
    # The leader's only: with a certificate for the same hosts, a helper could pass for the leader
    # and take its half of every report, too. It opens no port and needs none.
    mine = secrets[folder_of(SERVER)]
    mine[TLS_KEY], mine[TLS] = certifier.server(folder_of(SERVER), hosts)
    for name, files in secrets.items():
        (out / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, content in files.items():
            write_owner_only(out / name / file, content)
    anchor = b""
    if group:
        snapshots = Snapshots(
            authority=out / AUTHORITYS,
            leader=out / folder_of(SERVER),
            keys=(leader, authority),
            size=group,
        )
        snapshots.begin(federation, entropy)
        anchor = snapshots.draws[-1].snapshot.digest
    order = entropy.secret(Label.SCHEDULE_SEED, federation).reveal()
    directory = Directory(bundle, both.servers, public, anchor, order=order)
    clients_by_folder = {folder_of(client): client for client in own}
    whole = _signed(directory, authority)
    for name in secrets:
        here = directory.of(clients_by_folder.get(name, SERVER))
        signed = whole if here is directory else _signed(here, authority)
        _describe(out / name, signed, authority.public, certifier.pem)
    if group:
        snapshots.admit(leaves_of(federation, public))
        snapshots.draw()
        snapshots.publish(lambda client: out / folder_of(client))
    return directory


def _describe(folder: Path, directory: str, authority: bytes, ca: bytes) -> None:
    """What is no secret in a party's folder."""
    (folder / DIRECTORY).write_text(directory, encoding="utf-8")
    (folder / AUTHORITY).write_text(authority.hex() + "\n", encoding="utf-8")
    (folder / CA).write_bytes(ca)


class KeyFolders:
    """All folders of a federation with fixed groups, to add clients to.

    Whoever has a group keeps it, and no byte of its folder changes. A call that was killed is gone
    on with by the same call.
    """

    def __init__(self, out: Path, bundle: bytes, size: int) -> None:
        self._out, self._authority = out, out / AUTHORITYS
        leader = out / folder_of(SERVER)
        for folder in (self._authority, leader):
            if not (folder / SIGN).exists():
                raise ConfigError(
                    f"{folder / SIGN}: there is no key",
                    hint="without --add `tessera keys` makes the first ones; to add to them it "
                    "needs the folders of authority and leader",
                )
        self.directory, _ = _read_directory(self._authority, bundle)
        self._key = SigningKey.from_secret(_secret(self._authority / SIGN))
        self.snapshots = Snapshots(
            authority=self._authority,
            leader=leader,
            keys=(SigningKey.from_secret(_secret(leader / SIGN)), self._key),
            size=size,
        )

    def add(self, count: int, entropy: Entropy, *, small: bool) -> list[Draw]:
        """Keys of so many new clients, and a snapshot of them and of those who wait; all draws."""
        pending = self.snapshots.pending
        if pending is None:
            self._check_enough(count, small=small)
            self._admit(count, entropy)
        elif len(pending.leaves) != count:
            raise ConfigError(
                f"a snapshot of {len(pending.leaves)} newcomers was begun and is not ended",
                hint=f"--add {len(pending.leaves)} goes on with it; --void gives it up, which all "
                "clients will see",
            )
        self.snapshots.draw()
        return self._publish()

    def void(self) -> list[Draw]:
        """Give up a snapshot that was begun: its clients are in the next one; all draws."""
        self.snapshots.void()
        return self._publish()

    def _check_enough(self, count: int, *, small: bool) -> None:
        before, size = self.snapshots.draws[-1], self.snapshots.size
        waiting = len(before.left_over)
        if waiting + count < size:
            raise ConfigError(
                f"--add {count}: with {waiting} who wait there is no group of {size}",
                hint="add more at a time",
            )
        newcomers = waiting + count - left_over(before.snapshot, size, void=before.void)
        if newcomers < LEAST_GROUPS * size and not small:
            raise ConfigError(
                f"--add {count}: groups of {size} are drawn among at least {LEAST_GROUPS * size} "
                "newcomers: among fewer, whoever admits clients chooses who is in a group",
                hint="add more at a time, or [groups] small = true for a small federation",
            )

    def _admit(self, count: int, entropy: Entropy) -> None:
        """Folders of the new clients; then they are the newcomers of the next snapshot."""
        latest, directory = self.snapshots.draws[-1].snapshot, self.directory
        first = max(directory.clients, default=-1) + 1
        clients = map(ClientId, range(first, first + count))
        public = {}
        for client, each in identities(clients, entropy, latest.federation).items():
            folder = self._out / folder_of(client)
            folder.mkdir(mode=0o700, exist_ok=True)
            if not (folder / SIGN).exists():  # by a call that was killed before it was known
                write_once(folder / SIGN, each.key.secret.reveal())
            key = SigningKey.from_secret(_secret(folder / SIGN)).public
            own = replace(
                directory, clients={client: key}, anchor=latest.digest, anchor_number=latest.number
            )
            ca = (self._authority / CA).read_bytes()
            _describe(folder, _signed(own, self._key), self._key.public, ca)
            public[client] = key
        self.snapshots.admit(leaves_of(latest.federation, public))

    def _publish(self) -> list[Draw]:
        draws = self.snapshots.draws
        keys = {leaf.client: leaf.key for leaf in draws[-1].leaves}
        whole = replace(self.directory, clients={**self.directory.clients, **keys})
        for name in (folder_of(SERVER), folder_of(HELPER), AUTHORITYS):
            if (path := self._out / name / DIRECTORY).exists():
                draft = path.with_suffix(".new")
                draft.write_text(_signed(whole, self._key), encoding="utf-8")
                draft.replace(path)
        self.snapshots.publish(lambda client: self._out / folder_of(client))
        return draws


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder}: not a folder of keys: {error}", hint="`tessera keys` writes them"
        ) from error


def _read_directory(folder: Path, bundle: bytes) -> tuple[Directory, bytes]:
    """The directory of a folder, and the key of the authority that has signed it."""
    with _reading(folder):
        signed = json.loads((folder / DIRECTORY).read_text(encoding="utf-8"))
        authority = bytes.fromhex((folder / AUTHORITY).read_text(encoding="utf-8").strip())
        statement = _statement(signed["directory"])
        signature = bytes.fromhex(signed["signature"])
        directory = Directory.parse(signed["directory"])
    if not verify(authority, signature, statement):
        raise ConfigError(
            f"{folder / DIRECTORY}: not signed by the authority of {folder / AUTHORITY}",
            hint="take both from whoever ran `tessera keys`",
        )
    if directory.bundle != bundle:
        raise ConfigError(
            f"{folder}: keys for bundle {directory.bundle.hex()[:16]}, this is bundle "
            f"{bundle.hex()[:16]}",
            hint="use the bundle that the keys were made for",
        )
    return directory, authority


def _signed(directory: Directory, authority: SigningKey) -> str:
    text = directory.text()
    return json.dumps({"directory": text, "signature": authority.sign(_statement(text)).hex()})


def _statement(directory: str) -> bytes:
    return encode_context(Label.DIRECTORY, directory)


def _secret(path: Path) -> Secret:
    content = path.read_bytes()
    if len(content) != 32:
        raise ValueError(f"{path.name} has {len(content)} bytes where a key has 32")
    return Secret(content)


class _Certifier:
    """A certificate authority for the TLS certificates of one deployment."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tessera deployment")])
        self._certificate = self._signed(
            self._name, self._key.public_key(), x509.BasicConstraints(ca=True, path_length=0), []
        )

    def _signed(
        self, subject: x509.Name, public: Any, constraints: x509.BasicConstraints, names: list[Any]
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=365 * YEARS))
            .add_extension(constraints, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if constraints.ca:
            builder = builder.add_extension(_usage(), critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def server(self, name: str, hosts: Collection[str]) -> tuple[bytes, bytes]:
        """(key, certificate) of a server under these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tessera {name}")])
        certificate = self._signed(
            subject,
            key.public_key(),
            x509.BasicConstraints(ca=False, path_length=None),
            [_general_name(host) for host in hosts],
        )
        return _pem(key), certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return _pem(self._key)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)


def _usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
