"""What the FedMMF paper claims and what our figures say of it, and how its tables are shown.

Claims are sentences that follow from cells alone, those that `--json` prints. Nothing here knows
how a claim comes out. A claim that the cells do not reach is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from papers.cells import FAILS, HOLDS, IN_PART, Cell, CellIndex, Claim, stars
from papers.show import Chart, Layout, Page, Style
from tessera.report.numbers import plural, score, share, signed

SMALL: Final = 0.001
"""RMSE below which two models are not distinguished."""
COVER: Final = 0.6
"""An AUC for "liked" up to this is hardly more than a guess; from `BARE` on it says almost all."""
BARE: Final = 0.9


PREDICTORS: Final = ("user mean", "item mean", "both means")
J_SHARED: Final = "J, ratings shared"
J_HELD_BACK: Final = "J, held-back ratings"
MASKS_ALONE: Final = "RMSE of the masks alone"


def claims(cells: Sequence[Cell]) -> list[Claim]:
    found = CellIndex(cells)
    makers: Sequence[Callable[[CellIndex], Iterator[Claim]]] = (
        gains,
        orders,
        features,
        recovery,
        ranking,
        penalties,
        paths,
        baselines,
    )
    return [claim for maker in makers for claim in maker(found)]


def sets_of(cells: CellIndex) -> dict[str, str]:
    """Names of data sets, and their tables."""
    return {
        t.removeprefix("Table 4, "): t
        for t in cells.tables("Table 4, ")
        if not t.startswith("Table 4, gains")
    }


def gains(cells: CellIndex) -> Iterator[Claim]:
    """Masks make matrix factorisation better, on every set (4.3)."""
    for table in cells.tables("Table 4, gains"):
        for name in sets_of(cells):
            rows = [row for row in cells.rows(table) if row.rpartition(": ")[0] == name]
            details, ours, pairs = [], [], []
            for row in rows:
                cell = cells.cell(table, row, "RMSE")
                assert cell is not None and cell.ours is not None
                order = row.rpartition(": ")[2]
                part = f"{order} {gain(cell.ours)} ({cell.note.partition(';')[0]})"
                if cell.paper is not None:
                    part += f", in the paper {gain(cell.paper)}"
                    if "; paper: " not in cell.note:  # there it is of other data
                        pairs.append((cell.ours, cell.paper))
                details.append(part)
                ours.append(cell.ours)
            if not ours:
                continue
            if max(ours) >= -SMALL:
                verdict = FAILS if min(ours) >= -SMALL else IN_PART
            else:
                # A gain that is less than half of what is printed is another gain.
                enough = all(a <= 0.5 * b for a, b in pairs)
                verdict = HOLDS if enough else IN_PART
            evidence = f"RMSE of FedMMF less FedMF on the same seeds: {'; '.join(details)}."
            evidence += _tuned(cells, name)
            yield Claim(f"Masks improve on FedMF ({name})", verdict, evidence)


def _tuned(cells: CellIndex, name: str) -> str:
    """What FedMF itself reaches, against the paper's own."""
    table = sets_of(cells)[name]
    ours, paper = (f(table, "FedMF", "RMSE") for f in (cells.ours, cells.paper))
    note = cells.cell(table, "FedMF", "RMSE")
    if ours is None or paper is None or note is None or "other data" in note.note:
        return ""
    printed = (cells.paper(table, row, "RMSE") for row in cells.rows(table) if row[:6] == "FedMMF")
    best = [value for value in printed if value is not None]
    evidence = f" FedMF itself is at {stars(ours)} here and at {stars(paper)} there"
    if best and ours < min(best):
        evidence += (
            f": without any mask it is better than the paper's best with one ({stars(min(best))})"
        )
    return evidence + "."


def orders(cells: CellIndex) -> Iterator[Claim]:
    """Two-order and high-order masks are better than one-order ones (4.3)."""
    for name, table in sets_of(cells).items():
        first = cells.ours(table, "FedMMF, one order", "RMSE")
        printed = cells.paper(table, "FedMMF, one order", "RMSE")
        details, gained = [], []
        for order in ("two order", "high order"):
            other = cells.ours(table, f"FedMMF, {order}", "RMSE")
            if first is None or other is None:
                continue
            part = f"{order} {gain(other - first)}"
            theirs = cells.paper(table, f"FedMMF, {order}", "RMSE")
            if theirs is not None and printed is not None:
                part += f" (paper {gain(theirs - printed)})"
            details.append(part)
            gained.append(other - first)
        if not gained:
            continue
        verdict = _verdict([gain < -SMALL for gain in gained])
        evidence = f"RMSE less that of one-order masks: {'; '.join(details)}."
        yield Claim(f"Products of attributes make better masks ({name})", verdict, evidence)


