#!/usr/bin/env bash
# Make a checkout ready to run: install system packages through apt, then the package in a new environment.
# The environment is .venv, or .venv-kompute with --kompute, and the install is editable.
# Another run changes nothing and takes one second.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash tools/setup.sh [--kompute] [--serve | --hosts] [--test] | --drivers | --compilers | --windows |
                             --aarch64

  (no option)  install the Vulkan loader, a GLSL compiler and, if there is no Vulkan driver, Mesa's drivers; make
               .venv with the package; unpack a newer GLSL compiler into .glslang/ if the system's compiler does
               not support matrix units (Debian 12)
  --kompute    make .venv-kompute instead, which also has the Kompute runtime: builds kp from source (about two
               minutes), needs Python 3.11 or 3.12 and numpy below 2
  --serve      also install what `vkbackend serve` needs
  --hosts      also install what several hosts need (docs/hosts.md): mpi4py and MPICH
  --test       --serve, --hosts, the Vulkan validation layers, the package's test extra, and Chromium if apt has it

Each of the next options does only what its line says:

  --drivers    unpack the software drivers for tests (lavapipe, SwiftShader) and AMD's compiler into .drivers/, and
               print a line "NAME PATH-OF-ICD-JSON" for each driver on stdout
  --compilers  unpack Mesa's compilers for AMD, Intel and NVIDIA (RADV, ANV, NVK), which need no GPU, and a lavapipe
               with matrix units into .drivers/ (two minutes of CPU, 300 MB of downloads, apt packages)
  --windows    unpack Wine, and Windows Python with the package's dependencies, into .windows/ (180 MB of downloads,
               2 GB of disk; needs the .venv of --test)
  --aarch64    unpack QEMU, and Debian 13 for 64-bit ARM with Python, the package's dependencies and the compilers
               for Adreno, Mali, Raspberry Pi, Apple and Imagination GPUs, into .aarch64/ (300 MB of downloads,
               600 MB of disk, apt packages; needs the .venv of --test)
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
level=base
kompute=""
alone=""
for arg in "$@"; do
    case $arg in
        --serve | --hosts)
            case $level in
                base) level=${arg#--} ;;
                test | "${arg#--}") ;;
                *) level=serve,hosts ;;
            esac
            ;;
        --test) level=test ;;
        --kompute) kompute=yes ;;
        --drivers | --compilers | --windows | --aarch64) alone=$arg ;;
        -h | --help) usage && exit 0 ;;
        *) echo "setup: unknown option $arg" >&2 && usage >&2 && exit 2 ;;
    esac
