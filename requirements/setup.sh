#!/usr/bin/env bash
# Prepares .venv from requirements/cpu.txt; called by `make setup`, which skips it when nothing has changed.
#   PYTHON           the interpreter to build .venv from (Python 3.11)
#   TORCH_INDEX_URL  where the CPU build of torch is taken from when pip's own indexes do not have it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
torch_index=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
lock=requirements/cpu.txt
log=.venv/setup.log
unfinished=.venv/setup-unfinished

fail() {
    echo "make setup: $1" >&2
    exit 1
}

# pip repeats a line per package about indexes that it was configured with and cannot use; they would bury the reason.
fail_with_log() {
    { grep -v "WARNING: Location 'file:" "$log" || true; } | tail -n 20 >&2
    fail "$1 The lines above are the end of $log."
}

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo none; }

[ "$(uname -sm)" = "Linux x86_64" ] || fail "$lock is for Linux on x86-64, and this is $(uname -sm)."
[ "$(version "$python")" = 3.11 ] || fail "needs Python 3.11, which the versions in $lock are for; '$python' is \
$(version "$python"). Install it (Debian, Ubuntu: apt-get install python3.11 python3.11-venv), or name it: \
make setup PYTHON=/path/to/python3.11"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "'$python' has no venv module (Debian, Ubuntu: apt-get install \
python3.11-venv)."
command -v lscpu >/dev/null || fail "vLLM's CPU build needs the command lscpu (Debian, Ubuntu: apt-get install util-linux)."

# The lock lasts until the last process started here has ended, whatever became of this one.
exec 9<requirements/setup.sh
flock --nonblock 9 || fail "another one is at work in this checkout; wait for it, or end it."

if [ -e "$unfinished" ] || [ "$(version .venv/bin/python)" != 3.11 ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1
then
    echo "Preparing .venv: $(grep -c '^[^#]*==' "$lock") packages, 3.5 GB; two to three minutes and the download. Log: $log"
    mkdir -p .venv
    touch "$unfinished" # first in, last out: a half-removed .venv must not pass for a good one
    find .venv -mindepth 1 ! -path "$unfinished" -delete
    "$python" -m venv .venv >"$log" 2>&1 || fail_with_log "could not create .venv."
else
    echo "Bringing .venv up to date with $lock and setup.py. Log: $log"
    touch "$unfinished"
    : >"$log"
fi

pip_install=(.venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps --no-compile)

# pip unpacks on one core: torch, the largest, goes beside all the others. The log keeps their order.
torch=$(grep '^torch==' "$lock")
"${pip_install[@]}" "$torch" >.venv/setup-torch.log 2>&1 &
torch_job=$!
trap 'echo "make setup: interrupted; run it again to start afresh" >&2; exit 130' INT
trap '[ -z "$torch_job" ] || kill "$torch_job" 2>/dev/null || true' EXIT
others_failed=
"${pip_install[@]}" -r <(grep -v '^torch==' "$lock") >>"$log" 2>&1 || others_failed=yes
torch_failed=
if ! wait "$torch_job"; then
    "${pip_install[@]}" --index-url "$torch_index" "$torch" >>.venv/setup-torch.log 2>&1 || torch_failed=yes
fi
torch_job=
cat .venv/setup-torch.log >>"$log" && rm .venv/setup-torch.log
[ -z "$torch_failed" ] || fail_with_log "could not install $torch. pip found it neither in its own indexes nor at \
$torch_index; name an index that has PyTorch's CPU wheels: make setup TORCH_INDEX_URL=URL"
[ -z "$others_failed" ] || fail_with_log "could not install $lock."

"${pip_install[@]}" --no-build-isolation -e . >>"$log" 2>&1 || fail_with_log "could not install megarl itself."

# Byte code saves each process 12 s of imports. pip would write it too, on one core and with everything that is never
# imported; here the large packages of which little is used are left to the imports below. A few packages ship
# templates that are no valid Python, hence no check of the result.
seldom='/(tests?|transformers/models|sympy|pandas|numba|networkx|openai|anthropic)/'
.venv/bin/python -m compileall -q -j 0 -x "$seldom" .venv/lib/python3.11/site-packages >>"$log" 2>&1 || true
used='datasets, matplotlib.figure, megatron.core, pandas, torch, transformers.models.llama.modeling_llama,
transformers.models.qwen2.modeling_qwen2, vllm.entrypoints.openai.api_server'
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c "import ${used//$'\n'/ }" >>"$log" 2>&1 ||
    fail_with_log "the new .venv cannot import its packages."

rm "$unfinished"