def features(cells: CellIndex) -> Iterator[Claim]:
    """FedMMF beats models of the same attributes, local and federated (4.3)."""
    details, ahead = [], []
    for name, table in sets_of(cells).items():
        pairs, found = [], cells.line(table, "RMSE")
        for order, short in (("one", "linear"), ("two", "FM"), ("high", "network")):
            masked = found.get(f"FedMMF, {order} order")
            others = [
                found[row] for row in (f"local {short}", f"federated {short}") if row in found
            ]
            if masked is not None and others:
                pairs.append(f"{short} {stars(masked)} against {stars(min(others))}")
                ahead.append(masked < min(others) - SMALL)
        if pairs:
            details.append(f"{name}: {', '.join(pairs)}")
    if ahead:
        evidence = (
            f"RMSE against the better of the local and the federated model. {'; '.join(details)}."
        )
        yield Claim("FedMMF beats models of the attributes alone", _verdict(ahead), evidence)


GIVEN_AWAY: Final = "What masked ratings give away, "


def recovery(cells: CellIndex) -> Iterator[Claim]:
    """Masked ratings cannot be turned back into ratings (4.2.1, Table 2)."""
    for table in cells.tables(GIVEN_AWAY):
        name = table.removeprefix(GIVEN_AWAY)
        shares = cells.line(table, "recovered to half a star")
        if not shares:
            continue
        most = max(shares.values())
        verdict = HOLDS if most < 0.2 else IN_PART if most < 0.5 else FAILS
        details = " and ".join(f"{share(found)} ({row})" for row, found in shares.items())
        evidence = (
            "Who knows the lowest and highest rating of each client, and stretches its masked "
            f"ratings to that range, has {details} of all ratings to within half a star."
        )
        first = "g = 1, off by less than 0.5"
        printed = [
            cells.paper(f"Table 2, recovery: {name}, {row}", first, "0-.2") for row in shares
        ]
        if lost := [value for value in printed if value is not None]:
            evidence += (
                f" In the paper {lost[0]:.0f}% of clients lose less than a fifth in this way "
                "(on MovieLens 10M)."
            )
        yield Claim(f"Masks keep ratings from being recovered ({name})", verdict, evidence)


def ranking(cells: CellIndex) -> Iterator[Claim]:
    """Masked ratings do not tell what a client likes (4.2.2, Table 3)."""
    for table in cells.tables(GIVEN_AWAY):
        areas, details = [], []
        for row in cells.rows(table):
            found = {c: cells.ours(table, row, c) for c in cells.columns(table)}
            area = next((v for c, v in found.items() if c.startswith("AUC")), None)
            paper_way, fair = (
                found.get(f"top tenth found, {way}") for way in ("as in the paper", "fairly")
            )
            if area is None or paper_way is None or fair is None:
                continue
            areas.append(area)
            details.append(f"{row}: AUC {score(area)}, {share(paper_way)}, {share(fair)}")
        if not areas:
            continue
        most = max(areas)
        verdict = HOLDS if most <= COVER else FAILS if most >= BARE else IN_PART
        evidence = (
            "How well masked ratings tell liked items from others (an AUC of .5 is a guess); how "
            "many of the items that they put in a client's top tenth are in the true one, by the "
            "paper's count, which draws that one among equal ratings; and how many are rated as "
            f"high as its last. {'; '.join(details)}."
        )
        yield Claim(
            f"Masks hide what a client likes ({table.removeprefix(GIVEN_AWAY)})", verdict, evidence
        )


