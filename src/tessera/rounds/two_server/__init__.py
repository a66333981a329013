"""One round between two servers that do not collude: client, leader and helper.

shared_sum.py  the sum between two servers: it makes the roles of a round
domain.py      over which rows a round goes: all, or those of the cohort's union; what was opened
client.py      [union ->] fetch -> train -> write, unseen by either server
leader.py      the server that clients talk to (both: their states in modules of their own)
helper.py      the second server, reached through the leader
ideal.py       the same sum in memory, for the rounds between those with real cryptography
"""
