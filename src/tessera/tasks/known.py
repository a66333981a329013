"""Tasks by name: readers of data, the model over each, and settings that work."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from tessera.data import interactions
from tessera.data.alimama import alimama
from tessera.data.amazon import amazon, sequences_amazon
from tessera.data.examples import ClientData
from tessera.data.interactions import Interactions
from tessera.data.lastfm import RATINGS, sequences_lastfm
from tessera.data.mnist import mnist
from tessera.data.movielens import (
    movielens_1m,
    movielens_100k,
    sequences_1m,
    sequences_100k,
    shops_1m,
)
from tessera.data.published import VARIABLE
from tessera.data.row_names import OwnNames
from tessera.data.sequences import LENGTH, SequenceData
from tessera.data.speech import plays, speakers_like, spoken, words_of
from tessera.data.split import TEST
from tessera.data.taobao import taobao
from tessera.data.taobao_like import taobao_like
from tessera.data.trec import trec
from tessera.errors import ConfigError, closest
from tessera.learning.averaging import Average, ServerStep
from tessera.learning.bound_model import Table
from tessera.learning.softmax import Softmax
from tessera.learning.training.settings import LocalTraining
from tessera.tasks import kinds, sequences
from tessera.tasks.kinds import TaskKind
from tessera.tasks.sequences import NEXT, SEQUENCES, SETS
from tessera.tasks.task import CentralSettings, PrivateSettings, Recommended, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """How a task is made: a reader whose options are the task's, and the model over it.

    `fixed` are options of the model that are not for users.
    """

    read: Callable[..., ClientData]
    summary: str
    title: str
    recommended: Recommended
    kind: TaskKind = kinds.CLICKS
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """All options with their defaults: the data's, then the model's."""
        parameters = inspect.signature(self.read).parameters
        own = {name: p.default for name, p in parameters.items() if name != "folder"}
        return {**own, **self.kind.defaults}


def known(name: str) -> Known:
    """The task of this name, not loaded yet."""
    if name not in TASKS:
        raise ConfigError(f"task: nothing is called {name!r}", hint=closest(name, TASKS))
    return TASKS[name]


def model_of(name: str, options: Mapping[str, Any]) -> str:
    """The name of a task's model under these options; "" where there is none, or no task."""
    return str({**known(name).options, **options}.get("model", "")) if name else ""


MOST_NUMBER: Final = 2**40
"""Whole options of a task are below this."""

RENAMED: Final[Mapping[str, str]] = {"goods": "items"}
"""Options that once had another name, by that name."""


def load(name: str, *, data: Path | str | None = None, **options: Any) -> Task:
    """The task of this name. `data` is the folder of data sets (else TESSERA_DATA says)."""
    task = known(name)
    check_options(name, options)
    model = {key: options.pop(key) for key in task.kind.options if key in options}
    if "folder" in inspect.signature(task.read).parameters:
        options["folder"] = data
    found = task.read(**options)
    title = task.title.format(data=found)
    return task.kind.make(found, title=title, recommended=task.recommended, **task.fixed, **model)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """`ConfigError` for options that a task does not have, or of another type."""
    allowed = known(name).options
    for option, value in options.items():
        if option not in allowed:
            hint = closest(option, allowed)
            if RENAMED.get(option) in allowed:
                hint = f"it is called {RENAMED[option]} now"
            raise ConfigError(f"task {name!r} has no option {option!r}", hint=hint)
        _check_type(name, option, value, allowed[option])


def own_names(
    task: Task, name: str, *, data: Path | str | None, options: Mapping[str, Any], client: int
) -> OwnNames | None:
    """What this client's rows are called in its own data; None where the data is made up.

    Options of the model do not change that, and neither does another file with the same columns.
    All other options might, and so they are part of the naming.
    """
    made = known(name)
    reader = inspect.signature(made.read).parameters
    if "path" in reader:
        source = str(Path(options["path"]).resolve())
    elif "folder" in reader:
        source = str(Path(data or os.environ.get(VARIABLE, "")).resolve())
    else:
        return None
    said = {k: v for k, v in sorted(options.items()) if k not in made.kind.options and k != "path"}
    ids, of_tables = task.data.ids, kinds_of_ids(task)
    people = ids.get("client") or ids.get("user")
    return OwnNames(
        person=str(client) if people is None else people.name(client),
        source=source,
        naming=json.dumps([name, said]),
        kinds=of_tables,
        names={kind: ids[kind] for kind in of_tables.values() if kind in ids},
    )


