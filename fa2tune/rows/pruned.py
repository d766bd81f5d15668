"""Plain words for the names under which a row counts the candidates that were never timed (``Row.pruned``).

The names are those of search-space constraints, of limits of a GPU and of failures. Rows and studies store them, so the names
stay as they are; people read these words.
"""

from __future__ import annotations

from collections.abc import Mapping

BEFORE = "_before"  #: the end of a failure's name where an earlier run met it

WORDS: Mapping[str, str] = {
    # constraints of search spaces
    "accumulators_fit_dk_dv_s_dp": "too many accumulators per thread (dK, dV, scores, dP)",
    "accumulators_fit_dq_s_dp": "too many accumulators per thread (dQ, scores, dP)",
    "accumulators_fit_output": "too many accumulators per thread (scores, output)",
    "copies_are_aligned": "tensors that are not 16-byte aligned",
    "descriptor_needs_tma": "descriptor loads without TMA",
    "early_start_waits_for_ends": "EARLY_START with BESIDE",
    "head_dim_has_parts": "IN_PARTS of a head dim in one part",
    "half_blocks_if_joined": "BLOCK_M 64 at 64 columns needs num_warps 8 and REDUCE vector",
    "halves_are_of_one_part": "O in two parts is not stored in halves",
    "halves_of_o_have_rows": "O_IN_HALVES with fewer than 32 rows a warp",
    "joined_groups_at_64_columns": "num_warps 8 at 64 columns needs BLOCK_M 64",
    "joined_groups_go_together": "num_warps 8 needs ORDER together",
    "keys_where_they_fit": "OWN products is slower than OWN keys, which fits",
    "launch_registers_hold_a_product": "maxnreg leaves too few registers for a product",
    "longer_first_is_written_before": "LONGER_FIRST with BESIDE, or of sequences that are not packed",
    "narrow_tiles_hold_head_dims": "NARROW of head dims above 32, or with IN_PARTS",
    "norms_bound_scores": "RESCALE never with a score term",
    "not_of_the_family": "what such calls leave out",
    "o_has_room_of_its_own": "O shares memory although memory of its own fits",
    "o_through_q_alone": "O cannot be stored through Q's memory",
    "one_group_shares": "maxnreg does not suit the number of consumer groups",
    "orders_are_for_persistent_programs": "PAIRS or DYNAMIC has no effect here",
    "others_take_over_what_comes_late": "BESIDE needs DYNAMIC if PERSISTENT",
    "held_columns_are_of_q": "Q_HELD with Q_IN_REGISTERS, or more than Q has",
    "p_in_registers_has_one_split": "P_THROUGH registers needs SCORE_WARPS 1 and KEY_WARPS num_warps",
    "packed_sequences_in_one_form": "packed sequences need DYNAMIC, PERSISTENT and no PAIRS",
    "packed_tensors_within_32_bits": "packed tensors of 4 GiB or more",
    "parts_are_added_apart": "IN_PARTS needs REDUCE vector and num_warps 4",
    "parts_are_of_both_head_dims": "IN_PARTS of head dims that have not the same two parts",
    "passed_blocks_fit_ring": "too few STAGES, so this mask deadlocks",
    "products_apart_are_alike": "SCORES_APART or KEYS_APART of products that are not alike",
    "register_cap_binds": "maxnreg is no lower than the block's own limit",
    "register_cap_holds_wgmma": "maxnreg leaves too few registers for a product",
    "registers_hold_accumulators": "dK, dV, scores and dP exceed the registers",
    "registers_hold_loop": "what lives through the loop exceeds the registers",
    "registers_hold_tiles": "tiles exceed the registers",
    "rows_per_warp_block_m": "fewer than 16 rows per warp (BLOCK_M)",
    "sixteen_bit": "float32 in a kernel for 16-bit types",
    "stages_use_shared_memory": "shared memory left for another stage",
    "third_stage_of_narrow_tiles": "STAGES 3 needs NARROW and no ORDER together",
    "term_has_registers": "a score term with BLOCK_M 128",
    "term_has_room": "a score term with SCORES_APART, or P_THROUGH one",
    "tiles_fit_shared_memory": "tiles exceed shared memory",
    "tma_addresses_tensors": "tensors that TMA cannot address",
    "turns_take_groups": "PINGPONG needs two consumer groups",
    "two_groups_of_keys": "OWN keys needs BLOCK_N 128 and P_STAGES 1",
    "turns_follow_the_counter": "IN_ORDER without the options that it needs",
    "v_apart_is_in_parts": "V_APART with BESIDE, or of head dims that are alike",
    "warps_have_rows": "more warps than a product has rows or columns for",
    "who_prepares_makes_room_for_who_finishes": "FINISH_BESIDE without the options that it needs",
    "without_wgmma": "mma.sync where the GPU has faster instructions",
    # limits of the GPU, before a compile
    "architecture": "other compute capability",
    "interpreter": "no interpreter runs it",
    "instruction_cache": "loop exceeds the instruction cache",
    "call": "a call that this kernel does not compute",
    "mask": "a mask that this kernel does not compute",
    "score": "a score term that this kernel does not compute",
    "extent": "packed sequences, which this kernel does not compute",
    "mma_shape": "block smaller than a tensor-core product",
    "shared_memory_of_tiles": "streamed tiles exceed shared memory",
    "threads_per_block": "too many threads per block",
    "hopeless": "predicted to be too slow",
    # and after it
    "registers": "binary exceeds the registers",
    "shared_memory": "binary exceeds shared memory",
    "spills": "too many spills",
    # failures
    "compile_error": "compile error",
    "crash": "crash",
    "device_assert": "assertion on the device",
    "failed": "failure of the host or GPU",
    "illegal_access": "illegal memory access",
    "killed": "killed from outside",
    "launch_error": "launch error",
    "miscompiled": "wrong machine code",
    "out_of_memory": "out of memory",
    "timeout": "timeout",
    "wrong_result": "wrong result",
}


def words(name: str) -> str:
    """The words for a name. One that is not known, of a newer fa2tune or of a kernel of your own, is shown with spaces."""
    if name not in WORDS and name.endswith(BEFORE):
        return f"{words(name.removesuffix(BEFORE))}, in an earlier run"
    return WORDS.get(name) or name.replace("_", " ")


def counted(pruned: Mapping[str, int]) -> str:
    """How many candidates each reason excluded, the most first: "tiles exceed shared memory: 31; crash: 7"."""
    most_first = sorted(pruned.items(), key=lambda item: -item[1])
    return "; ".join(f"{words(name)}: {count}" for name, count in most_first)
