#!/bin/bash
# the last race: defaults and what else is in question
cd "$(dirname "$0")/.." && export PYTHONPATH=$PWD TRITON_DISABLE_LINE_INFO=1
python benchmarks/sm80_race.py --configs 0 --rounds 8 --every --out scratch_k80/last.json \
 --try '64:{"BLOCK_N": 32, "maxnreg": 168}' \
 --try '64:{"BLOCK_N": 32, "maxnreg": 168, "SUMS": "add"}' \
 --try '64:{"SCHEDULE": "fa2", "BLOCK_N": 128, "Q_IN_REGISTERS": false}' \
 --try '64:{"SCHEDULE": "fa2", "BLOCK_M": 64}' \
 --try '128:{"SCHEDULE": "fa2", "BLOCK_N": 64, "SUMS": "add"}' \
 --try '64:{"EARLY": true}' \
 --try '64:{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "P_THROUGH": "one", "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "EARLY": false}' \
 --try '128:{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "EARLY": false}' \
 --try '128:{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "EARLY": true}' \
 --try '128:{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2, "EARLY": false}' \
 --try '128:{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2, "EARLY": true}' \
 --try '128:{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "P_THROUGH": "shared", "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2, "EARLY": true}' \
 --try '128:{"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "one", "SCORE_WARPS": 4, "KEY_WARPS": 4, "QUERY_WARPS": 4, "EARLY": false}' \
 --try '128:{"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "SCORE_WARPS": 4, "KEY_WARPS": 2, "QUERY_WARPS": 4, "EARLY": true}' "$@"
