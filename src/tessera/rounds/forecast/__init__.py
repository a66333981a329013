"""What a round by a plan will cost and promise, computed before anybody runs it.

rows.py        the rows that clients name, fetch and train, as expectations
secagg.py      lengths of messages; those of a secure sum, and its work
two_server.py  the messages of two servers and their clients
epochs.py      those of a fixed group, and how long it waits
forecast.py    all of it for one plan: bytes by kind of sum, sizes, the cap on a client's rows
"""

from tessera.rounds.forecast.forecast import Forecast

__all__ = ["Forecast"]
