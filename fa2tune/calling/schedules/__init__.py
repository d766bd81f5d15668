"""What runs for a call's own batch, heads and lengths: arithmetic on the host, without a GPU or the rest of ``calling``.

Each file estimates microseconds of one kind of kernel, from the times of rows or by constants fitted to records, and says what
serves. Where ``best``, ``config_of`` or ``of_dense`` gives something else than the row's config, it was expected to be faster
by the file's margin; ``fa2tune explain`` says so.

==========================  ========  ==================================================================================
file                        pass      says
==========================  ========  ==================================================================================
forward_schedule            forward   which row's config, in which tile order
few_tiles                   forward   which other tiles, where calls have few
window_schedule             forward   which row's config in a window bounded on both sides
packed_schedule             both      which row's config, tiles and bands of heads for packed sequences
key_splits_schedule         forward   whether keys are split among programs
longer_blocks_schedule      forward   whether blocks have 80 keys
multistage_schedule         forward   whether warps of short calls load for themselves
shares_schedule             forward   whether programs have equal shares of all key blocks
grouped_schedule            forward   whether tiles have several query heads; what of both runs (``instead_of``)
packed_grouped_schedule     forward   the same of packed sequences
packed_splits_schedule      forward   whether their keys are split; what of both runs (``instead_of``)
fused_schedule              backward  the fused Hopper kernel: alone or overlapped, half blocks, early start
few_blocks_schedule         backward  its order of products where key tiles see few query blocks: a rule, no estimate
bands_schedule              backward  heads of its bands in dense calls
split_backward_schedule     backward  dQ's and dK/dV's kernels: at a time or not, keys of dQ in parts, early start
group_parts_schedule        backward  into how many parts query groups are split
query_parts_schedule        backward  whether query blocks of ungrouped heads are in parts
one_tile_schedule           backward  whether one kernel makes all of it, of few keys
query_tiles_schedule        backward  the same by tiles of queries, of few queries
stored_ds_schedule          backward  whether dS goes through memory, and in how many slices
ordered                     backward  whether the fused kernel serves deterministic calls without wgmma
turns_schedule              backward  whether the fused Hopper kernel serves deterministic calls
tile_order, packed_lengths            what several of these share: a static order of tiles; lengths that are not known
==========================  ========  ==================================================================================
"""