def kinds_of_ids(task: Task) -> dict[str, str]:
    """Of each table that is fetched, the kind of ids that its rows are."""
    ids, found = task.data.ids, {}
    for parameter, table in task.tables.tables.items():
        if isinstance(table, Table):
            of = [*table.fields, *([task.loss.kind] if isinstance(task.loss, Softmax) else [])]
            kind = next((field for field in of if field in ids), table.fields[0])
            found[parameter.removesuffix(".weight")] = kind
    return found


def _check_type(name: str, option: str, value: Any, default: Any) -> None:
    if type(value) is int and not 0 <= value < MOST_NUMBER:
        raise ConfigError(
            f"task {name!r}: {option} = {value}", hint=f"{option} is 0 to {MOST_NUMBER - 1:,}"
        )
    types: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ConfigError(
            f"task {name!r}: {option} = {value!r} is not of type {type(default).__name__}",
            hint=f"such as {option} = {default!r}",
        )


# --- the tasks ------------------------------------------------------------------------------------

# Readers take None where these take 0 or "": a plan's options have one type each.


def _shop(
    users: int = 2_000,
    items: int = 20_000,
    categories: int = 0,
    examples: int = 100,
    history: int = 50,
    seed: int = 0,
) -> ClientData:
    return taobao_like(
        users, items, categories or None, examples=examples, history=history, seed=seed
    )


def _retail(
    users: int = 2_000,
    items: int = 2_000,
    categories: int = 0,
    examples: int = 100,
    history: int = 20,
    shops: int = 20,
    shops_each: int = 2,
    seed: int = 0,
) -> ClientData:
    if shops < 1:
        raise ConfigError(f"task 'retail': {shops} shops", hint="1 or more")
    return taobao_like(
        users,
        items,
        categories or None,
        examples=examples,
        history=history,
        shops=shops,
        shops_each=shops_each,
        seed=seed,
    )


def _taobao(
    folder: Path | str | None = None,
    label: str = "opened",
    negatives: int = 1,
    users: int = 0,
    history: int = 50,
) -> ClientData:
    return taobao(folder, label=label, negatives=negatives, users=users or None, history=history)


def _alimama(
    folder: Path | str | None = None, users: int = 0, history: int = 20, seed: int = 0
) -> ClientData:
    return alimama(folder, users=users or None, history=history, seed=seed)


def _own(
    path: str = "",
    user: str = "user",
    item: str = "item",
    client: str = "",
    subject: str = "",
    time: str = "",
    time_format: str = "",
    label: str = "",
    threshold: float = 0.0,
    category: str = "",
    ids: str = "dictionary",
    dictionary: str = "",
    unknown: str = "drop",
    buckets: int = 2**20,
    negatives: int = 1,
    history: int = 20,
    features: str = "",
    separator: str = "",
    encoding: str = "",
    on_bad: str = "stop",
) -> ClientData:
    how = how_of(locals())
    if not path:
        raise ConfigError("task 'interactions' has no path", hint='such as path = "clicks.csv"')
    return interactions.read(path, how)


def _own_sequences(
    path: str = "",
    user: str = "user",
    item: str = "item",
    time: str = "",
    time_format: str = "",
    label: str = "",
    threshold: float = 0.0,
    ids: str = "dictionary",
    dictionary: str = "",
    unknown: str = "drop",
    buckets: int = 2**20,
    history: int = LENGTH,
    separator: str = "",
    encoding: str = "",
    on_bad: str = "stop",
    item_features: str = "",
    title: str = "",
    attributes: str = "",
    part: str = TEST,
) -> SequenceData:
    how = how_of(locals())
    if not path:
        raise ConfigError("task 'sequences' has no path", hint='such as path = "purchases.csv"')
    return interactions.read_sequences(path, how, part=part)


_ALWAYS: Final = ("item", "user", "ids", "unknown", "buckets", "history", "negatives", "on_bad")
_LISTS: Final = ("features", "attributes")


def how_of(options: Mapping[str, Any]) -> Interactions:
    """Which columns are what, by the options of a task over one's own file.

    "" and 0 stand for what is not given, but for a few options that are always.
    """
    given: dict[str, Any] = {}
    for setting in fields(Interactions):
        value = options.get(setting.name)
        if setting.name in _LISTS:
            given[setting.name] = [
                name for one in (value or "").split(",") if (name := one.strip())
            ]
        elif value or (setting.name in _ALWAYS and value is not None):
            given[setting.name] = value
    return Interactions(**given)


