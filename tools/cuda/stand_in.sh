#!/usr/bin/env bash
# Prints the environment in which the feature `cuda` builds without a CUDA toolkit: with an nvcc that compiles nothing.
#
#   eval "$(tools/cuda/stand_in.sh FOLDER)"     # FOLDER is filled with empty libraries of the right names
#
# For clippy, and for the program that the emulated driver's tests run. What comes out trains with this project's kernels,
# which are compiled ahead of time, but holds none of Candle's: never hand it out. `transformer-candle --version` says
# "stand-in" in such a build; `make cuda` makes the real one.
set -euo pipefail
[ "$#" -eq 1 ] || { echo "usage: $0 FOLDER" >&2 && exit 2; }

here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
"$here/empty_libraries.sh" "$1/lib64"
ar rc "$1/lib64/libcudart.a"
folder=$(cd "$1" && pwd)

# The compute capability is one that `toolchain.sh` never names: cudaforge keeps what it compiled by source and
# capability, and would otherwise take these empty files for real ones.
cat << END
export CUDA_HOME='$folder'
export NVCC='$here/fake_nvcc.sh'
export CUDA_COMPUTE_CAP='89'
export CUDARC_CUDA_VERSION='13000'
export LIBRARY_PATH='$folder/lib64'
export RUSTC_WRAPPER='$here/load_at_run_time.sh'
export TRANSFORMER_CANDLE_NVCC='stand-in'
END
