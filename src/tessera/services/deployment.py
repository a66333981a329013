"""The parties of a deployment, made from a bundle, a folder of keys and a folder of state.

Neither the leader nor the helper needs PyTorch. A client of a named task does; one of a plan
without a task is synthetic (`simulation/population.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.crypto.entropy import Entropy
from tessera.crypto.secret import Secret
from tessera.errors import ConfigError
from tessera.ids import HELPER, SERVER, ClientId, RoundId
from tessera.learning.tables.submodel import Submodel
from tessera.plan import Plan
from tessera.privacy.dp.ledger import Ledger
from tessera.privacy.index.groups import DrawnGroups
from tessera.privacy.index.period import PeriodStore
from tessera.protocols.membership.draw import void_before
from tessera.protocols.two_server.collector import MemoryReplayGuard
from tessera.protocols.two_server.read.client import RowTagCache
from tessera.rounds import schemes
from tessera.rounds.attendance import Place, registered
from tessera.rounds.cohorts import cohorts_of
from tessera.rounds.noise import noise_of
from tessera.rounds.party import HelperKeys, HelperParty, LocalState, ServerParty
from tessera.runs.folder import write_owner_only
from tessera.services.account_store import default_home
from tessera.services.bundle import Bundle
from tessera.services.charged_trainings import AccountLedger, ChargedTrainings, OwnBudget
from tessera.services.client import ClientService, MakeLocal, Train, TrainingResult
from tessera.services.group_client import GroupClientService
from tessera.services.group_leader import GroupLeaderService
from tessera.services.helper import HelperService
from tessera.services.journal import Journal, explained
from tessera.services.journal_stores import ATTENDANCE, attendance_text, ledger_id
from tessera.services.keyring import REGISTERED, Keyring
from tessera.services.leader import LeaderService
from tessera.services.link import name_of
from tessera.services.membership import groups_of, join_group, joined_group
from tessera.services.offered_rows import OfferedRows, OneGroup
from tessera.simulation import population

ClientMaker = Callable[[Journal, ClientId], tuple[MakeLocal, Train]]
"""What a client has of its own: its data and choices, and how it trains."""


def leader_party(keyring: Keyring, entropy: Entropy) -> ServerParty:
    """What the leader has for all rounds; with one server it has no use for some of it."""
    return ServerParty(
        entropy=entropy,
        servers=keyring.directory.servers,
        key=keyring.signing,
        row_tags=RowTagCache(),
    )


LEADER: Final = "leader"
"""Whose state it is, as an operator reads it."""


def open_leader(
    bundle: Bundle, keys: Path, state: Path, entropy: Entropy
) -> LeaderService | GroupLeaderService:
    plan, keyring = bundle.plan, Keyring.read(keys, SERVER, bundle.digest)
    draws = keyring.draws(plan) if plan.grouped else []
    # What it was sent is no secret from a leader later; the noise that it has drawn is.
    noisy = noise_of(plan).erases_logs
    journal = Journal.open(state, owner=LEADER, plan=bundle.digest, erase=noisy)
    try:
        with explained(journal.path, "read"):
            if plan.grouped:
                void = max(void_before(draws).values(), default=0)
                return GroupLeaderService(
                    journal,
                    plan,
                    groups_of(draws, plan),
                    first_model=bundle.first_model,
                    entropy=entropy,
                    drawn=DrawnGroups(size=plan.group_size, void=void),
                )
            return LeaderService(
                journal,
                plan,
                keyring.directory.clients.keys(),
                first_model=bundle.first_model,
                party=leader_party(keyring, entropy),
                identity=keyring.identity,
                schedule=keyring.directory.schedule(plan),
            )
    except BaseException:
        journal.close()
        raise


def open_helper(bundle: Bundle, keys: Path, state: Path, entropy: Entropy) -> HelperService:
    if HELPER not in schemes.of(bundle.plan).sum.helpers:
        raise ConfigError(
            f"scheme {bundle.plan.scheme.value!r} has no helper", hint="it has one server: serve"
        )
    keyring = Keyring.read(keys, HELPER, bundle.digest)
    assert keyring.box is not None
    party = HelperParty(
        entropy=entropy,
        servers=keyring.directory.servers,
        keys=HelperKeys(keyring.signing, keyring.box),
        replay_guard=MemoryReplayGuard(),  # its journal's takes its place
        row_tags=RowTagCache(),
    )
    journal = Journal.open(state, owner=HELPER, plan=bundle.digest)
    try:
        with explained(journal.path, "read"):
            return HelperService(
                journal,
                bundle.plan,
                first_model=bundle.first_model,
                party=party,
                directory=keyring.directory.clients,
            )
    except BaseException:
        journal.close()
        raise


def open_clients(
    bundle: Bundle,
    keyrings: Collection[Keyring],
    state: Path,
    entropy: Entropy,
    make: ClientMaker,
    account: Account | None = None,
) -> list[ClientService | GroupClientService]:
    """These clients over one journal.

    Rows of theirs that have met another group in this `account` are refused (`AnotherGroup`); so is
    a training that its own budget does not cover beside all others (`BudgetExceeded`).
    """
    plan = bundle.plan
    owner = ", ".join(name_of(keyring.party) for keyring in keyrings)
    if len(keyrings) > 2:
        first, *_, last = (name_of(keyring.party) for keyring in keyrings)
        owner = f"{first} to {last}"
    services: list[ClientService | GroupClientService] = []
    journal = Journal.open(state, owner=owner, plan=bundle.digest, parties=len(keyrings))
    try:
        schedule = next(iter(keyrings)).directory.schedule(plan) if keyrings else None
        for keyring in keyrings:
            assert not isinstance(keyring.party, str)
            with explained(journal.path, "read"):
                own = make(journal, keyring.party)
                _register(journal, keyring, plan)
                place = None if schedule is None else schedule.place_of(keyring.party)
                service = _client(journal, plan, keyring, own, entropy, account or Account(), place)
                if isinstance(service.local.ledger, AccountLedger):
                    service.local.ledger.must_afford(noise_of(plan).foreseen)
                services.append(service)
    except BaseException:
        journal.close()
        raise
    return services


def _client(
    journal: Journal,
    plan: Plan,
    keyring: Keyring,
    own: tuple[MakeLocal, Train],
    entropy: Entropy,
    account: Account,
    place: Place | None,
) -> ClientService | GroupClientService:
    """One client; of a fixed group after it has checked the group's proof."""
    me, (local, train) = keyring.party, own
    assert not isinstance(me, str)
    if plan.grouped:
        name = name_of(me)
        found = keyring.group(plan, joined_group(journal, name))
        join_group(journal, name, found)
        keys = {leaf.client: leaf.key for leaf in found.group.leaves}
        members = tuple(int(member) for member in found.group.members)
        return GroupClientService(
            journal,
            plan,
            me,
            group=found,
            key=keyring.signing,
            local=_agreed(journal, plan, me, keys, account, local, members),
            train=train,
            entropy=entropy,
        )
    return ClientService(
        journal,
        plan,
        me,
        local=_agreed(journal, plan, me, keyring.directory.clients, account, local, place=place),
        train=train,
        entropy=entropy,
        identity=keyring.identity,
        servers=keyring.directory.servers,
    )