def from_frame(
    frame: Any,
    *,
    user: str,
    item: str,
    name: str = "own",
    time: str | None = None,
    label: str | None = None,
    threshold: float | None = None,
    category: str | None = None,
    features: Sequence[str] = (),
    on_bad: str = "stop",
    width: int = 18,
    size: str = "small",
    model: str = "personal",
    **settings: Any,
) -> Task:
    """A task over a table of interactions; the first arguments name its columns.

    `frame` is a DataFrame of pandas or polars, an Arrow table, anything with `__arrow_c_stream__`,
    a Hugging Face `Dataset`, or the path of a CSV or Parquet file. `settings` are those of
    `tessera.data.interactions.Interactions`: dictionary, negatives, history, test_share and so on.
    With `model` "next" or "pairs" it is about which item comes next (`tasks/sequences.py`).
    """
    own: dict[str, Any] = {}
    if model in sequences.MODELS:
        own = {one: settings.pop(one) for one in SEQUENCES.options if one in settings}
        own |= {} if width == 18 else {"width": width}
        settings.setdefault("history", LENGTH)
    allowed = [one.name for one in fields(Interactions)]
    for setting in settings:
        if setting not in allowed:
            raise ConfigError(
                f"from_frame has no argument {setting!r}", hint=closest(setting, allowed)
            )
    how = Interactions(
        user=user,
        item=item,
        time=time,
        label=label,
        threshold=threshold,
        category=category,
        features=features,
        on_bad=on_bad,
        **settings,
    )
    following = model in sequences.MODELS
    data = interactions.read_sequences(frame, how) if following else interactions.read(frame, how)
    if not isinstance(frame, str | Path):
        data = replace(data, name=name)
    known = TASKS["sequences" if following else "interactions"]
    if following:
        return sequences.sequence_task(
            data,
            title=known.title.format(data=data),
            recommended=known.recommended,
            model=model,
            **own,
        )
    return kinds.click_task(
        data,
        title=known.title.format(data=data),
        recommended=known.recommended,
        width=width,
        size=size,
        model=model,
    )


# One bias per item, over masks that are fitted again at home: few words, so that little noise is
# spent on each. Every client's update is clipped, so that steps are by the root of its ratings.
_BIASES: Final = PrivateSettings(
    training=LocalTraining(batch=0, epochs=1, rate=1.0, decay=1.0),
    options={"factors": 0, "mask": "linear", "refit": True},
    threshold=-10.0,
)


def from_text(
    texts: Mapping[str, Sequence[str]],
    *,
    name: str = "text",
    length: int = 4,
    least: int = 1,
    part: str = TEST,
    **model: Any,
) -> Task:
    """The next word in texts by speaker, who are the clients; a text is a speech, a message.

    Words are in lower case, without punctuation. `least` is how often a word occurs to be in the
    dictionary; `model` are options of `word_task`: width, hidden, negatives, top.
    """
    for option in model:
        if option not in kinds.WORDS.options:
            raise ConfigError(
                f"from_text has no argument {option!r}", hint=closest(option, kinds.WORDS.options)
            )
    if not isinstance(texts, Mapping) or not all(
        isinstance(own, Sequence) and not isinstance(own, str) for own in texts.values()
    ):
        raise ConfigError(
            "from_text takes texts by speaker",
            hint='such as {"ann": ["good morning", "see you"], "ben": [...]}',
        )
    data = spoken(
        name,
        {speaker: [words_of(text) for text in own] for speaker, own in texts.items()},
        length=length,
        least=least,
        part=part,
        facts={"source": "own text", "speakers": f"{len(texts):,}"},
    )
    known = TASKS["speakers-like"]
    return kinds.word_task(
        data,
        title=f"next word, {name}",
        recommended=known.recommended,
        **known.fixed,
        **model,
    )


FACTORISED: Final = Recommended(
    training=LocalTraining(
        batch=0, epochs=3, rate=1.0, decay=1.0, weight_decay=0.1, table_rate=0.5
    ),
    server=ServerStep(optimizer="momentum", momentum=0.5, decay=0.98),
    shrinkage=1.0,
    central=CentralSettings(optimizer="adam", rate=0.003, batch=1024, weight_decay=2.5e-4),
    clip=2.5,
    max_rows=1_000,
    rounds=60,
    average=Average.ROWS,
    private=_BIASES,
)

