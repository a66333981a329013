"""The section [dp] of a plan: read, refused, accounted for."""

from dataclasses import replace

import pytest

from tessera.errors import ConfigError
from tessera.ids import RoundId
from tessera.learning.training.settings import LocalTraining
from tessera.plan import DPPlan, Plan
from tessera.plan.dp import listed_rows, row_list_of, trained_with
from tessera.privacy.dp.accounting import check_people, delta_flaw
from tessera.privacy.dp.guarantee import Observer, Trust, Unit
from tessera.privacy.dp.ledger import BudgetExceeded, Ledger
from tessera.privacy.dp.noise_setting import Coins, Drawn, Sampling
from tessera.rounds.noise import noise_of

HEAD = """
scheme = "{scheme}"
cohort = 10
[model]
dense = 5
[[table]]
name = "items"
rows = 100
width = 4
"""

SHARES = {"unit": "user", "trust": "shares"}
EACH = {"unit": "user", "trust": "each"}
LISTED = SHARES | {"rows": "list"}
INDEX = {"unit": "index", "rows": "all", "per_row": 4, "example_clip": 0.1}
INDEX_TEXT = 'unit = "index"\nnoise = 1\nper_row = 4\nexample_clip = 0.1\nrows = "all"\n'


def plan(text: str, scheme: str = "fedavg") -> Plan:
    return Plan.parse(HEAD.format(scheme=scheme) + text)


def section(**values: object) -> DPPlan:
    return DPPlan(**({"unit": "item", "noise": 1.0} | values))  # type: ignore[arg-type]


def test_a_plan_with_noise_reads_back_and_binds_it() -> None:
    found = plan('[dp]\nunit = "subject"\nepsilon = 3\nclip = 0.5\nclients_per_subject = 3\n')
    assert found.dp == DPPlan(unit="subject", epsilon=3.0, clip=0.5, clients_per_subject=3)
    assert Plan.parse(found.to_toml()) == found
    assert found.digest != plan("").digest != replace(found, dp=section()).digest


