"""What a plan has to be like as a whole: refused before anything is sent.

A section checks its own keys (`sections.py`); here are the rules between sections, those of [dp]
last.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.compression import ROWS, shapes_of
from tessera.plan.dp import DPPlan, NoisyRows, listed_rows
from tessera.plan.scheme import Scheme
from tessera.plan.sections import Crypto, Domain, Metrics, Sharing
from tessera.privacy.dp.guarantee import Trust, Unit
from tessera.protocols.secagg.params import GraphKind, Threat

if TYPE_CHECKING:
    from tessera.plan.plan import Plan


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
    check_groups(plan)
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


def check_drawn(plan: Plan) -> None:
    """Refuse [cohorts] that the rest of a plan cannot have."""
    if plan.drawn_in_secret:
        _check_secret(plan)
    if plan.cohorts.scheduled:
        _check_schedule(plan)
    elif plan.cohorts.rounds_per_client and plan.grouped:
        raise ConfigError(
            f"[cohorts] rounds_per_client = {plan.cohorts.rounds_per_client} with fixed groups, "
            "whose members are all in every sum",
            hint='leave it out, or name another level than "groups" in [privacy]',
        )


def _check_schedule(plan: Plan) -> None:
    """All that moves clients to another place, and rounds that have none for what is promised."""
    said, cohorts, rounds = '[cohorts] drawn = "schedule"', plan.cohorts, plan.simulation.rounds
    for name, wrong, hint in (
        ("fixed groups", plan.grouped, 'another level than "groups" in [privacy]'),
        ("pseudonyms", plan.privacy.pseudonyms, "leave pseudonyms out of [privacy]"),
        ("keys that last", plan.key_rounds > 1, "key_rounds = 1 in [two_server]"),
    ):
        if wrong:
            raise ConfigError(
                f"{said} with {name}: who is in a round is public, and another cohort in each",
                hint=hint,
            )
    fit = -(-rounds // (cohorts.separation or 1))
    if cohorts.rounds_per_client > fit:
        raise ConfigError(
            f"[cohorts] rounds_per_client = {cohorts.rounds_per_client} at a separation of "
            f"{cohorts.separation or 1}: a training of {rounds} rounds has room for {fit}",
            hint=f"rounds_per_client = {fit}, a smaller separation, or more rounds in [simulation]",
        )


def _check_secret(plan: Plan) -> None:
    """All that would show who is in a cohort, or would have it follow from something else."""
    said, dp = f'[cohorts] drawn = "secret", share = {plan.cohorts.share:g}', plan.dp
    if dp is None:
        raise ConfigError(
            f"{said} without [dp]: a secret cohort is for noise that is charged as on a sample",
            hint="leave [cohorts] out, or add [dp]",
        )
    if dp.unit is not Unit.USER:
        raise ConfigError(
            f"{said} with [dp] unit = {dp.unit.value!r}: cohorts that are drawn in secret have an "
            "account per user only",
            hint='use drawn = "seed" or "schedule", or unit = "user"',
        )
    if dp.trust in (Trust.SHARES, Trust.LOCAL):
        raise ConfigError(
            f"{said} with [dp] trust = {dp.trust.value!r}: the more clients add noise, the more "
            "of it is in the sum, and over all its words that shows who is there",
            hint='use drawn = "seed" or "schedule", or trust = "server" or "each"',
        )
    if plan.scheme is Scheme.SUBMODEL or (
        plan.scheme is Scheme.SECURE_SUBMODEL and dp.rows is NoisyRows.OWN
    ):
        raise ConfigError(
            f"{said} with scheme = {plan.scheme.value!r}: rows that are released exactly show who "
            "is there",
            hint='use rows = "all" or a public "list" with "secure-submodel", or another scheme',
        )
    if plan.narrows:
        raise ConfigError(
            f"{said} where tables are narrowed to the union, which is released exactly",
            hint='use domain = "whole" in [two_server], with a higher row_limit if need be',
        )
    if plan.key_rounds > 1:
        raise ConfigError(
            f"{said} with key_rounds = {plan.key_rounds}: where keys last, so does the cohort",
            hint="use key_rounds = 1 in [two_server]",
        )
    if plan.security.sharing is not Sharing.SECURE:
        raise ConfigError(
            f"{said} with sharing = {plan.security.sharing.value!r}",
            hint='use sharing = "secure" in [security]',
        )
    if plan.simulation.metrics is Metrics.FEDERATED:
        raise ConfigError(
            f'{said} with metrics = "federated": statistics of those who took part would be a '
            "second release under the same coins, which has no account",
            hint='use metrics = "central" in [simulation]',
        )


def check_groups(plan: Plan) -> None:
    """Refuse groups beside what has none, and what does not go with them."""
    size = plan.groups.size
    if size and plan.scheme is Scheme.SECURE_SUBMODEL and not plan.grouped:
        other = "[dp] rows that everybody has" if plan.listed else f"level = {plan.privacy.level!r}"
        raise ConfigError(
            f"[groups] size = {size} with {other}: clients are in no fixed groups",
            hint='leave it out, or use level = "groups", or scheme = "secure-fedavg"',
        )
    if not plan.grouped:
        return
    if plan.security.sharing is not Sharing.SECURE:
        raise ConfigError(
            f"fixed groups with sharing = {plan.security.sharing.value!r}: who is summed with whom "
            "would differ from round to round",
            hint='use sharing = "secure", or no groups: another level, or no [groups] size',
        )
    if plan.scheme is Scheme.SECURE_FEDAVG and plan.dp is not None:
        raise ConfigError(
            f"[groups] size = {size} with [dp]: noise is computed for the sum over a cohort, and "
            "each group has a sum of its own",
            hint="leave out the one or the other",
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


# --- noise checks ---------------------------------------------------------------------------------
#
# What a plan has to be like for its section [dp]: refused before anything is sent.


def check_noise(plan: Plan, dp: DPPlan) -> None:
    """Refuse what would make a number of [dp] wrong."""
    if plan.scheme is Scheme.CENTRAL:
        raise ConfigError(
            "[dp] with central training: there are no clients, and nobody to add noise for",
            hint="name a federated scheme, or leave [dp] out",
        )
    dp.printed.check_scheme(hides=plan.scheme.hides)
    if dp.trust is Trust.SERVER and plan.scheme is Scheme.TWO_SERVER:
        raise ConfigError(
            '[dp] trust = "server" with two servers, of which both see the sum without noise',
            hint='use trust = "local", or a scheme with one server',
        )
    if dp.unit is Unit.SUBJECT and dp.trust is Trust.SERVER and plan.scheme.hides:
        raise ConfigError(
            f'[dp] unit = "subject" with trust = "server" needs every client\'s gradients at '
            f"the server, which scheme = {plan.scheme.value!r} hides",
            hint='use trust = "local", or scheme = "fedavg"',
        )
    if plan.simulation.patience and not (
        dp.unit is Unit.USER and plan.simulation.metrics is Metrics.FEDERATED
    ):
        raise ConfigError(
            f"[simulation] patience = {plan.simulation.patience} with [dp] and no charged metric: "
            "training would end by exact figures on held-out examples, and when it ends shows them",
            hint="leave patience out, or have it decide by noisy figures that clients are charged "
            'for: metrics = "federated" with [dp] unit = "user"',
        )
    for name, clip in (("clip", plan.update.clip), ("dense_clip", plan.update.dense_clip)):
        if 0.0 < clip < dp.clip:
            raise ConfigError(
                f"[update] {name} = {clip:g} is below [dp] clip = {dp.clip:g}: it would cut "
                "what the noise is made for",
                hint=f"[update] {name} is the quantiser's range: make it {dp.clip:g} or more",
            )
    if dp.correlated and plan.server is not None:
        _check_constant(plan.server)
    training = plan.training
    if training is None:
        return
    if training.clip:
        raise ConfigError(
            f"[training] clip = {training.clip:g} beside [dp] clip = {dp.clip:g}",
            hint="leave out the first: it bounds a batch's gradient and protects nobody",
        )
    if not dp.by_examples:
        return
    if training.weight_decay:
        raise ConfigError(
            f"[training] weight_decay = {training.weight_decay:g} with [dp] unit = "
            f"{dp.unit.value!r}: on the rows that a batch touches it would show which these are",
            hint="leave it out, or use shrinkage in [server]",
        )
    if training.examples:
        raise ConfigError(
            f"[training] examples = {training.examples} with [dp] unit = {dp.unit.value!r}: who "
            "is in a step is drawn by [dp] alone",
            hint="leave it out: steps and batch say how much is trained",
        )
    if training.epochs != 1 or not training.batch:
        raise ConfigError(
            f"[training] epochs = {training.epochs} and batch = {training.batch} with [dp] "
            f"unit = {dp.unit.value!r}: the number of steps and the divisor are not to follow from "
            "the data",
            hint="use [dp] steps, and for batch the number of examples that a batch is to have",
        )


def _check_constant(server: ServerStep) -> None:
    """Correlated noise cancels where every round's sum is added with the same weight."""
    for what, wrong, hint in (
        ("optimizer", server.optimizer not in ("plain", "sum"), 'optimizer = "plain" or "sum"'),
        ("decay", server.decay != 1.0, "decay = 1"),
        ("schedule", server.schedule != "constant", 'schedule = "constant"'),
        ("threshold", server.threshold > 0.0, "threshold = 0"),
    ):
        if wrong:
            raise ConfigError(
                f"[dp] correlated with [server] {what} = {getattr(server, what)!r}: sums of rounds "
                "would be added with different weights, and noise of one round would not cancel "
                "that of another",
                hint=f"use {hint} in [server], or leave correlated out of [dp]",
            )