def penalties(cells: CellIndex) -> Iterator[Claim]:
    """The indicator rises with the penalty; the error falls, then rises (Figure 4)."""
    for table in cells.tables("Figure 4"):
        rows = cells.rows(table)
        shared = [cells.ours(table, row, J_SHARED) or 0.0 for row in rows]
        held = [cells.ours(table, row, J_HELD_BACK) or 0.0 for row in rows]
        errors = [cells.ours(table, row, "RMSE") or 0.0 for row in rows]
        if len(rows) < 3:
            continue
        rising = all(a < b for a, b in pairwise(shared))
        best = min(range(len(rows)), key=errors.__getitem__)
        inside = 0 < best < len(rows) - 1
        verdict = HOLDS if rising and inside else IN_PART if rising or inside else FAILS
        rises = "rises all the way" if rising else "does not rise all the way"
        where = "inside" if inside else "at the edge of"
        low = min(range(len(rows)), key=held.__getitem__)
        evidence = (
            f"J of the ratings that are shared {rises}, from {score(shared[0])} at a penalty of "
            f"{rows[0]} to {score(shared[-1])} at {rows[-1]}; RMSE is least at {rows[best]} "
            f"({stars(errors[best])}), {where} the grid. J of ratings that were held back, which "
            f"is what a client can estimate of the definition, is least at {rows[low]}."
        )
        yield Claim("Indicator and error go different ways over the penalty", verdict, evidence)


def paths(cells: CellIndex) -> Iterator[Claim]:
    """Unmasked updates by the indicator leave the model as it is (3.4)."""
    for table in cells.tables("Paths: "):
        errors = cells.line(table, "RMSE").values()
        gap = max(cells.line(table, "largest difference of an item's factor").values(), default=0.0)
        if len(errors) < 2:
            continue
        wide = max(errors) - min(errors)
        verdict = HOLDS if wide < SMALL else FAILS
        unmasked = cells.ours(table, "auto", "unmasked clients, per round")
        apart = "nothing at all" if gap == 0 else f"at most {gap:.1e} in any factor"
        same = "is the same to the last digit" if wide == 0 else f"lies within {wide:.1e}"
        evidence = (
            f"RMSE masked, unmasked and mixed {same}; with the same coins for rounding the models "
            f"differ by {apart}. Mixed, {unmasked or 0:.0f} clients of a round sent unmasked "
            "updates; each of them revealed its update to the server, and one bit: that its own "
            "estimate of the indicator is at most the plan's."
        )
        yield Claim("Secure, plain and mixed sums give the same model", verdict, evidence)


def baselines(cells: CellIndex) -> Iterator[Claim]:
    """Not a claim of the paper's: models against baselines."""
    details, ahead = [], []
    for name, table in sets_of(cells).items():
        found = cells.line(table, "RMSE")
        means = {row: v for row, v in found.items() if row in PREDICTORS}
        ours = {row: v for row, v in found.items() if row.startswith("Fed")}
        if not means or not ours:
            continue
        best, lowest = min(means, key=means.__getitem__), min(ours, key=ours.__getitem__)
        behind = [row for row, value in ours.items() if value >= means[best] - SMALL]
        ahead += [row not in behind for row in ours]
        part = f"{name}: {lowest} {stars(ours[lowest])}, {best} {stars(means[best])}"
        details.append(part + (f", and not better: {'; '.join(behind)}" if behind else ""))
    if ahead:
        evidence = f"RMSE of the best of each. {'; '.join(details)}."
        yield Claim("Federated factors beat plain means", _verdict(ahead), evidence)


def _verdict(ahead: Sequence[bool]) -> str:
    return HOLDS if all(ahead) else IN_PART if any(ahead) else FAILS


def gain(value: float) -> str:
    return signed(value, digits=4)


# --- how they are shown ---------------------------------------------------------------------------

SAMPLED: Final = (
    "Cryptography is sampled: on MovieLens the first round of FedMF's first seed is really masked, "
    "with all its clients; all other rounds add the same integers in the clear, which changes no "
    "bit of a model.",
    "The whole model is summed with a count per row (secure-fedavg). On Last.fm that is more than "
    "a million values from each client, and no round of 1,000 clients was masked.",
)
QUICKLY: Final = (
    "The runs of Table 4 and Figure 4 have no real round: sums are of the same integers that "
    "clients would mask. Really masked rounds, of 100 clients, are under “Masked, unmasked, "
    "mixed”.",
    *SAMPLED[1:],
)
ERRORS: Final = "Errors (Table 4)"
ATTACKS: Final = "Attacks on masked ratings (Tables 2 and 3)"
PATHS: Final = "Masked, unmasked, mixed"


def lede(cells: Sequence[Cell]) -> tuple[str]:
    every = [claim.verdict for claim in claims(cells)]
    return (
        "Every client fits a small model to its own ratings, subtracts its predictions, and "
        f"federates the rest. Of {plural(len(every), 'claim')} that our figures reach, "
        f"{every.count(HOLDS)} hold, {every.count(IN_PART)} hold in part and "
        f"{every.count(FAILS)} do not.",
    )