def test_a_plan_without_noise_says_nothing_of_it() -> None:
    assert "[dp]" not in plan("").to_toml()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("noise = 1", "unit is missing"),
        ('unit = "row"\nnoise = 1', "unit = 'row'"),
        ('unit = "index"\nnoise = 1\nrows = "all"', "without per_row and example_clip"),
        ('unit = "index"\nnoise = 1\nper_row = 2\nexample_clip = 1', "shows the row itself"),
        (INDEX_TEXT + "sampling = 0.5", "no account of either"),
        (INDEX_TEXT + 'counts = 0.1\ntrust = "shares"', "no account of either"),
        (INDEX_TEXT + 'steps = 2\ntrust = "server"', "sum of local steps"),
        (INDEX_TEXT + 'steps = 2\ntrust = "each"', "local steps"),
        (INDEX_TEXT + "cap = 2", "cap = 2 with unit = 'index'"),
        ('unit = "user"\nnoise = 1\nper_row = 2', "per_row = 2 with unit = 'user'"),
        ('unit = "item"\nnoise = 1\nexample_clip = 2', "example_clip = 2 with unit = 'item'"),
        ('unit = "index"\nnoise = 1\nper_row = -1', "per_row = -1"),
        ('unit = "item"', "neither epsilon nor noise"),
        ('unit = "item"\nnoise = -1', "noise"),
        ('unit = "item"\nepsilon = -3', "epsilon = -3"),
        ('unit = "item"\nnoise = 1\ndelta = 0.0', "delta"),
        ('unit = "item"\nnoise = 1\nclip = 0.0', "clip = 0"),
        ('unit = "item"\nnoise = 1\nsampling = 0.0', "0"),
        ('unit = "item"\nnoise = 1\nsteps = 0', "steps = 0"),
        ('unit = "item"\nnoise = 1\ntrust = "server"', "protects none of their examples"),
        ('unit = "item"\nnoise = 1\ntrust = "nobody"', "trust = 'nobody'"),
        ('unit = "user"\nnoise = 1\nsampling = 0.1', "one update a round"),
        ('unit = "user"\nnoise = 1\nsteps = 2', "one update a round"),
        ('unit = "item"\nnoise = 1\ncap = 2', "cap = 2 with unit = 'item'"),
        ('unit = "user"\nnoise = 1\nclients_per_subject = 2', "clients_per_subject = 2"),
        ('unit = "subject"\nnoise = 1\ndrawn = "records"', "without a bound"),
        ('unit = "item"\nnoise = 1\nrate = 0.1', "unknown key"),
        ('unit = "item"\nnoise = 1\ntrust = "shares"', "protects none of their examples"),
        ('unit = "item"\nnoise = 1\ntrust = "each"', "protects none of their examples"),
        ('unit = "user"\nnoise = 1\ncorrupt = 1', "corrupt = 1 with trust = 'local'"),
        ('unit = "user"\nnoise = 1\ntrust = "shares"\ncorrupt = -1', "corrupt = -1"),
        ('unit = "user"\nnoise = 1\ncounts = 0.1', "counts = 0.1 with trust"),
        ('unit = "subject"\nnoise = 1\ntrust = "shares"\nsteps = 2', "clipped as a whole"),
        ('unit = "user"\nnoise = 1\nrows = "some"', "rows = 'some'"),
        ('unit = "item"\nnoise = 1\nrows = "selected"', "bounds nobody else"),
        ('unit = "user"\nnoise = 1\nrows = "list"', "without a row_list"),
        ('unit = "user"\nnoise = 1\nrow_list = "items 1"', "row_list with rows = 'own'"),
        ('unit = "user"\nnoise = 1\nrows = "list"\nrow_list = "items 9-3"', "range of rows"),
        ('unit = "user"\nnoise = 1\nrows = "list"\nrow_list = "items x"', "table with rows"),
        ('unit = "user"\nnoise = 1\nrows = "list"\nrow_list = "items 1, 0-3"', "twice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(f"[dp]\n{text}\n")


@pytest.mark.parametrize(
    ("scheme", "values", "text", "says"),
    [
        ("fedavg", {}, "[training]\nclip = 1.0\n", r"\[training\] clip = 1 beside"),
        ("fedavg", {}, "[training]\nweight_decay = 0.1\n", "would show which these are"),
        ("fedavg", {}, "[training]\nepochs = 2\n", "epochs = 2"),
        ("fedavg", {}, "[training]\nbatch = 0\n", "batch = 0"),
        ("fedavg", {}, "[training]\nexamples = 9\n", "drawn by .dp. alone"),
        ("fedavg", {}, "[update]\nclip = 0.5\n", r"\[update\] clip = 0.5 is below"),
        ("fedavg", {}, "[update]\ndense_clip = 0.5\n", "dense_clip = 0.5 is below"),
        ("central", {}, "", "central training"),
        ("two-server", {"unit": "user", "trust": "server"}, "", "both see the sum"),
        ("secure-fedavg", {"unit": "subject", "trust": "server"}, "", "which scheme"),
        ("fedavg", SHARES, "", "no secure sum"),
        ("two-server", SHARES, "", "no secure sum"),
        ("secure-submodel", SHARES, "", "no finite epsilon"),
        ("secure-fedavg", SHARES, '[security]\nsharing = "auto"\n', "a share of the noise only"),
        ("secure-fedavg", SHARES | {"corrupt": 1}, "[security]\ncorrupt = 2\n", "is below"),
        ("secure-fedavg", SHARES | {"corrupt": 9}, "", "nobody is left whose noise counts"),
        ("secure-fedavg", EACH, "", "which has one server"),
        ("two-server", EACH, '[two_server]\ndomain = "union"\n', "no finite epsilon"),
        ("two-server", EACH, "[two_server]\nkey_rounds = 2\n", "key_rounds = 2"),
        ("secure-submodel", LISTED | {"row_list": "items 0-100"}, "", "row 100 of table 'items'"),
        ("secure-submodel", LISTED | {"row_list": "goods 0-9"}, "", "table 'goods'"),
        ("secure-submodel", SHARES | {"rows": "all", "row_limit": 99}, "", "row_limit = 99"),
        ("submodel", {"unit": "user", "rows": "all"}, "", "with scheme = 'submodel'"),
        ("two-server", EACH | {"rows": "list", "row_list": "items 1"}, "", "rows = 'list'"),
        ("submodel", INDEX, "", "with scheme = 'submodel'"),
        ("two-server", INDEX | {"trust": "each"}, "[union]\nmax_rows = 50\n", "max_rows = 50"),
        ("fedavg", INDEX | {"trust": "server"}, '[security]\nsharing = "auto"\n', "auto"),
        ("fedavg", INDEX, "[training]\nweight_decay = 0.1\n", "weight_decay = 0.1"),
        ("fedavg", INDEX, "[training]\nepochs = 2\n", "not to follow from"),
        (
            "secure-fedavg",
            SHARES | {"counts": 0.1},
            '[update]\naverage = "examples"\n',
            "is longer than clip",
        ),
    ],
)
def test_what_does_not_go_with_noise_is_refused(
    scheme: str, values: dict[str, object], text: str, says: str
) -> None:
    fine = plan(text, scheme)
    with pytest.raises(ConfigError, match=says):
        replace(fine, dp=section(**values))


def test_a_users_own_training_stays_as_it_is() -> None:
    user = section(unit="user", trust="server")
    found = plan("[training]\nepochs = 2\nweight_decay = 0.1\nbatch = 0\n")
    assert replace(found, dp=user).dp is user
    assert trained_with(user, LocalTraining(clip=1.0, epochs=3)) == LocalTraining(epochs=3)


def test_a_recommended_training_loses_what_noise_forbids() -> None:
    good = LocalTraining(batch=0, clip=2.0, weight_decay=0.1, epochs=3, rate=0.7, examples=5)
    left = trained_with(section(), good)
    assert (left.clip, left.weight_decay, left.epochs, left.rate) == (0.0, 0.0, 1, 0.7)
    assert left.batch > 0
    assert trained_with(None, good) is good


def test_an_items_account_is_sampled_by_the_clients_own_coins() -> None:
    setting = noise_of(replace(plan(""), dp=section(sampling=0.1, steps=7))).setting
    assert (setting.unit, setting.trust, setting.coins) == (Unit.ITEM, Trust.LOCAL, Coins.CLIENT)
    assert (setting.sampling, setting.rate, setting.steps) == (Sampling.POISSON, 0.1, 7)


def test_a_users_account_gains_nothing_from_public_cohorts() -> None:
    setting = noise_of(replace(plan(""), dp=section(unit="user", trust=Trust.SERVER))).setting
    assert setting.coins is Coins.PUBLIC
    assert setting.protected() == (Observer.CLIENTS, Observer.READERS)


def test_rows_that_are_named_are_what_a_number_is_given() -> None:
    named = noise_of(replace(plan("", "submodel"), dp=section())).setting
    spent = named.ledger(3).guarantee(unit=Unit.ITEM, against=Observer.READERS, delta=1e-6)
    assert spent.condition == "given the rows of each client"
    whole = noise_of(replace(plan(""), dp=section())).setting
    spent = whole.ledger(3).guarantee(unit=Unit.ITEM, against=Observer.READERS, delta=1e-6)
    assert not spent.condition


def test_noise_for_a_budget_lasts_as_long_as_it_was_made_for() -> None:
    asked = replace(plan(""), dp=section(noise=0.0, epsilon=3.0, sampling=0.05))
    found = noise_of(asked.with_simulation(rounds=20)).calibrated()
    assert found.dp is not None and found.dp.noise > 0.0
    assert noise_of(found).calibrated() == found
    lasts = noise_of(found).lasts
    assert lasts is not None and 20 <= lasts <= 21
    ledger = Ledger(limits=noise_of(found).limits, bounds=noise_of(found).bounds)
    with pytest.raises(BudgetExceeded, match="budget of 3"):
        for at in range(lasts + 1):
            for event in noise_of(found).events(RoundId(at)):
                ledger.spend(event, reason=f"round {at}")
    assert len(ledger.entries) == lasts


def test_noise_that_is_spent_in_the_first_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="in the first round"):
        noise_of(replace(plan(""), dp=section(noise=0.3, epsilon=0.5))).calibrated()