def _check_correlated(plan: Plan, dp: DPPlan) -> None:
    """What correlated noise needs of the model's rows and of the cohorts."""
    if plan.drawn_in_secret:
        raise ConfigError(
            "[dp] correlated with cohorts that are drawn in secret: there is no account of a "
            "sample under correlated noise",
            hint='a public schedule, [cohorts] drawn = "schedule", or leave correlated out',
        )
    if plan.security.sharing is Sharing.AUTO:
        raise ConfigError(
            '[dp] correlated with sharing = "auto": a round has two sums, and noise is for one',
            hint='use sharing = "secure" in [security]',
        )
    if plan.narrows or (plan.by_rows and not dp.listed and plan.scheme is not Scheme.TWO_SERVER):
        raise ConfigError(
            "[dp] correlated where a round opens the rows of its own clients: noise of a row that "
            "opens in some rounds does not cancel",
            hint='use rows = "all", a public "list" or "selected", or domain = "whole" in '
            "[two_server]",
        )


def check_noise_in_sums(plan: Plan, dp: DPPlan) -> None:
    """Refuse what noise inside the sums cannot protect, once the plan has its model."""
    _check_listed(plan, dp)
    _check_weights(plan, dp)
    if dp.unit is Unit.INDEX:
        _check_index(plan)
    if plan.drawn_in_secret and plan.counts_rows:
        raise ConfigError(
            f'[cohorts] drawn = "secret" with [dp] counts = {dp.counts:g}: sums are '
            "divided by the number of clients that is expected, and not by counts",
            hint="leave counts out of [dp]",
        )
    if dp.correlated:
        _check_correlated(plan, dp)
    if dp.trust is Trust.SHARES:
        _check_shares(plan, dp)
    elif dp.trust is Trust.EACH:
        _check_each(plan)