done
[ -z "$alone" ] || [ $# = 1 ] || { echo "setup: $alone goes alone" >&2 && usage >&2 && exit 2; }
venv=$root/.venv${kompute:+-kompute}

exec 3>&1 1>&2  # Progress goes to stderr. The list of drivers goes to descriptor 3, the caller's stdout.
exec 9<"$root${kompute:+/tools}" && flock 9  # Only one run at a time may change an environment.

step() { echo "setup: $*"; }

# die WHAT-FAILED WHAT-TO-DO [EXIT-CODE]
die() {
    echo "setup: FAILED: $1" >&2
    echo "setup: $2" >&2
    exit "${3:-1}"
}

# attempt TITLE WHAT-TO-DO COMMAND...: print TITLE and run COMMAND; on failure print its last lines and exit.
attempt() {
    local title=$1 advice=$2 log
    shift 2
    step "$title"
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1 </dev/null 9<&-; then
        tail -n 20 "$log" | sed 's/^/    /' >&2
        rm -f "$log"
        die "$title" "$advice"
    fi
    rm -f "$log"
}


installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

has_loader() { PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1 '; }

# manifest_dirs KIND: print where the Vulkan loader looks for manifests (KIND: icd.d or explicit_layer.d).
manifest_dirs() {
    local dirs dir
    dirs=${XDG_CONFIG_HOME:-${HOME:-/nonexistent}/.config}:${XDG_CONFIG_DIRS:-/etc/xdg}:/usr/local/etc:/etc
    dirs=$dirs:${XDG_DATA_HOME:-${HOME:-/nonexistent}/.local/share}
    dirs=$dirs:${XDG_DATA_DIRS:-/usr/local/share:/usr/share}
    while read -r dir; do echo "$dir/vulkan/$1"; done < <(tr ':' '\n' <<<"$dirs")
}

# gpu_vendors: print the PCI vendor of each GPU that the kernel lists.
gpu_vendors() {
    local device
    for device in "${VKBACKEND_SYSFS:-/sys}"/bus/pci/devices/*; do
        if [[ $(cat "$device/class" 2>/dev/null) == 0x03* ]]; then cat "$device/vendor"; fi
    done
}

# lacks_driver: succeed if there is no driver, or none for a GPU of AMD or Intel. The driver of another vendor's GPU
# may be there.
lacks_driver() {
    local dir names vendor lacks=1
    [ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}${VK_ADD_DRIVER_FILES:-}" ] && return 1
    names=$(while read -r dir; do compgen -G "$dir/*.json" || true; done < <(manifest_dirs icd.d))
    names=${names,,}
    [ -n "$names" ] || lacks=0
    while read -r vendor; do
        case $vendor in
            0x1002) [[ $names =~ radeon|/amd ]] || lacks=0 ;;
            0x8086) [[ $names =~ /intel ]] || lacks=0 ;;
            0x10de) [[ $names =~ /nvidia|/nouveau ]] || step "an NVIDIA GPU is here without its driver: install it" ;;
        esac
    done < <(gpu_vendors)
    return "$lacks"
}

has_validation() {
    local dir
    while read -r dir; do
        [ -f "$dir/VkLayer_khronos_validation.json" ] && return 0
    done < <(manifest_dirs explicit_layer.d)
    return 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_packages() {
    local by_hand="run as root: apt-get update && apt-get install -y --no-install-recommends $*
setup: then run this script again"
    command -v apt-get >/dev/null ||
        die "no apt here to install: $*" "install the equivalents by hand, then run this script again"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "missing $*, and neither root nor sudo to install it" "$by_hand"
        # Ask for a password only on a terminal, because other runs must not wait for input.
        sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; } ||
            die "missing $*, and sudo wants a password that cannot be asked for here" "$by_hand"
    fi
    attempt "reading apt's package lists" "check the network and /etc/apt/sources.list*, then run this again" \
        as_root apt-get -o DPkg::Lock::Timeout=300 update
    attempt "installing $*" "$by_hand" as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}

# find_python BELOW: print the name of a Python from 3.11 up to, but not including, 3.BELOW.
find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        "$name" -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, $1))" 2>/dev/null &&
            echo "$name" && return 0
    done
    return 1
}

has_python_headers() {
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

system_packages() {
    local missing=()
    installed libvulkan1 || has_loader || missing+=(libvulkan1)
    installed glslang-tools || command -v glslangValidator >/dev/null || missing+=(glslang-tools)
    if ! installed mesa-vulkan-drivers && lacks_driver; then missing+=(mesa-vulkan-drivers); fi
    if [ "$level" = test ]; then
        installed vulkan-validationlayers || has_validation || missing+=(vulkan-validationlayers)
    fi
    if [ ! -x "$venv/bin/python" ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        missing+=("$python-venv")  # Debian ships python3 without ensurepip
    fi
    # Building kp needs these packages; running it needs only libfmt.
    if [ "$kompute" ] && ! "$venv/bin/python" -c 'import kp' 2>/dev/null; then
        for package in libvulkan-dev libfmt-dev pybind11-dev; do
            installed "$package" || missing+=("$package")
        done
        command -v cmake >/dev/null || missing+=(cmake)
        command -v make >/dev/null || missing+=(make)
        command -v c++ >/dev/null || missing+=(g++)
        has_python_headers || missing+=("$python-dev")
    fi
    if [ ${#missing[@]} -gt 0 ]; then install_packages "${missing[@]}"; fi
}

# A missing browser is not an error, because the tests that need it skip.
# Debian's headless shell takes half of Chromium's CPU time.
# If another browser is present, only root installs the shell, because sudo may want a password.
browser_for_tests() {
    local name shell=chromium-headless-shell present=""
    [ "$level" = test ] && [ -z "$kompute" ] && command -v apt-get >/dev/null || return 0
    for name in chromium chromium-browser google-chrome "$shell"; do
        if command -v "$name" >/dev/null; then present=$name; fi
    done
    if [ "$present" = "$shell" ]; then return 0; fi
    if [ -z "$present" ] || [ "$(id -u)" = 0 ]; then
        if apt-cache show "$shell" >/dev/null 2>&1 && (install_packages "$shell"); then return 0; fi
    fi
    [ "$present" ] || (install_packages chromium) || step "without a browser; the tests of the page will skip"
}


# wanted_stamp: print the environment's inputs, which are this path and pyproject.toml's hash.
# Scripts in .venv/bin and the editable install contain the path.
wanted_stamp() { echo "$root" && sha256sum <"$root/pyproject.toml"; }

# Build kp without debug layers, and with Debian's fmt, pybind11 and Vulkan headers instead of downloads.
# VIRTUAL_ENV selects the Python that kp is built for.
kompute_flags() {
    export KOMPUTE_OPT_USE_BUILT_IN_FMT=OFF KOMPUTE_OPT_USE_BUILT_IN_PYBIND11=OFF \
        KOMPUTE_OPT_USE_BUILT_IN_VULKAN_HEADER=OFF KOMPUTE_OPT_INSTALL=OFF \
        KOMPUTE_OPT_DISABLE_VK_DEBUG_LAYERS=ON KOMPUTE_PYTHON_NUM_PARALLEL_THREADS=2 VIRTUAL_ENV=$venv
}

environment() {
    local stamp=$venv/.setup-stamp want extras=() target="" have="" name=${venv##*/}
    want=$(wanted_stamp)
    [ -f "$stamp" ] && have=$(cat "$stamp")
    case "$level ${have##*$'\n'}" in  # Keep the extras that the environment already has.
        "base "?* | *" test") level=${have##*$'\n'} ;;
        "serve hosts" | "hosts serve" | *" serve,hosts") level=serve,hosts ;;
    esac
    if [ "$have" = "$want"$'\n'$level ]; then
        finder_first && link_types
        "$venv/bin/python" -c "import vkbackend${kompute:+, kp}" 2>/dev/null && return 0
    fi
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        { [ -n "$have" ] && [ "$(head -n 1 <<<"$have")" != "$root" ]; }; then
        attempt "making $name with $("$python" --version)" "remove $name and run this again" \
            "$python" -m venv --clear "$venv"
    fi
    [ "$kompute" ] && kompute_flags && extras+=(kompute)
    [ "$level" = base ] || extras+=("$level")
    target=.${extras[*]:+[$(IFS=, && echo "${extras[*]}")]}
    rm -f "$stamp"
    cd "$root"
    attempt "installing the package into $name (level: $level${kompute:+, building kp takes two minutes})" \
        "check the network and pip's configuration, then run this again" \
        "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --editable "$target"
    finder_first && link_types
    printf '%s\n%s\n' "$want" "$level" >"$stamp"
}

