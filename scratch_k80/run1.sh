#!/bin/bash
# first race: forward, then backward; about 50 s each
cd "$(dirname "$0")/.." && export PYTHONPATH=$PWD TRITON_DISABLE_LINE_INFO=1
what=${1:-fwd}
t() { echo "--try"; echo "$1"; }
if [ $what = fwd ]; then
python benchmarks/sm80_race.py --pass fwd --configs 0 --rounds 10 --every --out scratch_k80/fwd1-${2:-all}.json --headdim ${2:-64,128} \
 --try '{"RARE": true}' \
 --try '{"RARE": true, "BLOCK_N": 32}' \
 --try '{"RARE": true, "SCHEDULE": "turns", "BLOCK_N": 32}' \
 --try '{"RARE": true, "SCHEDULE": "ring", "BLOCK_N": 32}' \
 --try '{"RARE": true, "SCHEDULE": "turns", "BLOCK_N": 64}' \
 --try '{"RARE": true, "SCHEDULE": "turns", "BLOCK_N": 64, "Q_IN_REGISTERS": true}' \
 --try '{"RARE": true, "SCHEDULE": "ring", "BLOCK_N": 64, "Q_IN_REGISTERS": true}' \
 --try '{"RARE": true, "SCHEDULE": "fa2", "BLOCK_N": 128}' \
 --try '{"RARE": true, "SCHEDULE": "turns", "BLOCK_N": 128}' \
 --try '{"RARE": true, "SCHEDULE": "turns", "BLOCK_N": 32, "Q_IN_REGISTERS": true}' \
 --try '{"RARE": true, "SCHEDULE": "ring", "BLOCK_N": 64}' \
 --try '{"LAZY": true}' \
 --try '{"LAZY": true, "SCHEDULE": "turns", "BLOCK_N": 32}' \
 --try '{"SCHEDULE": "turns", "BLOCK_N": 32}' \
 --try '{"BLOCK_N": 32}' \
 --try '{"RARE": true, "SUMS": "mma", "SCHEDULE": "turns", "BLOCK_N": 32}' \
 --try '{"RARE": true, "SUMS": "mma", "SCHEDULE": "turns", "BLOCK_N": 64, "Q_IN_REGISTERS": true}' \
 --try '{"RARE": true, "SCHEDULE": "turns", "BLOCK_N": 64, "Q_IN_REGISTERS": true, "maxnreg": 168}' \
 --try '{"RARE": true, "SCHEDULE": "turns", "BLOCK_N": 32, "Q_IN_REGISTERS": true, "maxnreg": 168}' \
 --try '{"RARE": true, "BLOCK_N": 32, "num_warps": 8}' \
 --try '{"RARE": true, "BLOCK_N": 64, "num_warps": 8}' \
 --try '{"RARE": true, "BLOCK_M": 64, "BLOCK_N": 64}'
else
if [ ${2:-64} = 256 ]; then C=('{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 4, "KEY_WARPS": 2, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 4, "KEY_WARPS": 4, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 4, "KEY_WARPS": 4, "QUERY_WARPS": 4, "TURNS": "apart"}' '{"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 1, "TURNS": "apart"}'); else C=('{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 2, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 2, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "TURNS": "merged"}' '{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 2, "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 2, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 4, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 4, "P_THROUGH": "registers", "BUFFERS": 2, "SCORE_WARPS": 1, "KEY_WARPS": 4, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 4, "P_THROUGH": "registers", "BUFFERS": 2, "SCORE_WARPS": 1, "KEY_WARPS": 4, "QUERY_WARPS": 1, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 2, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "registers", "BUFFERS": 2, "SCORE_WARPS": 1, "KEY_WARPS": 8, "QUERY_WARPS": 4, "TURNS": "apart"}' '{"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "P_THROUGH": "shared", "BUFFERS": 2, "SCORE_WARPS": 2, "KEY_WARPS": 2, "QUERY_WARPS": 1, "TURNS": "apart"}' '{"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 1, "SCORE_WARPS": 4, "KEY_WARPS": 4, "QUERY_WARPS": 4, "TURNS": "apart"}' '{"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "P_THROUGH": "shared", "BUFFERS": 2, "SCORE_WARPS": 2, "KEY_WARPS": 4, "QUERY_WARPS": 4, "TURNS": "apart"}'); fi
T=(); for c in "${C[@]}"; do T+=(--try "$c"); done
python benchmarks/sm80_race.py --pass bwd --configs 0 --rounds 8 --every --out scratch_k80/bwd1-${2:-all}.json --headdim ${2:-64,128} "${T[@]}"
fi