_MANY: Final = replace(
    FACTORISED,
    training=LocalTraining(
        batch=0, epochs=5, rate=1.0, decay=1.0, weight_decay=0.07, table_rate=0.5
    ),
    server=ServerStep(optimizer="momentum", momentum=0.7, decay=0.98),
    max_rows=2_500,
    rounds=150,
)
# Noise per person at shops of 40,000 ratings: what a row's sum is divided by is the same for all.
_AT_SHOPS: Final = LocalTraining(batch=40_000, rate=1.0, decay=1.0, table_rate=2000.0)
# Most artists have few listeners: a stronger shrinkage, and smaller steps.
_LISTENED: Final = replace(
    FACTORISED,
    training=LocalTraining(
        batch=0, epochs=3, rate=0.5, decay=1.0, weight_decay=0.1, table_rate=0.2
    ),
    server=ServerStep(optimizer="momentum", momentum=0.8, decay=0.98),
    shrinkage=1.6,
    clip=0.5,
)

_SHOP: Final = Recommended(central=CentralSettings(rate=0.002))
_FILMS: Final = Recommended(
    training=LocalTraining(batch=8, rate=0.05, table_rate=8.0),
    server=ServerStep(optimizer="adaptive", rate=0.02, epsilon=1e-3),
    central=CentralSettings(rate=0.002),
    clip=4.0,
)

_QUESTIONS: Final = Recommended(
    training=LocalTraining(batch=64, epochs=2, rate=2.0, decay=0.99),
    dense_clip=512.0,
    cohort=4,
    rounds=40,
)
_DIGITS: Final = Recommended(
    training=LocalTraining(batch=20, examples=200, rate=0.15, decay=0.99),
    dense_clip=64.0,
    cohort=10,
    rounds=100,
)

_SPOKEN: Final = Recommended(
    training=LocalTraining(batch=8, examples=500, rate=0.3, decay=0.97, table_rate=6.0),
    central=CentralSettings(rate=0.002, batch=512, negatives=1_500),
    clip=512.0,
    dense_clip=512.0,
    max_rows=3_000,
    cohort=50,
    rounds=80,
)
# A lag model takes one step a round: more rounds, of fewer clients.
_LAGS: Final = replace(
    _SPOKEN,
    training=LocalTraining(batch=500, examples=500, rate=1.0, decay=1.0, weight_decay=3e-4),
    server=ServerStep(
        optimizer="adam", rate=0.015, dense_rate=0.004, epsilon=1e-6, schedule="linear"
    ),
    cohort=10,
    rounds=1_000,
)


def _penalised(weight_decay: float) -> Recommended:
    """What comes next, with another L2 than that of most sets (`tasks/sequences.py`)."""
    return replace(NEXT, training=replace(NEXT.training, weight_decay=weight_decay))


# The recommendations of Amazon, MovieLens 1M, TREC, MNIST, the plays and the synthetic shop were
# tuned (docs/results.md).
# The others are first guesses.
_RATED: Final = partial(Known, kind=kinds.RATINGS)

