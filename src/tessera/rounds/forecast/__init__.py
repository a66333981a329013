"""What a round by a plan will cost and promise, computed before anybody runs it.

sizes.py       lengths of messages, and sets of a typical length
rows.py        the rows that clients name, fetch and train, as expectations
secagg.py      the messages of a secure sum
two_server.py  the messages of two servers and their clients
traffic.py     bytes up, down and between servers, by scheme
work.py        what masked sums make processors do
row_cap.py     the cap on a client's rows between two servers
forecast.py    all of it for one plan
"""

from tessera.rounds.forecast.forecast import Forecast

__all__ = ["Forecast"]