def test_records_are_accounted_for_by_their_bounds() -> None:
    drawn = section(
        unit="subject", drawn="records", cap=2, records_per_subject=9, clients_per_subject=3
    )
    setting = noise_of(replace(plan(""), dp=drawn)).setting
    assert (setting.drawn, setting.cap, setting.records, setting.clients) == (
        Drawn.RECORDS,
        2,
        9,
        3,
    )


def test_a_delta_that_is_too_large_for_the_people_is_named() -> None:
    assert delta_flaw(1e-6, 1000) == ""
    assert "1,000 people" in delta_flaw(1e-3, 1000)
    with pytest.raises(ConfigError, match="1,000 people") as refused:
        check_people(1e-3, 1000)
    assert refused.value.hint
    check_people(1e-3, 0)  # not known


def test_a_list_of_rows_reads_back() -> None:
    text = "items 0-3, 7, 9-10; tags 5"
    rows = listed_rows(text)
    assert {name: ids.tolist() for name, ids in rows.items()} == {
        "items": [0, 1, 2, 3, 7, 9, 10],
        "tags": [5],
    }
    assert row_list_of(rows) == text
    found = replace(plan("", "secure-submodel"), dp=section(**LISTED, row_list="items 3, 8"))
    assert found.listed["items"].tolist() == [3, 8]
    assert Plan.parse(found.to_toml()) == found


