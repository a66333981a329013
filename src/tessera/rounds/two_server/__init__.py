"""One round between two servers that do not collude: client, leader and helper.

params.py      what a plan means between two servers in a round
write_cost.py  whether a table is written by point functions or by plain shares
client.py      [union ->] fetch -> train -> write, unseen by either server
leader.py      the server that clients talk to
helper.py      the second server, reached through the leader
"""