def _check_index(plan: Plan) -> None:
    """All that leaves a client, which a row of its examples may move otherwise than by values."""
    if plan.scheme is Scheme.TWO_SERVER:
        short = next((t for t in plan.roots if plan.union.max_rows < t.rows), None)
        if short is not None:
            raise ConfigError(
                f'[dp] unit = "index" with max_rows = {plan.union.max_rows} of {short.rows} rows '
                f"of table {short.name!r}: a client with more rows leaves some out, and which ones "
                "changes with every row it holds",
                hint=f"max_rows = {short.rows} in [union], or a scheme with one server",
            )
    if plan.narrows:
        raise ConfigError(
            '[dp] unit = "index" where tables are narrowed to the union, which is released '
            "exactly: there is no finite epsilon",
            hint='use domain = "whole" in [two_server], with a higher row_limit if need be',
        )
    if plan.security.sharing is Sharing.AUTO:
        raise ConfigError(
            '[dp] unit = "index" with sharing = "auto", which follows from all of a client\'s data',
            hint='use sharing = "secure" in [security]',
        )
    if plan.update.error_feedback:
        raise ConfigError(
            '[dp] unit = "index" with error_feedback: what a client keeps of earlier updates '
            "carries a row into all later ones",
            hint="leave it out",
        )


def _check_weights(plan: Plan, dp: DPPlan) -> None:
    """A whole model's weight is one count, which must leave room for the rest."""
    if plan.update.average is not Average.EXAMPLES or plan.scheme.by_rows:
        return
    if dp.counts * plan.update.max_count > dp.clip:
        raise ConfigError(
            f'average = "examples" with counts = {dp.counts:g} in [dp]: the weight of a client '
            f"with {plan.update.max_count} examples is longer than clip = {dp.clip:g}",
            hint="a smaller max_count in [update] or counts in [dp], or leave counts out",
        )


