# Functions that unpack a lavapipe with matrix units, and compilers for GPUs that this machine lacks.
# The compilers are the drivers ANV (Intel) and NVK (NVIDIA). A shim replaces each kernel driver.
# RADV (AMD) needs no shim, so drivers.sh unpacks it.
# setup.sh sources this file after drivers.sh, whose function private_apt is used here.

# These Debian suites have suitable versions of mesa-vulkan-drivers.
# Each driver runs with the libc of its suite.
nvk_suite=trixie
matrix_units_suite=sid  # lavapipe has 8 x 8 matrix units since Mesa 25.2

# build_shims WORK: build the shims from Mesa's source package into WORK/shims, in two minutes of CPU time.
build_shims() {
    local work=$1 build=$1/mesa/build
    [ ! -d "$work/shims" ] || return 0
    sed -n 's/^deb /deb-src /p' "$work/sources.list" | grep -- -backports >>"$work/sources.list" || true
    step "building the shims of Intel's and NVIDIA's kernel drivers (two minutes of CPU)"
    rm -rf "$work/mesa" && mkdir -p "$work/mesa"
    {
        apt-get update && (cd "$work" && apt-get source --download-only --tar-only mesa) || return 2
        tar -x -C "$work/mesa" --strip-components=1 -f "$work"/mesa_*.orig.tar.* || return 2
        # Mesa builds NVIDIA's shim only with NVK; these lines build the shim alone.
        cat >>"$work/mesa/src/drm-shim/meson.build" <<'MESON'
shared_library('nouveau_noop_drm_shim', '../nouveau/drm-shim/nouveau_noop.c',
  include_directories: [inc_include, inc_src], dependencies: dep_drm_shim, gnu_symbol_visibility: 'hidden')
MESON
        "$python" -m venv "$work/build-env" || return 1
        "$work/build-env/bin/python" -m pip install --disable-pip-version-check --no-input \
            meson ninja mako pyyaml packaging || return 2
        PATH=$work/build-env/bin:$PATH meson setup "$build" "$work/mesa" -Dtools=drm-shim,intel -Dvulkan-drivers= \
            -Dgallium-drivers= -Dplatforms= -Dglx=disabled -Degl=disabled -Dgbm=disabled -Dopengl=false \
            -Dgles1=disabled -Dgles2=disabled -Dllvm=disabled -Dvideo-codecs= || return 1
        PATH=$work/build-env/bin:$PATH nice -n 10 ninja -C "$build" src/intel/tools/libintel_noop_drm_shim.so \
            src/drm-shim/libnouveau_noop_drm_shim.so || return 1
    } >>"$work/log" 2>&1
    mkdir "$work/shims"
    cp "$build/src/intel/tools/libintel_noop_drm_shim.so" "$build/src/drm-shim/libnouveau_noop_drm_shim.so" \
        "$work/shims/"
}

# take_shim WORK OUT NAME
take_shim() {
    local code=0
    build_shims "$1" || code=$?
    [ "$code" = 0 ] || { echo "Mesa's shims could not be built"; return "$code"; }
    cp "$1/shims/lib$3_noop_drm_shim.so" "$2/shim.so"
}

unpack_anv() { take_driver "$1" "$2" libvulkan_intel.so 'intel_icd*.json' && take_shim "$1" "$2" intel; }

# unpack_suite WORK OUT SUITE LIBRARY MANIFEST [PACKAGE]: unpack a later suite's driver and its libraries.
# The libraries include the suite's libc, whose ld.so starts programs.
# PACKAGE's program of the same name is unpacked too.
unpack_suite() {
    local work=$1 out=$2 suite=$3 library=$4 manifest=$5 program=${6:-} own=$1/$3
    local uri codename found="" packages lib dirs name path
    [ "$(. /etc/os-release && echo "$ID")" = debian ] || { echo "it is taken from Debian's $suite"; return 1; }
    mkdir -p "$own"
    unset APT_CONFIG
    while read -r uri codename; do
        if (private_apt "$own" "$uri" "$suite"); then found=yes && break; fi
    done < <(mirrors)
    [ "$found" ] || { echo "no mirror answers with $suite"; return 2; }
    export APT_CONFIG=$own/apt.conf
    : >"$own/status"  # nothing is installed yet
    # shellcheck disable=SC2086  # optional
    packages=$(apt-get -o Dir::State::status="$own/status" install --no-install-recommends --print-uris \
        mesa-vulkan-drivers $program libc6 2>>"$own/log" | sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p")
    # shellcheck disable=SC2086  # list
    fetch "$own" $packages || { echo "its packages could not be downloaded"; return 2; }
    lib=$(find "$own/root/usr/lib" -name "$library" | head -n 1)
    [ -n "$lib" ] || { echo "mesa-vulkan-drivers of $suite holds no $library"; return 1; }
    cp "$lib" "$out/"
    cp -L "$(find "$own/root/usr/lib" -name 'ld-linux*.so.*' | head -n 1)" "$out/ld.so"
    chmod 755 "$out/ld.so"
    dirs=$(find "$own/root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
    [ -z "$program" ] || cp "$own/root/usr/bin/$program" "$out/"
    for path in "$lib" ${program:+"$out/$program"}; do
        "$out/ld.so" --library-path "$dirs" --list "$path" | awk -v w="$own/" 'index($3, w) == 1 { print $1, $3 }'
    done | sort -u | while read -r name path; do cp -L "$path" "$out/$name"; done
    # shellcheck disable=SC2086  # pattern
    cp "$(find "$own/root/usr/share/vulkan" -name $manifest | head -n 1)" "$out/package.json"
    apt-cache policy mesa-vulkan-drivers | awk '$1 == "Candidate:" { print $2 }' >"$out/version"
}

unpack_nvk() {
    take_shim "$1" "$2" nouveau || return $?
    # tools/studies/llama_cpp_kernels.py needs a glslc with matrix units.
    unpack_suite "$1" "$2" "$nvk_suite" libvulkan_nouveau.so 'nouveau_icd*.json' glslc
}

unpack_matrix_units() { unpack_suite "$1" "$2" "$matrix_units_suite" libvulkan_lvp.so 'lvp_icd*.json'; }

compiler_packages() {
    local missing=() package
    for package in bison flex libdrm-dev libelf-dev zlib1g-dev libexpat1-dev pkg-config gcc g++ xz-utils; do
        installed "$package" || missing+=("$package")
    done
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=("$python-venv")
    if [ ${#missing[@]} -gt 0 ]; then install_packages "${missing[@]}"; fi
}

unpack_compilers() {
    local name
    for name in anv nvk; do
        [ -f "$driver_dir/$name/shim.so" ] || { compiler_packages && break; }
    done
    unpack_drivers radv anv nvk matrix_units
}
