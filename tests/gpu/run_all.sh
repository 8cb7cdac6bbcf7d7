#!/usr/bin/env bash
# Everything that is checked and timed on a GPU, in one go: kernels, engine, kernel times, workloads.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python3 -m pytest tests/kernels tests/gpu
python3 tests/gpu/bench_kernels.py
python3 tests/gpu/profile_step.py
python3 bench.py all --model qwen3-0.6b --repeats 2
python3 bench.py bench latency batch16 --model qwen3-8b
if [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
    python3 tests/gpu/bench_all_reduce.py 2
    python3 bench.py bench latency batch16 --model qwen3-8b --tensor-parallel-size 2
fi
