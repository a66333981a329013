"""A plan reads back as it was written, and whatever cannot work is refused by file and field."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ConfigError
from tessera.learning.averaging import ServerStep
from tessera.learning.training.settings import LocalTraining
from tessera.plan import (
    CohortsPlan,
    GroupsPlan,
    ModelPlan,
    Plan,
    Precision,
    PrivacyPlan,
    Scheme,
    SecurityPlan,
    TablePlan,
    TaskPlan,
    UnionPlan,
    UpdatePlan,
)
from tessera.protocols.secagg.params import GraphKind, Threat
from tessera.protocols.union.choice import EncodingChoice

BASE = """\
scheme = "secure-submodel"
cohort = 20
[[table]]
name = "goods"
rows = 500
width = 4
"""


def refused(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Plan.parse(text, source="my.toml")
    return caught.value


def with_section(name: str, *lines: str) -> str:
    return "\n".join([BASE, f"[{name}]", *lines, ""])


# --- round trips ----------------------------------------------------------------------------------


def cohorts_sections(scheme: Scheme, privacy: PrivacyPlan) -> st.SearchStrategy[CohortsPlan]:
    by_seed = st.builds(CohortsPlan, rounds_per_client=st.integers(0, 9))
    scheduled = st.builds(
        CohortsPlan,
        drawn=st.just("schedule"),
        rounds_per_client=st.integers(0, 3),
        separation=st.integers(0, 4),
    )
    return by_seed | scheduled


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    scheme = draw(st.sampled_from(Scheme))
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3, unique=True))
    tables = tuple(
        TablePlan(
            name=name,
            rows=draw(st.integers(1, 5000)),
            width=draw(st.integers(1, 9)),
            derived_from=names[0] if i and draw(st.booleans()) else "",
        )
        for i, name in enumerate(names)
    )
    share = st.floats(0.01, 0.99)
    levels = st.sampled_from(["cpp1", "cpp2", "cpp3", "cpp4", "cpp5"])
    privacy = draw(
        st.one_of(
            st.builds(PrivacyPlan, level=levels, decoys=st.floats(0, 1), keep=share, add=share),
            st.builds(
                PrivacyPlan,
                p1=share,
                p2=share,
                p3=share,
                p4=share,
                level=st.just(""),
            ),
        )
    )
    return Plan(
        scheme=scheme,
        cohort=draw(st.integers(5, 40)),
        federation=draw(st.text(max_size=12)),
        seed=draw(st.integers(0, 2**63)),
        tables=tables,
        model=ModelPlan(dense=draw(st.integers(0, 99)), precision=draw(st.sampled_from(Precision))),
        privacy=privacy,
        cohorts=draw(cohorts_sections(scheme, privacy)),
        security=SecurityPlan(dropout=draw(st.floats(0.0, 0.3))),
        union=UnionPlan(
            encoding=draw(st.sampled_from(EncodingChoice)), max_rows=draw(st.integers(1, 200))
        ),
        update=UpdatePlan(levels=draw(st.integers(3, 2**16)), clip=draw(st.floats(1e-3, 1e3))),
    )


@given(plans())
def test_a_plan_written_down_reads_back_as_itself(plan: Plan) -> None:
    again = Plan.parse(plan.to_toml())
    assert again == plan
    assert again.digest == plan.digest


def test_a_plan_read_from_a_file_has_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        BASE.replace('"secure-submodel"', '"secure-fedavg"')
        + '[model]\ndense = 7\nprecision = "float16"\n'
        + '[security]\nthreat = "active"\ndropout = 0\n'
    )
    plan = Plan.read(path)
    assert (plan.scheme, plan.cohort, plan.seed) == (Scheme.SECURE_FEDAVG, 20, 0)
    assert plan.tables == (TablePlan(name="goods", rows=500, width=4),)
    assert plan.model == ModelPlan(dense=7, precision=Precision.FLOAT16)
    assert plan.security == SecurityPlan(threat=Threat.ACTIVE, dropout=0.0)
    assert plan.security.graph is GraphKind.COMPLETE
    assert plan.full_length == 7 + 500 * 4


def test_two_plans_that_differ_anywhere_have_different_digests() -> None:
    texts = [
        BASE,
        BASE.replace("20", "30"),
        BASE.replace("width = 4", "width = 5"),
        with_section("privacy", "decoys = 0.2"),
        with_section("update", "clip = 2.0"),
        f"seed = 3\n{BASE}",
    ]
    assert len({Plan.parse(text).digest for text in texts}) == len(texts)


# --- keys that were renamed -----------------------------------------------------------------------

TRAINED = """\
scheme = "secure-submodel"
cohort = 20
seed = 7
[task]
name = "taobao-like"
users = 300
items = 900
history = 20
[model]
dense = 11
[training]
batch = 4
clip = 0.5
[server]
optimizer = "adaptive"
beta2 = 0.95
shrinkage = 0.5
[privacy]
level = "cpp2"
[security]
corrupt = 1
[[table]]
name = "items"
rows = 900
width = 4
"""


@pytest.mark.parametrize(("old", "new"), [("memory", "beta2"), ("pull", "shrinkage")])
def test_a_former_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    error = refused(TRAINED.replace(new, old))
    assert str(error) == f"my.toml: unknown key [server] {old}"
    assert error.hint == f"it is called {new} now"


@pytest.mark.parametrize("key", ["group", "fixed_groups"])
def test_the_size_of_a_group_has_moved_to_a_section_of_its_own(key: str) -> None:
    error = refused(with_section("privacy", f"{key} = 5"))
    assert (str(error), error.hint) == (
        f"my.toml: unknown key [privacy] {key}",
        "it is [groups] size now",
    )


# --- fixed groups ---------------------------------------------------------------------------------


def test_groups_are_of_ten_with_rows_and_only_by_request_with_whole_models() -> None:
    plan = Plan.parse(BASE)
    assert plan.grouped and plan.group_size == plan.promise.group == plan.group_plan.cohort == 10
    assert plan.least_survivors == 10
    whole = BASE.replace("secure-submodel", "secure-fedavg")
    assert not Plan.parse(whole).grouped and Plan.parse(whole).promise.bound() == 1.0
    five = Plan.parse(whole + "[groups]\nsize = 5\n")
    assert five.grouped and five.group_plan.cohort == 5 and five.promise.bound() == 0.2


def test_a_cohort_need_not_be_a_number_of_groups() -> None:
    """It is how many are invited, of any groups; sums are of whole groups."""
    plan = Plan.parse(BASE.replace("cohort = 20", "cohort = 17"))
    assert plan.group_plan.cohort == 10


def test_every_key_of_groups_is_agreed_on() -> None:
    keys = ("size = 9", "age_weight = 1.0", "period = 5", "retire_after = 4", "longest_wait = 9")
    keys += ("delay = 2.5", "small = true", "deadline = 60.0")
    digests = {Plan.parse(with_section("groups", key)).digest for key in keys}
    assert len(digests | {Plan.parse(BASE).digest}) == len(keys) + 1
    assert Plan.parse(with_section("groups", "size = 0")).digest == Plan.parse(BASE).digest


def test_an_old_sum_counts_less() -> None:
    half = GroupsPlan(age_weight=0.5)
    assert [half.weight(age) for age in (0, 3)] == [1.0, 0.5]
    assert GroupsPlan().weight(99) == 1.0, "in full, if nothing is said"


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field", "hint"),
    [
        (BASE.replace("cohort", "cohrt"), "cohrt", "did you mean cohort?"),
        (with_section("privacy", "decoy = 0.1"), "[privacy] decoy", "did you mean decoys?"),
        (with_section("privcy", "decoys = 0.1"), "privcy", "did you mean privacy?"),
        (BASE + "size = 3\n", "[[table]] size", "known here: name, rows, width, derived_from"),
        (f"zzz = 1\n{BASE}", "zzz", "known here: federation, scheme"),
    ],
)
def test_an_unknown_key_is_refused_with_file_field_and_the_nearest_known(
    text: str, field: str, hint: str
) -> None:
    error = refused(text)
    assert str(error) == f"my.toml: unknown key {field}"
    assert error.hint is not None and error.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE.replace("20", '"20"'), "cohort = '20'"),
        (BASE.replace("20", "true"), "cohort = True"),
        (BASE.replace("20", "20.5"), "cohort = 20.5"),
        (BASE.replace("500", "[1]"), "[[table]] rows = [1]"),
        (with_section("privacy", 'decoys = "many"'), "[privacy] decoys = 'many'"),
        (with_section("privacy", "strict_quorum = 1"), "[privacy] strict_quorum = 1"),
        (f"federation = 3\n{BASE}", "federation = 3"),
        (f"privacy = 3\n{BASE}", "[privacy] = 3"),
        ('scheme = "fedavg"\ncohort = 3\ntable = 3\n', "table = 3"),
        ('scheme = "fedavg"\ncohort = 3\ntable = [3]\n', "[[table]] = 3"),
        (BASE.replace("secure-submodel", "secure"), "scheme = 'secure'"),
        (with_section("model", 'precision = "float8"'), "[model] precision = 'float8'"),
        (with_section("union", 'encoding = "gzip"'), "[union] encoding = 'gzip'"),
        (with_section("security", 'threat = "evil"'), "[security] threat = 'evil'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_field_and_value(
    text: str, expected: str
) -> None:
    error = refused(text)
    assert str(error).startswith(f"my.toml: {expected}")
    assert error.hint


@pytest.mark.parametrize("name", ["p1", "p2", "p3", "p4", "keep", "add"])
@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan", "inf", "1e-12"])
def test_what_is_not_a_probability_is_refused(name: str, value: str) -> None:
    error = refused(with_section("privacy", f"{name} = {value}"))
    assert str(error).startswith("my.toml: [privacy] ")
    assert f"{name} = {float(value)}" in str(error)
    assert error.hint


def test_probabilities_that_leave_the_level_undefined_are_refused() -> None:
    error = refused(with_section("privacy", "p1 = 0.0", "p3 = 0.5", "p4 = 0.0"))
    assert "[privacy]" in str(error) and "p5 = 0" in str(error)
    assert error.hint


def test_a_level_and_probabilities_exclude_each_other() -> None:
    error = refused(with_section("privacy", 'level = "cpp2"', "p1 = 0.5"))
    assert error.hint == "give one or the other"
    assert refused(with_section("privacy", 'level = "cpp9"')).hint == (
        "levels: groups, cpp1, cpp2, cpp3, cpp4, cpp5"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASE.replace("20", "1"), ("cohort = 1",)),
        (BASE.replace("20", "-3"), ("cohort = -3",)),
        (f"seed = -1\n{BASE}", ("seed = -1",)),
        (with_section("security", "threshold = 30"), ("cohort = 20", "threshold = 30")),
        (with_section("security", "threshold = 3"), ("threshold 3 of 20",)),
        (with_section("security", "corrupt = -1"), ("[security] corrupt = -1",)),
        (with_section("security", "corrupt = 25"), ("25 corrupt", "20")),
        (with_section("security", "dropout = 1.5"), ("[security] dropout = 1.5",)),
        (with_section("security", "dropout = nan"), ("[security] dropout = nan",)),
        (with_section("privacy", "decoys = -1"), ("[privacy] decoys = -1.0",)),
        (with_section("privacy", "period_rounds = 0"), ("[privacy] period_rounds = 0",)),
        (with_section("groups", "size = 1"), ("[groups] size = 1",)),
        (with_section("groups", "period = -1"), ("[groups] period = -1",)),
        (with_section("groups", "retire_after = 0"), ("[groups] retire_after = 0",)),
        (with_section("groups", "longest_wait = 0"), ("[groups] longest_wait = 0",)),
        (with_section("groups", "age_weight = nan"), ("[groups] age_weight = nan",)),
        (with_section("groups", "delay = 9.0\ndeadline = 8.0"), ("[groups] deadline = 8.0",)),
        (with_section("simulation", "cutoff = 0.0"), ("[simulation] cutoff = 0.0",)),
        (with_section("groups", "delay = -1"), ("[groups] delay = -1.0",)),
        (
            with_section("groups", "size = 5") + '[privacy]\nlevel = "cpp2"\n',
            ("[groups] size = 5", "cpp2"),
        ),
        (
            with_section("groups", "size = 5") + '[security]\nsharing = "plain"\n',
            ("fixed groups", "sharing = 'plain'"),
        ),
        (
            with_section("groups", "size = 5").replace("secure-submodel", "secure-fedavg")
            + '[dp]\nunit = "user"\ntrust = "shares"\nnoise = 1.0\nclip = 1.0\n',
            ("[groups] size = 5", "[dp]"),
        ),
        (with_section("privacy", "min_group = 1"), ("min_group 1",)),
        (with_section("privacy", "min_group = 50"), ("50 members", "20")),
        (with_section("union", "max_rows = 0"), ("[union] max_rows = 0",)),
        (with_section("union", "expected = -1"), ("[union] expected = -1",)),
        (with_section("update", "levels = 1"), ("levels = 1",)),
        (with_section("update", "clip = -1"), ("clip = -1.0",)),
        (with_section("update", "max_count = 0"), ("max_count = 0",)),
        (with_section("model", "dense = -5"), ("[model] dense = -5",)),
        (BASE.replace("500", "0"), ("table 'goods'", "0 rows")),
        (BASE.replace("500", str(2**41)), ("table 'goods'", str(2**41))),
        (BASE.replace("width = 4", "width = 0"), ("table 'goods'", "0 columns")),
        (BASE.replace('"goods"', '""'), ("table ''",)),
        (BASE + BASE.partition("20\n")[2], ("two tables have one name",)),
        (BASE.replace("width = 4\n", ""), ("[[table]] width is missing",)),
        (BASE.replace("cohort = 20\n", ""), ("cohort is missing",)),
        ('scheme = "fedavg"\ncohort = 5\n', ("neither tables nor a dense part",)),
        ('scheme = "secure-submodel"\ncohort = 5\n[model]\ndense = 3\n', ("without a table",)),
        (
            with_section("privacy", "strict_quorum = true").replace("secure-submodel", "submodel"),
            ("strict_quorum", "submodel"),
        ),
        (
            with_section("security", 'threat = "active"', 'graph = "sparse"'),
            ("active", "complete graph"),
        ),
        (
            with_section("security", 'threat = "active"') + '[privacy]\nlevel = "cpp3"\n',
            ('"cpp3"', '"active"', "dense part"),
        ),
        ("a = = 3", ("not TOML",)),
    ],
)
def test_what_cannot_work_is_refused_with_its_value_and_a_way_out(
    text: str, expected: tuple[str, ...]
) -> None:
    error = refused(text)
    assert str(error).startswith("my.toml: ")
    for part in expected:
        assert part in str(error)
    assert error.hint


@pytest.mark.parametrize("scheme", [s for s in Scheme if not s.secure])
def test_a_plain_scheme_checks_what_it_does_not_use_too(scheme: Scheme) -> None:
    plain = with_section("security", "dropout = 1.5").replace("secure-submodel", scheme.value)
    assert "dropout = 1.5" in str(refused(plain))
    plain = with_section("privacy", "p1 = 1.5").replace("secure-submodel", scheme.value)
    assert "p1 = 1.5" in str(refused(plain))


@pytest.mark.parametrize("parent", ["god", "goods", "kinds"])
def test_a_derived_table_needs_a_parent_with_rows_of_its_own(parent: str) -> None:
    kinds = '[[table]]\nname = "kinds"\nrows = 5\nwidth = 1\nderived_from = "goods"\n'
    text = BASE + (f'derived_from = "{parent}"\n' if parent != "kinds" else "")
    text += kinds if parent != "kinds" else kinds.replace('from = "goods"', 'from = "kinds"')
    error = refused(text)
    assert f"is derived from {parent!r}" in str(error)
    assert error.hint == "the tables are goods, kinds"


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        Plan.read(tmp_path / "none.toml")
    assert caught.value.hint == "`tessera plan --example` prints a plan"
    (tmp_path / "noise.toml").write_bytes(bytes(range(128, 256)))
    with pytest.raises(ConfigError, match=r"noise\.toml: not text"):
        Plan.read(tmp_path / "noise.toml")


# --- two servers ----------------------------------------------------------------------------------

TWO_SERVER = """
scheme = "two-server"
cohort = 10
[[table]]
name = "goods"
rows = 5000
width = 4
"""


def test_two_servers_narrow_what_is_too_large_and_open_no_sum_of_one():
    whole = Plan.parse(TWO_SERVER)
    assert not whole.narrows and not whole.has_union and whole.least_survivors == 8
    assert Plan.parse(whole.to_toml()) == whole
    narrow = Plan.parse(TWO_SERVER + "[two_server]\nrow_limit = 4999\nmin_cohort = 3\n")
    assert narrow.narrows and narrow.has_union and narrow.least_survivors == 3
    assert Plan.parse(TWO_SERVER + '[two_server]\ndomain = "union"\n').narrows
    assert not Plan.parse(TWO_SERVER.replace("two-server", "submodel")).narrows
    assert whole.digest != Plan.parse(TWO_SERVER + '[two_server]\nwrite = "dense"\n').digest
    assert Plan.parse(TWO_SERVER + "[update]\nlevels = 4\nmax_count = 3\n").ring.bits >= 17


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TWO_SERVER + "[two_server]\nmin_cohort = 1\n", "a sum over one client"),
        (TWO_SERVER + "[two_server]\nmin_cohort = 11\n", "min_cohort = 11 of a cohort of 10"),
        (TWO_SERVER + '[two_server]\nwrite = "keys"\n', "'keys'"),
        (TWO_SERVER + "[two_server]\nrow_limt = 5\n", "row_limt"),
        (TWO_SERVER + "[two_server]\nrow_limit = 0\n", "row_limit = 0"),
        (TWO_SERVER + "[two_server]\nkey_rounds = 0\n", "key_rounds = 0"),
        (
            TWO_SERVER + '[two_server]\nkey_rounds = 2\ndomain = "union"\n',
            "keys cannot last where the tables are narrowed",
        ),
        (
            TWO_SERVER + "[two_server]\nkey_rounds = 2\nrow_limit = 10\n",
            "keys cannot last where the tables are narrowed",
        ),
        (
            TWO_SERVER + '[two_server]\nrow_limit = 10\ndomain = "whole"\n',
            "both servers would process",
        ),
        (TWO_SERVER.split("[[table]]")[0] + "[model]\ndense = 5\n", "without a table"),
    ],
)
def test_what_two_servers_cannot_do_is_refused_with_a_hint(text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        Plan.parse(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cohort = " + "9" * 5000, "number is too long"),
        ("cohort = " + "9" * 30, "bits"),
        ('scheme = "fedavg"\ncohort = 2\n[task]\nname = "x"\nusers = ' + "9" * 40, "bits"),
        ("x = " + "[" * 100_000, "nested too deeply"),
    ],
)
def test_numbers_and_nesting_without_end_are_refused(text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        Plan.parse(text)
    assert caught.value.hint


def test_a_file_that_is_too_long_for_a_plan_is_not_read(tmp_path):
    path = tmp_path / "plan.toml"
    with path.open("wb") as out:
        out.truncate(1 << 40)  # sparse: reading it would take a terabyte
    with pytest.raises(ConfigError, match="too many for a plan"):
        Plan.read(path)


# --- the largest changes only ---------------------------------------------------------------------

DENSE = """\
scheme = "{scheme}"
cohort = 20
[model]
dense = 4000
{model}
[update]
{update}
"""


@pytest.mark.parametrize(
    ("scheme", "model", "update", "reason"),
    [
        ("fedavg", "", "top = 0", "top = 0.0 is not a share"),
        ("fedavg", "", "top = 1.5", "top = 1.5 is not a share"),
        ("fedavg", "", "top = nan", "top = nan is not a share"),
        ("fedavg", "", "error_feedback = true", "error_feedback without top"),
        ("secure-fedavg", "", "top = 0.1", "masked sums"),
        ("fedavg", "", 'top = 0.1\ntop_by = "row"', "no tensor of the dense part has 1,000 rows"),
        ("fedavg", 'shapes = "1000x3"', 'top = 0.1\ntop_by = "row"', "other than 4000 elements"),
        ("fedavg", 'shapes = "many"', "top = 0.1", "shapes = 'many'"),
        ("fedavg", "", 'top = 0.1\n[dp]\nunit = "user"\nnoise = 1.0', "top beside"),
        ("central", "", "top = 0.1", "no clients that select"),
    ],
)
def test_a_selection_that_cannot_be_made_or_hidden_is_refused(
    scheme: str, model: str, update: str, reason: str
) -> None:
    error = refused(DENSE.format(scheme=scheme, model=model, update=update))
    assert reason in str(error) and error.hint


def test_a_model_without_a_dense_part_has_nothing_to_select_from() -> None:
    error = refused(BASE.replace("secure-submodel", "submodel") + "[update]\ntop = 0.1\n")
    assert "no dense parameters" in str(error) and error.hint
    error = refused(BASE + "[model]\ndense = 5\n[update]\ntop = 0.1\n")
    assert "masked sums" in str(error)


def test_rows_of_large_tensors_are_cut_where_a_plan_says_so() -> None:
    rows = DENSE.format(
        scheme="fedavg", model='shapes = "1000x3 1000"', update='top = 0.01\ntop_by = "row"'
    )
    (cut,) = Plan.parse(rows, source="my.toml").cuts
    assert (cut.rows, cut.width, cut.most, cut.stop) == (1000, 3, 10, 3000)
    whole = DENSE.format(scheme="fedavg", model="", update="top = 1.0")
    assert not Plan.parse(whole, source="my.toml").selects


# --- dictionaries ---------------------------------------------------------------------------------


def test_a_dictionary_is_the_section_that_a_file_has():
    records = Plan(
        scheme="submodel",
        cohort=5,
        training=LocalTraining(rate=0.1, batch=4),
        server=ServerStep(rate=0.5),
        privacy=PrivacyPlan(level="cpp4"),
        tables=(TablePlan(name="items", rows=10, width=2),),
        task=TaskPlan(name="retail", options={"users": 5}),
    )
    sections = {
        "training": {"learning_rate": 0.1, "batch": 4},
        "server": {"learning_rate": 0.5},
        "privacy": {"level": "cpp4"},
        "tables": [{"name": "items", "rows": 10, "width": 2}],
        "task": {"name": "retail", "users": 5},
    }
    assert Plan(scheme="submodel", cohort=5, **sections) == records
    text = """
scheme = "submodel"
cohort = 5
task = { name = "retail", users = 5 }
training = { learning_rate = 0.1, batch = 4 }
server = { learning_rate = 0.5 }
privacy = { level = "cpp4" }
table = [{ name = "items", rows = 10, width = 2 }]
"""
    assert Plan.parse(text) == records


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"training": {"learnin_rate": 0.1}}, "unknown key"),
        ({"training": {"learning_rate": 0.1, "rate": 0.2}}, "rate twice"),
        ({"training": {"rate": "fast"}}, "not of type float"),
        ({"simulation": {"patience": -1}}, "patience"),
        ({"task": {"users": 5}}, "no name"),
    ],
)
def test_a_dictionary_is_refused_as_a_file_is(section, message):
    with pytest.raises(ConfigError, match=message):
        Plan(scheme="submodel", cohort=5, **section)
