"""Unmasking: whether a server that records everything can unmask more than the sums.

Two rules of the secure sum are tested. *Stages share no secrets*: of a client that answered the
union and dropped out of the update, the server recovers the seed of the first stage and the key of
the second; if the keys were the same, its union input would be unmasked. *In a row's group every
two members mask with each other*, whatever the graph: otherwise a member whose graph neighbours are
all outside the group would be alone, and its row unmasked once its seed is known.

A row counts as unmasked if its words look like it: values and count of one client lie in a small
part of the ring. Uniform words lie there with a known probability, which is the claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.audit.finding import ClusteredTrials, Finding
from tessera.audit.round_view import PhasesView, Truth
from tessera.crypto import prg
from tessera.crypto.keys import AgreementKey
from tessera.crypto.prg import Label
from tessera.crypto.secret import Secret
from tessera.ids import ClientId, StageId
from tessera.learning.compression import signed
from tessera.plan import UNION, Plan
from tessera.protocols.secagg import mask_streams, transcript
from tessera.protocols.secagg.session import neighbourhood
from tessera.protocols.secagg.unmask import RecoveryTask, recover

UPDATE: Final = StageId(1)
NOTHING_BOUND: Final = transcript.pair_binding(transcript.agreed_digest())
"""Nothing that the masks of the union's sum could be bound to was sent before it."""
SIMILAR: Final = 0.5
"""An unmasked union input has this much in common with its client's rows: all but the decoys."""


def recovered(
    view: PhasesView, stage: StageId, kind: str, owners: Iterable[ClientId]
) -> dict[ClientId, Secret]:
    """The secrets that the shares of one kind ("self_masks", "mask_keys") give, unchecked."""
    params = view.plan.secagg(view.round_id)
    hood = neighbourhood(params, view.roster)
    given = [m for m in view.shares if m.stage == stage]
    wanted = []
    for owner in owners:
        points = {holder: i for i, holder in enumerate(hood.holders(owner), start=1)}
        shares = {m.sender: getattr(m, kind)[owner] for m in given if owner in getattr(m, kind)}
        if len(shares) >= hood.threshold:
            wanted.append(RecoveryTask(owner, points, shares, lambda _: True))
    return recover(wanted, threshold=hood.threshold).secrets


@dataclass(slots=True)
class KeptShares:
    """A late dropout's union input, with the key that its second stage gave away."""

    plan: Plan
    truth: Truth = field(repr=False)
    _opened: ClusteredTrials = field(default_factory=ClusteredTrials)

    def take(self, view: PhasesView) -> None:
        late = sorted(set(view.in_union) - set(view.survivors))
        if not view.finished or not late:
            return
        seeds = recovered(view, UNION, "self_masks", late)
        keys = recovered(view, UPDATE, "mask_keys", late)
        for client in late:
            hit = False
            if client in seeds and client in keys:
                hit = self._open(
                    view, client, seeds[client], AgreementKey.from_secret(keys[client])
                )
            self._opened.add(view.period, int(hit), 1)

    def findings(self) -> list[Finding]:
        return [
            self._opened.finding(
                "kept shares: a late dropout's union input opens",
                claimed=0.0,
                meaning="with the shares of both stages; each stage has keys of its own",
            )
        ]

    def _open(self, view: PhasesView, client: ClientId, seed: Secret, key: AgreementKey) -> bool:
        params, spec = self.plan.secagg(view.round_id), self.plan.stages[UNION]
        public = {m.client: m.stages[UNION].mask_key for m in view.roster.members}
        if key.public != public[client]:
            return False  # not the key this input was masked with, and the attacker sees that
        message = next(m for m in view.inputs if (m.sender, m.stage) == (client, UNION))
        words = spec.group.unpack(message.dense, spec.dense)
        context = transcript.roster_context(params, view.roster)
        near = neighbourhood(params, view.roster).neighbours(client)
        streams, signs = [mask_streams.dense_stream(seed, Label.SELF_MASK)], [-1]
        for peer in sorted(set(near) & set(view.sharers)):
            pair = mask_streams.pair_secret(
                key, public[peer], context, (client, peer), UNION, NOTHING_BOUND
            )
            streams.append(mask_streams.dense_stream(pair, Label.PAIR_MASK))
            signs.append(-mask_streams.mask_sign(client, peer))
        prg.accumulate(spec.group, words, streams, signs)
        found = self.plan.union_encoding(view.round_id).decode(words).ids
        real = self.truth[client]
        both = np.intersect1d(found, real).size
        return both > SIMILAR * np.union1d(found, real).size


@dataclass(slots=True)
class LoneRows:
    """Whether one member's words of a row look like an update once its self-mask is removed."""

    plan: Plan
    truth: Truth = field(repr=False)
    _open: ClusteredTrials = field(default_factory=ClusteredTrials)
    _chance: float = 0.0

    def take(self, view: PhasesView) -> None:
        if not view.finished:
            return
        plan, total = self.plan, view.sums[UPDATE]
        alive = set(view.survivors)
        seeds = recovered(view, UPDATE, "self_masks", view.survivors)
        inputs = {m.sender: m for m in view.inputs if m.stage == UPDATE}
        for place, spec in enumerate(plan.stages[UPDATE].tables):
            part = total.tables[spec.table]
            size = np.zeros(len(part.rows), dtype=np.int64)
            whole = np.ones(len(part.rows), dtype=np.bool_)
            for client in part.members:
                size[part.index(client)] += 1
                if client not in alive:  # its masks come off by its key: that is another attack
                    whole[part.index(client)] = False
            for client in sorted(alive & seeds.keys() & part.members.keys()):
                at, rows = part.index(client), part.members[client]
                words = plan.ring.unpack(inputs[client].tables[place], len(rows) * spec.width)
                words = words.reshape(len(rows), spec.width)
                own = mask_streams.row_stream(seeds[client], Label.SELF_MASK, spec.table)
                everything = np.arange(len(rows), dtype=np.uint64)
                prg.accumulate_rows(plan.ring, words, [own], [-1], [everything], [rows])
                fair = (size[at] >= 2) & whole[at]
                looks = self._plausible(words)
                self._open.add(view.period, int((looks & fair).sum()), int(fair.sum()))
                self._chance += int(fair.sum()) * self._by_chance(spec.width)

    def findings(self) -> list[Finding]:
        trials = self._open.trials
        return [
            self._open.finding(
                "lone rows: one member's row looks open",
                claimed=self._chance / trials if trials else 0.0,
                meaning="without its self-mask; uniform words look open by chance this often",
            )
        ]

    def _plausible(self, words: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        quantizer, values = self.plan.quantizer, signed(words, self.plan.ring)
        small = (np.abs(values[:, :-1]) <= quantizer.top).all(axis=1)
        counted = (values[:, -1] >= 0) & (values[:, -1] <= quantizer.max_count)
        return np.asarray(small & counted)

    def _by_chance(self, width: int) -> float:
        quantizer, order = self.plan.quantizer, self.plan.ring.order
        value = min(1.0, (2 * quantizer.top + 1) / order)
        return math.pow(value, width - 1) * min(1.0, (quantizer.max_count + 1) / order)
