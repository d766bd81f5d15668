"""Dimensions of kernels/sm90/fwd_shares.py and of what runs after it."""

TILE_ROWS = 128
#: Programs, and whole tiles of each, at most.
MOST_SHARES, MOST_ROUNDS = 256, 8
#: Dimensions that both have.
BOTH = {
    "BLOCK_M": (TILE_ROWS,),
    "BLOCK_N": (64, 128),
    "EARLY": (False, True),  # the kernel after the first one may start before that has ended
    "SHARES": tuple(range(1, MOST_SHARES + 1)),
    "ROUNDS": tuple(range(MOST_ROUNDS + 1)),
}
