"""Fixed groups that a client can check: nobody chose who is in a group with whom.

    1. A snapshot numbers its clients and is signed, before anybody can know the beacon.
    2. Two parties reveal a value each, committed to before; the beacon is made of both.
    3. The beacon keys a permutation of the numbers, and every g in a row are a group.

A client verifies the signatures, the values and its own place, computes its neighbours' numbers
itself and demands a path for exactly these. A path alone proves that somebody is in the snapshot,
and not that it is in this group.

snapshot.py  the signed records and their chain
beacon.py    values, their parties, and the beacon
draw.py      all groups of a snapshot, for whoever hands out the proofs
proof.py     what a client's folder holds, and its check
"""