def test_every_client_knows_its_own_share_of_the_noise() -> None:
    shares = replace(plan("", "secure-fedavg"), dp=section(**SHARES))
    assert shares.corrupt_shares == 1
    assert replace(shares, dp=section(**SHARES, corrupt=3)).corrupt_shares == 3


def test_a_rows_noise_is_for_its_examples_or_for_two_vectors_whichever_is_less() -> None:
    shares = section(**INDEX | {"trust": "shares", "noise": 2.0})
    few = replace(plan("", "secure-fedavg"), dp=shares)
    vector = few.noisy_vector
    assert vector is not None
    setting = noise_of(few).setting
    expected = (2 * 4 * 0.1 * vector.top + 2.0 * vector.words**0.5) / vector.bound
    assert setting.row_moves == pytest.approx(expected) and 0.8 < setting.row_moves < 0.85
    many = replace(few, dp=replace(shares, per_row=40))
    assert noise_of(many).setting.row_moves == 2.0
    # Every client for itself clips examples only: nothing bounds all of them together.
    local = replace(plan(""), dp=replace(shares, trust=Trust.LOCAL, per_row=40))
    assert noise_of(local).setting.row_moves == pytest.approx(8.0)
    assert not noise_of(local).setting.clipped


def test_noise_for_a_budget_per_index_is_least_and_keeps_it() -> None:
    found = plan("[simulation]\nrounds = 12\n", "secure-fedavg")
    for trust, scheme in (("shares", "secure-fedavg"), ("server", "fedavg"), ("local", "fedavg")):
        own = DPPlan(**INDEX | {"trust": trust, "epsilon": 3.0})  # type: ignore[arg-type]
        whole = noise_of(replace(found, scheme=scheme, dp=own)).calibrated()
        assert noise_of(whole).lasts == 12
        less = replace(whole, dp=replace(whole.dp, noise=0.98 * whole.dp.noise))  # type: ignore
        assert noise_of(less).lasts < 12  # type: ignore[operator]