# finder_first: make Python use the import finder of the editable install first.
# Otherwise Python would import a folder vkbackend in the current directory, such as this checkout.
finder_first() {
    local site
    for site in "$venv"/lib/python*/site-packages; do
        [ -f "$site/vkbackend-first.pth" ] || cat >"$site/vkbackend-first.pth" <<'LINE'
import sys; sys.meta_path.sort(key=lambda finder: not getattr(finder, "__module__", "").startswith("__editable___vkbackend"))
LINE
    done
}

# link_types: link the sources as a stub package, because type checkers ignore the finder of the editable install.
# A link exists for every file of vkbackend/ and for every other folder. Mypy needs an __init__ with the suffix .pyi.
link_types() {
    local stubs source link
    for stubs in "$venv"/lib/python*/site-packages; do
        stubs=$stubs/vkbackend-stubs
        mkdir -p "$stubs"
        find "$stubs" -xtype l -delete
        for source in "$root"/vkbackend/* "$root"/{meta,models,shaders,tools}; do
            case ${source##*/} in
                __pycache__) continue ;;
                __init__.py) set -- "$stubs/__init__.py" "$stubs/__init__.pyi" ;;
                *) set -- "$stubs/${source##*/}" ;;
            esac
            for link; do [ -L "$link" ] || ln -s "$source" "$link"; done
        done
    done
}


if [ "$kompute" ]; then
    python=$(find_python 13) || die "no Python 3.11 or 3.12 found, and kp works with no newer one" \
        "install one (Debian 12 and Ubuntu 24.04 have it: apt-get install python3), then run this again" 3
else
    python=$(find_python 99) || die "no Python 3.11 or newer found" \
        "install python3 (Debian 12, Ubuntu 24.04 or newer have it: apt-get install python3), then run this again"
fi

if [ -n "$alone" ]; then
    . "$root/tools/drivers.sh"
    . "$root/tools/compilers.sh"
    case $alone in
        --drivers) unpack_drivers lavapipe swiftshader radv ;;
        --compilers) unpack_compilers ;;
        --windows) . "$root/tools/windows.sh" && unpack_drivers lavapipe 3>/dev/null && unpack_windows ;;
        --aarch64) . "$root/tools/aarch64.sh" && unpack_aarch64 ;;
    esac
    exit 0
fi
system_packages
browser_for_tests
if [ -z "$kompute" ] && command -v apt-get dpkg-deb >/dev/null; then
    . "$root/tools/drivers.sh"
    . "$root/tools/glslang.sh"
    unpack_glslang
fi
environment
step "ready: ${venv##*/} (level: $(tail -n 1 "$venv/.setup-stamp"))"