def _register(journal: Journal, keyring: Keyring, plan: Plan) -> None:
    """That a client has been in no round yet, once in its life: a note beside its keys says so.

    A client whose journal is gone finds the note, and does not begin anew: it takes all places that
    it has had for used (`rounds/attendance.py`).
    """
    nothing, note = registered(plan, keyring.directory.servers), keyring.folder / REGISTERED
    if not nothing or note.exists():
        return
    name = name_of(keyring.party)
    if journal.fact(name, ATTENDANCE) is None:
        with journal.step():
            journal.set_fact(name, ATTENDANCE, attendance_text(nothing))
    write_owner_only(note, b"")


@dataclass(frozen=True, slots=True)
class Account:
    """Where a user account keeps what it has offered and spent, whether it accepts the price of
    more, and the most that it spends on all trainings together."""

    home: Path | None = None
    accepts_identification: bool = False
    budget: OwnBudget | None = None

    @property
    def folder(self) -> Path:
        return self.home or default_home()

    def ledger(
        self, journal: Journal, plan: Plan, client: ClientId, person: str, before: Ledger
    ) -> Ledger:
        """A client's ledger of a plan with noise, which is charged in this account as well."""
        noise, budget, store = noise_of(plan), self.budget, ChargedTrainings(self.folder)
        training = store.training(
            plan.federation, ledger_id(journal, name_of(client)), person, noise.bounds
        )
        limits = budget and noise.own_limits(epsilon=budget.epsilon, delta=budget.delta)
        return AccountLedger(store, training, limits=limits or (), entries=before.entries)


def _budget_flaw(plan: Plan, local: LocalState) -> str:
    """Why a client's own budget cannot be kept here; "" if it can."""
    if not noise_of(plan).foreseen:
        return "this training adds no noise, and no epsilon covers it"
    return "" if local.names is not None else "its data are made up, and nobody's budget"


def _agreed(
    journal: Journal,
    plan: Plan,
    client: ClientId,
    keys: Mapping[ClientId, bytes],
    account: Account,
    make: MakeLocal,
    members: tuple[int, ...] = (),
    place: Place | None = None,
) -> MakeLocal:
    """What a client keeps to: as many rounds of a period as it can insist on, its place in the
    schedule; and, where it has data of its own, one group for each row and one account of all
    trainings, whatever they are called there."""

    def made(periods: PeriodStore, ledger: Ledger) -> LocalState:
        local = make(periods, ledger)
        local.place = place
        if not members:
            drawn = cohorts_of(plan).least_rounds(len(keys))
            local.own_rounds = plan.privacy.own_rounds_of(local.own_rounds, drawn)
        if account.budget is not None and (flaw := _budget_flaw(plan, local)):
            raise ConfigError(
                f"client {client}: a budget of its own, and {flaw}",
                hint="leave out --budget-epsilon to take part nevertheless",
            )
        if local.names is not None and noise_of(plan).foreseen:
            local.ledger = account.ledger(journal, plan, client, local.names.person, ledger)
        if local.names is not None:
            one_group = OneGroup(
                periods,
                OfferedRows(account.folder),
                plan,
                client,
                local.names,
                directory=keys,
                members=members,
                accepted=account.accepts_identification,
            )
            one_group.check(local.real)
            local.periods = one_group
        return local

    return made


def synthetic_maker(bundle: Bundle) -> ClientMaker:
    """Clients with random rows and noise for updates, the same in every process."""
    if bundle.synthetic is None:
        raise ConfigError("the bundle has a task, and no synthetic clients")
    rows, maps, plan = bundle.synthetic.rows, bundle.derived_maps(), bundle.plan

    def make(_: Journal, client: ClientId) -> tuple[MakeLocal, Train]:
        update = population.trainer(plan, client)

        def local(periods: PeriodStore, ledger: Ledger) -> LocalState:
            real = population.real_rows(plan, client, rows)
            return LocalState(real=real, periods=periods, ledger=ledger, derived=maps)

        def train(_: RoundId, submodel: Submodel, coins: Secret) -> TrainingResult:
            return TrainingResult(update(submodel))

        return local, train

    return make
