#!/usr/bin/env bash
# Finds or lays out what the feature `cuda` builds with, and prints the environment for it. No GPU, driver or root.
#
#   eval "$(tools/cuda/toolchain.sh FOLDER)"
#
# A CUDA 13.0 toolkit is taken where CUDA_HOME, CUDA_PATH or an nvcc on the PATH leads to one; else the compiler is
# installed into FOLDER from the wheels that requirements/cuda-compiler.txt pins: 270 MB, which need Linux with glibc 2.34,
# a Python with pip (PYTHON), and a gcc of at most 15. Only `export` lines go to stdout. Called again it installs nothing.
set -euo pipefail
[ "$#" -eq 1 ] || { echo "usage: $0 FOLDER" >&2 && exit 2; }

here=$(cd "$(dirname "$0")" && pwd)
pins="$here/../../requirements/cuda-compiler.txt"
mkdir -p "$1"
folder=$(cd "$1" && pwd)

# An nvcc of a later release writes PTX that a driver of the 580 line refuses.
is_13_0() {
  [ -x "$1/bin/nvcc" ] && [ -e "$1/lib64/libcudart_static.a" ] && "$1/bin/nvcc" --version | grep -q 'release 13\.0,'
}

installed_toolkit() {
  local on_path candidate
  on_path=$(command -v nvcc || true)
  for candidate in "${CUDA_HOME:-}" "${CUDA_PATH:-}" "${on_path:+$(dirname "$(dirname "$(readlink -f "$on_path")")")}" \
    /usr/local/cuda-13.0 /usr/local/cuda; do
    if [ -n "$candidate" ] && is_13_0 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
}

# Installed in a staging folder and moved into place, so that an interrupted call leaves no half-made toolkit behind.
install_wheels() {
  local wanted work new
  wanted=$(sha256sum < "$pins")
  [ "$(cat "$folder/wheels/.complete" 2> /dev/null)" != "$wanted" ] || return 0
  echo "installing the CUDA 13.0 compiler from PyPI into $folder/wheels (270 MB)" >&2
  work=$(mktemp -d "$folder/.new.XXXXXX")
  trap "rm -rf '$work'" EXIT
  # In one call: the wheels share a folder, and a second `--target` would not merge into it.
  "${PYTHON:-python3}" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
    --no-compile --only-binary=:all: --require-hashes --target "$work" -r "$pins" >&2
  new="$work/nvidia/cu13"
  # The wheels let only their owner run the tools, and call the folder of libraries otherwise than toolkits do.
  find "$new/bin" "$new/nvvm/bin" -type f -perm -u+x -exec chmod a+rx {} +
  ln -s lib "$new/lib64"
  is_13_0 "$new" || { echo "the wheels of $pins hold no CUDA 13.0" >&2 && exit 1; }
  echo "$wanted" > "$new/.complete"
  rm -rf "$folder/wheels"
  mv "$new" "$folder/wheels"
}

toolkit=$(installed_toolkit)
if [ -z "$toolkit" ]; then
  install_wheels
  toolkit="$folder/wheels"
fi
echo "CUDA 13.0 from $toolkit" >&2

# What the linker sees: empty libraries for those that are opened at run time, and of the toolkit only the static
# runtime, which Candle's own kernels call and which opens libcuda itself, when it is first called.
"$here/empty_libraries.sh" "$folder/link/lib64"
ln -sfn "$toolkit/lib64/libcudart_static.a" "$folder/link/lib64/libcudart.a"

# Candle's kernels are compiled for compute capability 8.0 as PTX, which the driver compiles for any GPU from there on;
# 9.0 and later would get a suffix from cudaforge and then run on that one generation only.
cat << END
export CUDA_HOME='$folder/link'
export NVCC='$toolkit/bin/nvcc'
export CUDA_COMPUTE_CAP='80'
export CUDARC_CUDA_VERSION='13000'
export LIBRARY_PATH='$folder/link/lib64'
export RUSTC_WRAPPER='$here/load_at_run_time.sh'
export TRANSFORMER_CANDLE_NVCC='13.0'
END