TASKS: Final[Mapping[str, Known]] = {
    "taobao-like": Known(
        read=_shop,
        summary="A synthetic shop like the papers': power-law items, interests, learnable clicks.",
        title="synthetic shop, {data.clients:,} users, {data.sizes[item]:,} items",
        recommended=_SHOP,
        fixed={"spread": 0.1},
    ),
    "retail": Known(
        read=_retail,
        summary="A synthetic retail: shops are the clients, people shop at several of them.",
        title="synthetic retail, {data.clients:,} shops, {data.subjects:,} shoppers",
        recommended=replace(_SHOP, cohort=20, max_rows=2_000),
        fixed={"spread": 0.1},
    ),
    "movielens": Known(
        read=movielens_1m,
        summary="MovieLens 1M; a rating of 4 or 5 is a click.",
        title="MovieLens 1M, a rating of 4 or 5 is a click",
        recommended=replace(_FILMS, max_rows=2_500),
    ),
    "movielens-100k": Known(
        read=movielens_100k,
        summary="MovieLens 100K, likewise.",
        title="MovieLens 100K, a rating of 4 or 5 is a click",
        recommended=_FILMS,
    ),
    "amazon": Known(
        read=amazon,
        summary="Amazon electronics, prepared by the FedSubAvg authors; a rating of 5 is a click.",
        title="Amazon electronics, a rating of 5 is a click",
        recommended=Recommended(
            training=LocalTraining(batch=4, rate=0.1),
            server=ServerStep(optimizer="adaptive", rate=0.05, epsilon=0.03),
            clip=1.0,
        ),
    ),
    "taobao": Known(
        read=_taobao,
        summary="Taobao's UserBehavior.csv; items opened against items drawn.",
        title="Taobao user behaviour",
        recommended=_SHOP,
    ),
    "alimama": Known(
        read=_alimama,
        summary="Alimama display advertising; impressions and clicks.",
        title="Alimama display advertising",
        recommended=_SHOP,
    ),
    "interactions": Known(
        read=_own,
        summary="A user's own CSV or Parquet; an option that is empty or 0 is left out.",
        title="own interactions, {data.name}",
        recommended=replace(_SHOP, cohort=20),
        kind=kinds.OWN_CLICKS,
    ),
    "ratings-100k": _RATED(
        read=RATINGS["ratings-100k"],
        summary="MovieLens 100K, ratings of 1 to 5, by factors.",
        title="MovieLens 100K, ratings",
        recommended=FACTORISED,
    ),
    "ratings-1m": _RATED(
        read=RATINGS["ratings-1m"],
        summary="MovieLens 1M, likewise.",
        title="MovieLens 1M, ratings",
        recommended=_MANY,
    ),
    "shops-1m": _RATED(
        read=shops_1m,
        summary="MovieLens 1M, ratings spread over shops: a person's lie at several of them.",
        title="MovieLens 1M, ratings at {data.clients:,} shops",
        recommended=replace(_MANY, cohort=20, max_rows=4_000, per_person=_AT_SHOPS),
        kind=replace(kinds.RATINGS, options=("factors",)),
    ),
    "ratings-10m": _RATED(
        read=RATINGS["ratings-10m"],
        summary="MovieLens 10M, ratings of 0.5 to 5.",
        title="MovieLens 10M, ratings",
        recommended=replace(_MANY, max_rows=8_000),
    ),
    "ratings-lastfm": _RATED(
        read=RATINGS["ratings-lastfm"],
        summary="Last.fm 2K, plays binned to ratings of 1 to 5.",
        title="Last.fm 2K, plays as ratings of 1 to 5",
        recommended=_LISTENED,
    ),
    "sequences": Known(
        read=_own_sequences,
        summary="A user's own CSV or Parquet of users, items and times; which item comes next.",
        title="what comes next, {data.name}",
        recommended=NEXT,
        kind=replace(SEQUENCES, explained={**kinds.OWN_CLICKS.explained, **SEQUENCES.explained}),
    ),
    "sequences-100k": Known(
        read=sequences_100k,
        summary="MovieLens 100K; which film comes next, ranked among all.",
        title="MovieLens 100K, the next film",
        recommended=NEXT,
        kind=SEQUENCES,
    ),
    "sequences-1m": Known(
        read=sequences_1m,
        summary="MovieLens 1M, likewise.",
        title="MovieLens 1M, the next film",
        recommended=NEXT,
        kind=SEQUENCES,
    ),
    "sequences-amazon": Known(
        read=sequences_amazon,
        summary="Amazon electronics, likewise: which product is reviewed next.",
        title="Amazon electronics, the next product",
        recommended=_penalised(0.0011),
        kind=SEQUENCES,
    ),
    "sequences-lastfm": Known(
        read=sequences_lastfm,
        summary="Last.fm 2K, likewise: which artist a user listens to, without an order.",
        title="Last.fm 2K, another artist",
        recommended=_penalised(0.00083),
        kind=SETS,
    ),
    "plays": Known(
        read=plays,
        summary="Plays, a role is a client; which word comes next, by a softmax over all words.",
        title="next word in plays, {data.clients:,} speakers, {data.sizes[word]:,} words",
        recommended=_LAGS,
        kind=replace(kinds.WORDS, make=partial(kinds.word_task, model="next", negatives=1_000)),
        fixed={"by_model": {"log-bilinear": _SPOKEN}},
    ),
    "speakers-like": Known(
        read=speakers_like,
        summary="Synthetic speakers, whose words follow each other by a pattern; likewise.",
        title="next word, {data.clients:,} synthetic speakers, {data.sizes[word]:,} words",
        recommended=replace(
            _SPOKEN,
            training=LocalTraining(batch=16, rate=0.2, decay=1.0, table_rate=4.0),
            cohort=20,
            max_rows=1_000,
        ),
        kind=kinds.WORDS,
        fixed={"by_model": {"next": replace(_LAGS, max_rows=1_000, cohort=20, rounds=80)}},
    ),
    "trec": Known(
        read=trec,
        summary="TREC questions and the six kinds of answers they ask for; no tables.",
        title="TREC question classification",
        recommended=_QUESTIONS,
        kind=kinds.QUESTIONS,
    ),
    "mnist": Known(
        read=mnist,
        summary="MNIST digits, by the CNN of McMahan et al. 2017; no tables.",
        title="MNIST, {data.clients:,} clients",
        recommended=_DIGITS,
        kind=kinds.IMAGES,
    ),
}
"""What `load` knows."""
