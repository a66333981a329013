"""One round between two servers that do not collude: client, leader and helper.

params.py      what a plan means between two servers in a round
write_cost.py  whether a table is written by point functions or by plain shares
domain.py      over which rows a round goes: all, or those of the cohort's union
client.py      [union ->] fetch -> train -> write, unseen by either server
leader.py      the server that clients talk to
               (both: their states and their roles in modules of their own)
helper.py      the second server, reached through the leader
opened.py      what both opened, as the sum of a round and as its means
ideal.py       ideal roles for the same rounds, between those with real cryptography
"""