def _check_listed(plan: Plan, dp: DPPlan) -> None:
    if not dp.listed:
        return
    if dp.rows is NoisyRows.SELECTED:
        _check_selected(plan, dp)
    if plan.scheme is not Scheme.SECURE_SUBMODEL:
        everywhere = dp.rows in (NoisyRows.ALL, NoisyRows.SELECTED)
        whole = everywhere and plan.scheme is not Scheme.SUBMODEL
        # A trusted server is told rows by name, and adds noise to all there are.
        whole |= dp.rows is NoisyRows.ALL and dp.trust is Trust.SERVER
        if not whole:
            raise ConfigError(
                f"[dp] rows = {dp.rows.value!r} with scheme = {plan.scheme.value!r}",
                hint='leave rows out, or use scheme = "secure-submodel"',
            )
        return
    known = {t.name: t.rows for t in plan.tables}
    for name, ids in listed_rows(dp.row_list).items():
        if name not in known or int(ids[-1]) >= known[name]:
            raise ConfigError(
                f"[dp] row_list names row {int(ids[-1])} of table {name!r}",
                hint="the tables are " + ", ".join(f"{n} ({r} rows)" for n, r in known.items()),
            )
    for name, ids in plan.listed.items():
        if len(ids) > dp.row_limit:
            raise ConfigError(
                f"[dp] rows = {dp.rows.value!r}: {len(ids)} rows of table {name!r} for every "
                f"client, where row_limit = {dp.row_limit}",
                hint='use rows = "list" with fewer, or raise row_limit',
            )


def _check_selected(plan: Plan, dp: DPPlan) -> None:
    if not plan.tables:
        raise ConfigError(
            '[dp] rows = "selected" without a table: there are no rows to select',
            hint="leave rows out",
        )
    large = max(plan.tables, key=lambda t: t.rows)
    if large.rows > dp.row_limit:
        raise ConfigError(
            f'[dp] rows = "selected": every client marks among {large.rows} rows of table '
            f"{large.name!r}, where row_limit = {dp.row_limit}",
            hint='fewer rows, such as [task] ids = "hash" with fewer buckets, or raise row_limit',
        )
    if plan.narrows:
        raise ConfigError(
            '[dp] rows = "selected" where tables are narrowed to the union, which is released '
            "exactly: there is no finite epsilon",
            hint='use domain = "whole" in [two_server], with a higher row_limit if need be',
        )
    if not plan.scheme.by_rows and plan.update.average is Average.ROWS:
        raise ConfigError(
            '[dp] rows = "selected" with average = "rows": sums are divided by the popularity',
            hint='use average = "examples" in [update]',
        )


def _check_shares(plan: Plan, dp: DPPlan) -> None:
    if not plan.scheme.secure:
        raise ConfigError(
            f'[dp] trust = "shares" with scheme = {plan.scheme.value!r}: there is no secure sum '
            "that hides a client's share of the noise",
            hint='use scheme = "secure-fedavg" or "secure-submodel"',
        )
    if plan.scheme is Scheme.SECURE_SUBMODEL and not dp.listed:
        raise ConfigError(
            '[dp] trust = "shares" on the rows of a union, which is released exactly: there is no '
            "finite epsilon",
            hint='use rows = "all" or a public "list" in [dp]',
        )
    if plan.security.sharing is not Sharing.SECURE:
        raise ConfigError(
            f'[dp] trust = "shares" with sharing = {plan.security.sharing.value!r}: an update in '
            "the open would carry a share of the noise only",
            hint='use sharing = "secure" in [security]',
        )
    if dp.corrupt and dp.corrupt < plan.security.corrupt:
        raise ConfigError(
            f"[dp] corrupt = {dp.corrupt} is below [security] corrupt = {plan.security.corrupt}: "
            "clients that collude with the server tell it their shares of the noise",
            hint="leave it out of [dp]",
        )
    if plan.corrupt_shares >= plan.least_survivors:
        raise ConfigError(
            f"[dp] corrupt = {plan.corrupt_shares} of at least {plan.least_survivors} survivors: "
            "nobody is left whose noise counts",
            hint="a smaller corrupt, a larger cohort, or less dropout in [security]",
        )


def _check_each(plan: Plan) -> None:
    if plan.scheme is not Scheme.TWO_SERVER:
        raise ConfigError(
            f'[dp] trust = "each" with scheme = {plan.scheme.value!r}, which has one server',
            hint='use scheme = "two-server", or trust = "shares"',
        )
    if plan.narrows:
        raise ConfigError(
            '[dp] trust = "each" where tables are narrowed to the union, which is released '
            "exactly: there is no finite epsilon",
            hint='use domain = "whole" in [two_server], with a higher row_limit if need be',
        )
    if plan.two_server.key_rounds > 1:
        raise ConfigError(
            f'[dp] trust = "each" with key_rounds = {plan.two_server.key_rounds}: a client that '
            "is missing in a period, and the rows its keys are for, have no account",
            hint="use key_rounds = 1 in [two_server]",
        )
