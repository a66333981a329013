"""What a plan has to be like for its section [dp]: refused before anything is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.errors import ConfigError
from tessera.learning.averaging import Average
from tessera.rounds.plan.dp import DPPlan, NoiseFrom, NoisyRows, listed_rows
from tessera.rounds.plan.scheme import Scheme
from tessera.rounds.plan.sections import Metrics, Sharing

if TYPE_CHECKING:
    from tessera.rounds.plan.plan import Plan


def check_noise(plan: Plan, dp: DPPlan) -> None:
    """Refuse what would make a number of [dp] wrong."""
    if plan.scheme is Scheme.CENTRAL:
        raise ConfigError(
            "[dp] with central training: there are no clients, and nobody to add noise for",
            hint="name a federated scheme, or leave [dp] out",
        )
    dp.printed.check_scheme(hides=plan.scheme.hides)
    if dp.trust is NoiseFrom.SERVER and plan.scheme is Scheme.TWO_SERVER:
        raise ConfigError(
            '[dp] trust = "server" with two servers, of which both see the sum without noise',
            hint='use trust = "local", or a scheme with one server',
        )
    if dp.unit == "subject" and dp.trust is NoiseFrom.SERVER and plan.scheme.hides:
        raise ConfigError(
            f'[dp] unit = "subject" with trust = "server" needs every client\'s gradients at '
            f"the server, which scheme = {plan.scheme.value!r} hides",
            hint='use trust = "local", or scheme = "fedavg"',
        )
    if dp.participation:
        _check_participation(plan, dp)
    if plan.simulation.patience and not (
        dp.unit == "user" and plan.simulation.metrics is Metrics.FEDERATED
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
            f"{dp.unit!r}: on the rows that a batch touches it would show which these are",
            hint="leave it out, or use shrinkage in [server]",
        )
    if training.examples:
        raise ConfigError(
            f"[training] examples = {training.examples} with [dp] unit = {dp.unit!r}: who is in "
            "a step is drawn by [dp] alone",
            hint="leave it out: steps and batch say how much is trained",
        )
    if training.epochs != 1 or not training.batch:
        raise ConfigError(
            f"[training] epochs = {training.epochs} and batch = {training.batch} with [dp] "
            f"unit = {dp.unit!r}: the number of steps and the divisor are not to follow from "
            "the data",
            hint="use [dp] steps, and for batch the number of examples that a batch is to have",
        )


def _check_participation(plan: Plan, dp: DPPlan) -> None:
    """All that would show who is in a cohort, or would have it follow from something else."""
    said = f"[dp] participation = {dp.participation:g}"
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
    if plan.privacy.one_participation:
        raise ConfigError(
            f"{said} with one_participation: who was in a round would be in no other, and coins "
            "would not be independent",
            hint="leave out the one or the other",
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


def check_noise_in_sums(plan: Plan, dp: DPPlan) -> None:
    """Refuse what noise inside the sums cannot protect, once the plan has its model."""
    _check_listed(plan, dp)
    _check_weights(plan, dp)
    if dp.unit == "index":
        _check_index(plan)
    if dp.participation and plan.counts_rows:
        raise ConfigError(
            f"[dp] participation = {dp.participation:g} with counts = {dp.counts:g}: sums are "
            "divided by the number of clients that is expected, and not by counts",
            hint="leave counts out of [dp]",
        )
    if dp.trust is NoiseFrom.SHARES:
        _check_shares(plan, dp)
    elif dp.trust is NoiseFrom.EACH:
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
