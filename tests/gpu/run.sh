#!/bin/sh
# Measures this machine's GPU: sh tests/gpu/run.sh [--call 1|2] [--cpu] [--out FOLDER] [--record] [PART...]
#
# Takes the torch of the interpreter that PYTHON names (python3), and needs neither make, pip nor a network. What is
# missing beside torch comes from the pieces that tests/gpu/collect.py has gathered in the folder that PIECES names
# (gpu-pieces in the tree). Nothing outside build/ is changed.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
pieces=${PIECES:-gpu-pieces}
made=build/gpu-site
mkdir -p "$made/wheels"
if ls "$pieces"/wheels.tar.00 >/dev/null 2>&1; then
  (cd "$pieces" && sha256sum --quiet -c SHA256SUMS)
  cat "$pieces"/wheels.tar.?? | tar -x -C "$made/wheels" -f -
fi
"$python" tests/gpu/install.py "$made/wheels" "$made/site"
if ls "$pieces"/vllm.zip.00 >/dev/null 2>&1; then
  cat "$pieces"/vllm.zip.?? >"$made/vllm.zip"
  rm -rf "$made/vllm"
  "$python" -m zipfile -e "$made/vllm.zip" "$made/vllm"
  printf '#!/bin/sh\nPYTHONPATH="%s${PYTHONPATH:+:$PYTHONPATH}" exec "%s" "$@"\n' \
    "$PWD/$made/vllm" "$(command -v "$python")" >"$made/vllm-python"
  chmod +x "$made/vllm-python"
  VLLM_PYTHON=${VLLM_PYTHON:-$PWD/$made/vllm-python}
  export VLLM_PYTHON
fi
PYTHONPATH="$PWD/$made/site:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
PATH="$PWD/$made/site/bin:$PATH"
export PYTHONPATH PATH
exec "$python" -m gpu.run "$@"
