"""The parties of a federation as services: each drives its role through its journal.

    dialing.py   what a client and the helper do alike: they dial the leader, in one round at a time
    client.py    a client: begins a round, trains between messages
    helper.py    the second server: steps a model of its own
    leader.py    the leader: rounds, phases and their deadlines, a link to everybody

None of these has a socket. What carries messages between processes is in `transport/`.
"""
