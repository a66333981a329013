"""What a plan has to be like as a whole: refused before anything is sent.

A section checks its own keys (`sections.py`); here are the rules between sections. Those of [dp]
are in `noise_checks.py`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.selection import ROWS, shapes_of
from tessera.protocols.secagg.params import GraphKind, Threat
from tessera.rounds.plan.scheme import Scheme
from tessera.rounds.plan.sections import Crypto, Domain, Sharing

if TYPE_CHECKING:
    from tessera.rounds.plan.plan import Plan


def check_tables(plan: Plan) -> None:
    """Refuse tables that are missing, share a name, or follow from one that does not exist."""
    if plan.scheme in (Scheme.SUBMODEL, Scheme.SECURE_SUBMODEL) and not plan.tables:
        whole = "fedavg" if plan.scheme is Scheme.SUBMODEL else "secure-fedavg"
        raise ConfigError(
            f"scheme = {plan.scheme.value!r} without a table: there are no rows to choose",
            hint=f"add a [[table]], or use {whole}",
        )
    names = [t.name for t in plan.tables]
    if len(set(names)) != len(names):
        raise ConfigError(
            f"plan: two tables have one name: {', '.join(names)}",
            hint="give each [[table]] a name of its own",
        )
    for table in plan.tables:
        parent = table.derived_from
        if parent and (parent not in names or plan.table(parent).derived_from):
            raise ConfigError(
                f"plan: table {table.name!r} is derived from {parent!r}, which is not a "
                "table with rows of its own",
                hint=f"the tables are {', '.join(names)}",
            )


def check_cohort(plan: Plan) -> None:
    """Refuse a cohort that cannot be summed as the plan says."""
    if plan.scheme.secure and plan.security.threshold > plan.cohort:
        raise ConfigError(
            f"cohort = {plan.cohort} is below [security] threshold = {plan.security.threshold}",
            hint="take a larger cohort, or leave the threshold out: it is computed",
        )
    if plan.grouped and plan.cohort % plan.privacy.group_size:
        raise ConfigError(
            f"cohort = {plan.cohort} is not a number of groups of {plan.privacy.group_size}",
            hint="make cohort a multiple of [privacy] group, or name another level",
        )
    if plan.grouped and plan.security.sharing is not Sharing.SECURE:
        raise ConfigError(
            f'level = "groups" with sharing = {plan.security.sharing.value!r}: who is summed '
            "with whom would differ from round to round",
            hint='use sharing = "secure", or name another level',
        )
    if plan.privacy.strict_quorum and plan.scheme is not Scheme.SECURE_SUBMODEL:
        raise ConfigError(
            f"plan: strict_quorum has no meaning with scheme {plan.scheme}",
            hint="leave it out, or use secure-submodel",
        )
    if plan.privacy.strict_quorum and plan.simulation.crypto is not Crypto.EVERY:
        raise ConfigError(
            "plan: strict_quorum decides which rows are lost while a sum is unmasked, which "
            "has no place in an ideal round",
            hint='use [simulation] crypto = "every" with it',
        )
    if plan.privacy.pseudonyms and plan.security.threat is Threat.ACTIVE:
        raise ConfigError(
            "plan: pseudonyms with an active server: its clients sign under certified names",
            hint='use threat = "semi-honest", or no pseudonyms',
        )


def check_liars(plan: Plan) -> None:
    """Refuse an active server where clients cannot check who shares which rows.

    Masks are bound to the rows that two clients share, and who shares what is the server's word. It
    says that no row has a group and sends dead rows to all but one: that one's dense part opens.
    Where everybody names the whole union a client knows its groups, and leaves.
    """
    if plan.scheme is not Scheme.SECURE_SUBMODEL or not plan.by_rows:
        return
    if plan.security.threat is Threat.ACTIVE and not plan.privacy.index.names_all:
        level = f'level = "{plan.privacy.level}"' if plan.privacy.level else "p1 to p4"
        raise ConfigError(
            f'{level} with threat = "active": where clients name different rows they cannot check '
            "who shares them, and a server that lies about it opens the dense part of one client, "
            "bit by bit",
            hint='use level = "groups" or "cpp5", or threat = "semi-honest"',
        )


def check_selection(plan: Plan) -> None:
    """Refuse [update] top where it cannot be hidden, or has nothing to select from."""
    if plan.scheme not in (Scheme.FEDAVG, Scheme.SUBMODEL, Scheme.TWO_SERVER):
        raise ConfigError(
            f"top = {plan.update.top:g} with scheme = {plan.scheme.value!r}: "
            + (
                "there are no clients that select"
                if plan.scheme is Scheme.CENTRAL
                else "masked sums have every element, or name the rows that they have"
            ),
            hint='use "two-server", which hides what is selected, or "fedavg" in the clear',
        )
    if plan.dp is not None:
        raise ConfigError(
            "top beside [dp]: what is selected follows from values without noise",
            hint="leave out the one or the other",
        )
    if not plan.is_complete:
        return
    if not plan.model.dense:
        raise ConfigError(
            f"top = {plan.update.top:g}: the model has no dense parameters to select from",
            hint="leave top out: rows of tables are selected by what a client holds",
        )
    shapes = shapes_of(plan.model.shapes)
    if shapes and sum(map(prod, shapes)) != plan.model.dense:
        raise ConfigError(
            f"shapes = {plan.model.shapes!r} has other than {plan.model.dense} elements",
            hint="all tensors of the dense part in order; with a task leave it out",
        )
    if not plan.cuts:
        raise ConfigError(
            f'top_by = "row": no tensor of the dense part has {ROWS:,} rows',
            hint='use top_by = "element", or name the tensors in [model] shapes',
        )


def check_two_servers(plan: Plan) -> None:
    """Refuse what two servers cannot do, or what would reveal more between them."""
    if not plan.tables and not plan.selects:
        raise ConfigError(
            f"scheme = {plan.scheme.value!r} without a table: there are no rows to fetch",
            hint="add a [[table]], or send the largest changes only: [update] top = 0.01",
        )
    if plan.two_server.key_rounds > 1 and plan.narrows:
        raise ConfigError(
            f"key_rounds = {plan.two_server.key_rounds}: keys cannot last where the tables are "
            "narrowed to another union in each round",
            hint='use domain = "whole" in [two_server], with a higher row_limit if need be, or '
            "key_rounds = 1",
        )
    if plan.two_server.key_rounds > 1 and plan.privacy.pseudonyms:
        raise ConfigError(
            f"key_rounds = {plan.two_server.key_rounds} under pseudonyms: keys that last name "
            "their client in every round",
            hint="use key_rounds = 1, or no pseudonyms",
        )
    if plan.two_server.key_rounds > 1 and plan.selects:
        raise ConfigError(
            f"key_rounds = {plan.two_server.key_rounds} with top = {plan.update.top:g}: other "
            "changes are the largest in each round, and keys that last are for the same rows",
            hint="use key_rounds = 1, or leave top out",
        )
    if not plan.tables and plan.two_server.domain is Domain.UNION:
        raise ConfigError(
            'domain = "union" without a table: there are no rows to take a union of',
            hint='use domain = "whole" or "auto" in [two_server]',
        )
    largest = max(plan.tables, key=lambda t: t.rows, default=None)
    limit = plan.two_server.row_limit
    if plan.two_server.domain is Domain.WHOLE and largest and largest.rows > limit:
        raise ConfigError(
            f"table {largest.name!r} has {largest.rows} rows, and both servers would "
            f"process all of them for every client (row_limit = {plan.two_server.row_limit})",
            hint='use domain = "union" or "auto" in [two_server], or raise row_limit',
        )
    if plan.least_survivors < plan.security.corrupt + 2:
        raise ConfigError(
            f"a sum over {plan.least_survivors} clients of which {plan.security.corrupt} are "
            "corrupt reveals what one honest client wrote",
            hint="a larger cohort, or a larger min_cohort in [two_server]",
        )
    if plan.least_survivors > plan.cohort:
        raise ConfigError(
            f"min_cohort = {plan.two_server.min_cohort} of a cohort of {plan.cohort}",
            hint="a larger cohort, or a smaller min_cohort in [two_server]",
        )
    if plan.narrows:
        try:
            if plan.security.graph is not GraphKind.COMPLETE:
                raise ConfigError(f"graph = {plan.security.graph.value!r}, not the complete one")
            plan.union_sum(RoundId(0))  # what cannot work is refused here
        except ConfigError as error:
            raise ConfigError(
                f"the union before two servers is summed against an active server: {error}",
                hint="leave graph and threshold out of [security], with corrupt below a third "
                "of the cohort and a cohort of at most 1,000, or raise row_limit",
            ) from error