def how(quick: bool) -> tuple[str, ...]:
    return (
        "RMSE and MAE are over all test ratings, predictions cut to the scale. The split is in "
        "each table; the paper does not state its own.",
        "Settings of the factors and of linear masks were tuned on a tenth of the training "
        "ratings, with the test part left unread, and are the same for FedMF and FedMMF. Those of "
        "the federated models of attributes and of training in one place are first guesses: "
        "these rows are weaker baselines than they could be.",
        *(QUICKLY if quick else SAMPLED),
        "The global mean, and in every round the number of raters of each item, are released to "
        "the server; both are taken through the secure sum where there is one.",
        "Local models are the masks without a federation. They know the global mean.",
        "MovieLens 10M is not at hand: our 1M stands beside it, and is other data. The paper bins "
        "the plays of Last.fm in a way that it does not state; ours are quintiles of all plays.",
        "All secrets of these runs are derived from a fixed text, so that figures are "
        "reproducible. Accuracy is valid; there is no privacy in them.",
    )


def split(cells: Sequence[Cell]) -> str:
    """How the set was split, and how its models were trained: the notes of two rows."""
    notes = {cell.row: cell.note.split("; ") for cell in cells if cell.column == "RMSE"}
    first = next(iter(notes.values()))
    return "; ".join([*first[1:], *notes.get("FedMF", [])[:1]]) + "."


def over_penalty(title: str, cells: Sequence[Cell]) -> Iterator[Chart]:
    """What a mask leaves of the ratings, and the error, by the penalty that its fit has."""
    for name, columns in (
        ("privacy indicator J", {J_SHARED: "ratings shared", J_HELD_BACK: "held back"}),
        ("RMSE", {"RMSE": "FedMMF", MASKS_ALONE: "masks alone"}),
    ):
        curves = {
            label: [
                (float(cell.row), cell.ours)
                for cell in cells
                if cell.column == column and cell.ours is not None and float(cell.row) >= 1.0
            ]
            for column, label in columns.items()
        }
        yield Chart(
            title=f"{name} over the mask's penalty",
            x_label="penalty",
            y_label=name,
            curves=curves,
            caption=f"{name[:1].upper()}{name[1:]} over the penalty of everybody's mask.",
        )


def whole(value: float) -> str:
    return f"{value:.0f}"


LAYOUT: Final = Layout(
    styles=(
        Style(of="Table 4, ", lines=False, about=split, section=ERRORS),
        Style(of="Table 4, gains", lines=False, noted=True, text=gain, section=ERRORS),
        Style(
            of=GIVEN_AWAY,
            text=score,
            section=ATTACKS,
            below="A masked rating is the rating less the client's own prediction of it: what a "
            "client with an unmasked update shares, once the server has solved the update for "
            "ratings. A correlation of 1 means that the mask hides nothing.",
        ),
        *(
            Style(
                of=table,
                lines=False,
                text=whole,
                section=ATTACKS,
                about=f"Per cent of clients by {rate}.",
            )
            for table, rate in (("Table 2", "recovery rate"), ("Table 3", "hit ratio"))
        ),
        Style(
            of="Figure 4",
            charts=over_penalty,
            section="Indicator and error over the penalty (Figure 4)",
            below="J is the mean squared difference of rating and mask on a scale from 0 to 1 "
            "(Definition 3.1), so a small J means a mask that predicts well, and says nothing "
            "more: the order of a client's ratings survives it. The paper reads its own J off "
            "the ratings that are shared, where it can only rise with the penalty.",
        ),
        Style(of="Paths: clients", text=whole, about="Per cent of clients.", section=PATHS),
        Style(of="Paths: ", section=PATHS),
    ),
    page=Page(
        title="FedMMF: ratings under private masks",
        paper="Yang et al. 2021, Practical and Secure Federated Recommendation with Personalized "
        "Masks",
        lede=lede,
        quick="One seed, fewer rounds than the settings were tuned for, fewer models on the larger "
        "sets, and in the runs of Table 4 and Figure 4 nothing is masked. Errors are above those "
        "of a full run, and verdicts on them are of these runs only.",
        how=how,
    ),
    claims=claims,
    judged="The sentences follow from the cells below by fixed rules: differences in RMSE up to "
    "0.001 count as none, and less than half of a printed gain counts as “holds in part”.",
)
