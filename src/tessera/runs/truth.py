"""Truth: what the audits compare with, written beside a recorded run. Simulated data only, ever."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tessera.data.examples import LABEL, ClientData
from tessera.ids import ClientId
from tessera.learning.rating_models import BASE
from tessera.runs.folder import write_owner_only
from tessera.simulation.subcohort import Participant
from tessera.simulation.two_server import TwoServerSetup


def write_truth(path: Path, participants: Mapping[ClientId, Participant]) -> None:
    """Everybody's real rows, by table."""
    truth = {
        str(client): {name: rows.tolist() for name, rows in participant.local.real.items()}
        for client, participant in participants.items()
    }
    write_owner_only(path, json.dumps(truth).encode())


def write_labels(path: Path, data: ClientData) -> None:
    """Everybody's ratings, and what was subtracted from them."""
    truth = {
        str(client): {name: data.of(client)[name].tolist() for name in ("item", LABEL, BASE)}
        for client in range(data.clients)
    }
    write_owner_only(path, json.dumps(truth).encode())


def write_box_key(path: Path, setup: TwoServerSetup) -> None:
    """The helper's unsealing key, for audits of its view. In simulated runs only."""
    write_owner_only(path, setup.helper.box.secret.reveal())
