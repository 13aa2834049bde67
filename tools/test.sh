#!/usr/bin/env bash
# Set up the checkout, unpack the test drivers, then run ruff, mypy and pytest.
# Arguments go to pytest: bash tools/test.sh tests/vkbackend/ops -k rope
# `bash tools/test.sh --all` adds the wide sweeps.
# `bash tools/test.sh --windows` runs tests on Windows Python under Wine instead; more arguments go to pytest.
# `bash tools/test.sh --aarch64` runs tests on Python for 64-bit ARM under QEMU instead, likewise.
# Without arguments, and with --all, tests also run with the kompute runtime.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
bin=$root/.venv/bin
# Some containers set this variable. Hundreds of processes would then compile the sources in 0.4 s each.
unset PYTHONDONTWRITEBYTECODE
# A file that is opened without an encoding is an error in tests (filterwarnings in pyproject.toml).
export PYTHONWARNDEFAULTENCODING=1

bash tools/setup.sh --test
drivers=$(bash tools/setup.sh --drivers)

if [ "${1:-}" = --windows ]; then
    shift
    bash tools/setup.sh --windows
    "$bin/python" -m vkbackend.tools.build_shaders
    . tools/windows.sh
    windows_tests "$@"
    exit
fi

if [ "${1:-}" = --aarch64 ]; then
    shift
    bash tools/setup.sh --aarch64
    "$bin/python" -m vkbackend.tools.build_shaders
    . tools/aarch64.sh
    arm_tests "$@"
    exit
fi


# mypy ignores an editable install's import hook, so it reads a tree of links that looks installed.
# Afterwards, the files that use system calls are checked for Windows and macOS.
mypy_tree() {
    unset PYTHONWARNDEFAULTENCODING
    "$bin/python" -m vkbackend.tools.checkout.linked_tree "$root/.mypy_cache/tree"
    cd "$root/.mypy_cache/tree"
    nice -n 5 "$bin/mypy" --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p vkbackend &&
        nice -n 5 "$bin/python" -m vkbackend.tools.checkout.other_systems . "$root/.mypy_cache/systems"
}

failed=()
check() {
    local title=$1 output
    shift
    echo "test: $title"
    output=$("$@" 2>&1) || { echo "$output" && failed+=("$title"); }
}
check "ruff check" "$bin/ruff" check .
check "ruff format --check" "$bin/ruff" format --check .
if [ ${#failed[@]} -gt 0 ]; then
    echo "test: FAILED before the tests ran: $(IFS=, && echo "${failed[*]}")" >&2
    exit 1
fi


# VKBACKEND_TEST_DRIVERS maps the name of each driver to its manifest (NAME=JSON:NAME=JSON).
# Vulkan loaders read VK_DRIVER_FILES, and older loaders read VK_ICD_FILENAMES.
if [ -n "$drivers" ]; then
    VKBACKEND_TEST_DRIVERS=$(sed 's/ /=/' <<<"$drivers" | paste -sd:)
    VK_DRIVER_FILES=$(cut -d' ' -f2- <<<"$drivers" | paste -sd:)
    export VKBACKEND_TEST_DRIVERS VK_DRIVER_FILES VK_ICD_FILENAMES=$VK_DRIVER_FILES
    echo "test: drivers $VKBACKEND_TEST_DRIVERS"
else
    echo "test: no test driver could be unpacked; the tests run on the system's own"
fi


# mypy runs in the background, because tests often wait for processes.
# The kompute environment is set up in the background too, because its first set-up compiles kp.
kompute="" workers=() logs=$(mktemp -d)
mypy_tree >"$logs/mypy" 2>&1 </dev/null &
mypy=$!
trap 'kill "$mypy" $kompute 2>/dev/null || true; rm -rf "$logs"' EXIT
if [ $# = 0 ] || [ "$*" = --all ]; then
    # There is one worker more than cores, because tests wait for processes. Two more were not faster.
    # A worker runs complete files, because fixtures load models once per file.
    workers=(-n "$(($(nproc) < 4 ? $(nproc) + 1 : 4))" --dist loadfile --no-loadscope-reorder)
    nice -n 10 bash tools/setup.sh --kompute --test >"$logs/kompute" 2>&1 </dev/null &
    kompute=$!
fi

status=0
"$bin/pytest" "${workers[@]}" "$@" </dev/null || status=$?

if [ "$kompute" ]; then
    made=0
    wait "$kompute" || made=$?
    sed 's/^setup:/test: kompute:/' "$logs/kompute"
    case $made in
        0)
            # Each worker imports all files, and a third worker would take as long for this as for its tests.
            run=(.venv-kompute/bin/pytest --runtime kompute -n 2 "${workers[@]:2}")
            mapfile -t files < <(grep -rlE 'mark\.runtimes|for_every_runtime' tests --include='test_*.py')
            "${run[@]}" -m runtimes "${files[@]}" </dev/null || status=$?
            [ $# = 0 ] || "${run[@]}" tests/vkbackend/ops </dev/null || status=$?
            ;;
        3) echo "test: the kompute runtime is NOT tested: see above" ;;
        *) status=1 && echo "test: FAILED to set up the kompute runtime: see above" >&2 ;;
    esac
fi

if wait "$mypy"; then
    sed 's/^/test: mypy: /' "$logs/mypy"
else
    status=1
    cat "$logs/mypy"
    echo "test: FAILED: mypy" >&2
fi
exit "$status"
