# Functions that unpack Debian 13 for 64-bit ARM and QEMU into .aarch64/, to run Python and its tests there on x86-64.
# setup.sh sources this file after drivers.sh, whose functions private_apt, mirrors and fetch are used here.
# Nothing is installed: qemu-aarch64 runs one program, root/ has Debian's packages, lib/ has the wheels of all
# dependencies and links to this checkout, bin/python starts that Python, and shims/ has libraries that simulate
# kernel drivers of GPUs in ARM machines. Without a kernel driver, Mesa's compilers for these GPUs do not run
# (tools/measure/compilers.py).

driver_dir=$root/.drivers
arm_dir=$root/.aarch64
arm_suite=trixie
arm_python=3.13
arm_stamp=2  # raised with every change to this file that needs a new set-up
arm_packages=(mesa-vulkan-drivers libvulkan1 python3 libstdc++6 libgomp1)
arm_site=$arm_dir/lib/python$arm_python/site-packages

# unpack_qemu WORK URI: unpack QEMU's program for one architecture; its package holds all others, too.
unpack_qemu() {
    local work=$1/qemu
    mkdir -p "$work"
    (private_apt "$work" "$2" "$arm_suite") || return 1
    (cd "$work" && APT_CONFIG=$work/apt.conf apt-get download "qemu-user/$arm_suite") >>"$1/log" 2>&1 || return 1
    dpkg-deb --fsys-tarfile "$work"/qemu-user_*.deb | tar -x -C "$work" ./usr/bin/qemu-aarch64 || return 1
    mv "$work/usr/bin/qemu-aarch64" "$arm_dir/qemu-aarch64"
}

# unpack_arm_root WORK: unpack QEMU and Debian's packages for ARM, with the Mesa of backports.
unpack_arm_root() {
    local work=$1 uri codename found="" packages manifest name
    while read -r uri codename; do
        if (private_apt "$work" "$uri" "$arm_suite" arm64); then found=yes && break; fi
    done < <(mirrors)
    [ "$found" ] || { echo "no mirror answers with $arm_suite for arm64" && return 1; }
    unpack_qemu "$work" "$uri" || { echo "QEMU could not be downloaded" && return 1; }
    export APT_CONFIG=$work/apt.conf
    : >"$work/status"  # nothing is installed yet
    packages=$(apt-get -o Dir::State::status="$work/status" install --no-install-recommends --print-uris \
        "${arm_packages[@]}" 2>>"$work/log" | sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p")
    # shellcheck disable=SC2086  # list
    fetch "$work" $packages || { echo "packages could not be downloaded" && return 1; }
    apt-cache policy mesa-vulkan-drivers | awk '$1 == "Candidate:" { print $2 }' >"$work/root/mesa-version"
    unset APT_CONFIG
    # Debian's packages expect these links.
    for name in bin lib sbin; do [ -e "$work/root/$name" ] || ln -s "usr/$name" "$work/root/$name"; done
    rm -rf "$arm_dir/root" && mv "$work/root" "$arm_dir/root"
    for manifest in "$arm_dir"/root/usr/share/vulkan/icd.d/*.json; do
        icd_json "$manifest" "$(find "$arm_dir/root/usr/lib" -name "$("$python" -c \
            'import json, sys; print(json.load(open(sys.argv[1]))["ICD"]["library_path"].rpartition("/")[2])' \
            "$manifest")")" >"$manifest.new"
        mv "$manifest.new" "$manifest"
    done
}

# unpack_arm_wheels: install the wheels of all dependencies. pip runs here, and takes files for ARM.
unpack_arm_wheels() {
    local requirements platforms=() glibc
    mapfile -t requirements < <("$python" - "$root/pyproject.toml" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
other = ("vkbackend", "ruff", "mypy")  # run on x86-64
wanted = project["dependencies"] + [w for name in ("serve", "hosts", "grammar", "test") for w in extras[name]]
print(*dict.fromkeys(w for w in wanted if not w.startswith(other)), sep="\n")
PY
    )
    for glibc in {41..17}; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
    rm -rf "$arm_dir/lib"
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile --ignore-installed \
        "${platforms[@]}" --platform manylinux2014_aarch64 --python-version "$arm_python" --only-binary :all: \
        --target "$arm_site" "${requirements[@]}"
}

# unpack_v3dv WORK: replace the driver for Raspberry Pis by Debian's own version, which the shim fits.
unpack_v3dv() {
    local package manifest=usr/share/vulkan/icd.d/broadcom_icd.json name=libvulkan_broadcom.so library
    (cd "$1" && APT_CONFIG=$1/apt.conf apt-get download "mesa-vulkan-drivers/$arm_suite") || return 1
    package=$(echo "$1"/mesa-vulkan-drivers_*.deb)
    library=$(find "$arm_dir/root/usr/lib" -name $name)
    dpkg-deb --fsys-tarfile "$package" | tar -x -O "./usr/lib/aarch64-linux-gnu/$name" >"$library" || return 1
    dpkg-deb --fsys-tarfile "$package" | tar -x -O "./$manifest" >"$1/v3dv.json" || return 1
    icd_json "$1/v3dv.json" "$library" >"$arm_dir/root/$manifest" || return 1
    dpkg-deb --field "$package" Version >"$arm_dir/root/v3dv-version"
}

# fit_shims WORK MESA: change the shims of Mesa's source to the kernel interfaces of the drivers here.
fit_shims() {
    local work=$1 mesa=$2 headers=$1/headers
    # The headers of Debian's latest kernel have the interfaces for GPUs of Apple and Imagination.
    (cd "$work" && APT_CONFIG=$work/apt.conf apt-get download linux-libc-dev) || return 1
    mkdir -p "$headers" && dpkg-deb --fsys-tarfile "$work"/linux-libc-dev_*.deb | tar -x -C "$headers" || return 1
    cp "$headers"/usr/include/drm/{asahi,pvr}_drm.h "$mesa/include/drm-uapi/" || return 1
    # The shims free a buffer after two threads looked it up at once.
    sed -i -e 's/p_atomic_dec_return(&bo->refcount) == 0/p_atomic_dec_return(\&bo->refcount) != 0/' \
        -e 's/^   bo->size = size;/&\n   bo->refcount = 1;/' "$mesa/src/drm-shim/device.c"
    # Ioctl 0x0d, DRM_MSM_VM_BIND, is newer than the shim; a driver that may set parameters uses it.
    sed -i 's/^   \[DRM_MSM_SET_PARAM\] = msm_ioctl_noop,/&\n   [0x0d] = msm_ioctl_noop,/' \
        "$mesa/src/freedreno/drm-shim/freedreno_noop.c"
    # The driver V3DV requires submissions that wait for several semaphores. V3D_VERSION=71 is a Raspberry Pi 5.
    sed -i -e 's/^        case DRM_V3D_PARAM_SUPPORTS_TFU:/        case DRM_V3D_PARAM_SUPPORTS_MULTISYNC_EXT:\n&/' \
        -e 's/^        switch (gp->param) {/        const char *version = getenv("V3D_VERSION");\n&/' \
        -e 's/v3d42_reg_map\[gp->param\];/(version \&\& atoi(version) == 71 ? v3d71 : v3d42_reg_map)[gp->param];/' \
        -e '/static const uint32_t v3d42_reg_map/i static const uint32_t v3d71[] = {\
                [DRM_V3D_PARAM_V3D_HUB_IDENT3] = 0x00000700,\
                [DRM_V3D_PARAM_V3D_CORE0_IDENT0] = 0x07443356,\
                [DRM_V3D_PARAM_V3D_CORE0_IDENT1] = 0x81001431,\
                [DRM_V3D_PARAM_V3D_CORE0_IDENT2] = 0x40078121};' \
        "$mesa/src/broadcom/drm-shim/v3d_noop.c"
    # Linux 6.16 has another interface for Apple's GPUs than the trees before.
    sed -i -e 's|"../lib/unstable_asahi_drm.h"|"drm-uapi/asahi_drm.h"|' \
        -e '/unstable_uabi_version\|vm_usc_\|vm_page_size/d' -e 's/DRM_ASAHI_GEM_BIND]/DRM_ASAHI_VM_BIND]/' \
        -e 's/\.vm_user_start = .*/.command_timestamp_frequency_hz = 1000000000,\n   .vm_start = 0x4000,/' \
        -e 's/\.vm_user_end = .*/.vm_end = 1ull << 39,/' "$mesa/src/asahi/drm-shim/asahi_noop.c"
    cp "$root/tools/measure/powervr_noop.c" "$mesa/src/"
}

# build_arm_shims WORK: compile the shims from Mesa's source package, without the rest of Mesa, in a few seconds.
build_arm_shims() {
    local work=$1 mesa=$1/mesa objects=$1/objects name file
    local compile=(aarch64-linux-gnu-gcc -O1 -w -fPIC -fvisibility=hidden -ffunction-sections -D_GNU_SOURCE
        -DHAVE_PTHREAD -DHAVE_ENDIAN_H -DHAVE_STRUCT_TIMESPEC -DHAVE___BUILTIN_CLZ -DHAVE___BUILTIN_FFS
        -DHAVE_TIMESPEC_GET -DHAVE_MEMFD_CREATE -DHAVE_SECURE_GETENV -DUTIL_ARCH_LITTLE_ENDIAN=1
        -DUTIL_ARCH_BIG_ENDIAN=0 "-I$mesa/include" "-I$mesa/src" "-I$mesa/src/util" "-I$mesa/include/drm-uapi")
    # Mirrors do not always have the source of a backport. Shims of Debian's own version serve later drivers.
    sed -n 's/^deb /deb-src /p' "$work/sources.list" | grep -v -- -backports >>"$work/sources.list"
    APT_CONFIG=$work/apt.conf apt-get update || return 1
    (cd "$work" && APT_CONFIG=$work/apt.conf apt-get source --download-only --tar-only mesa) || return 1
    mkdir -p "$mesa" "$objects" "$arm_dir/shims"
    tar -x -C "$mesa" --strip-components=1 -f "$work"/mesa_*.orig.tar.* || return 1
    fit_shims "$work" "$mesa" || return 1
    for file in drm-shim/{device,drm_shim} util/{vma,hash_table,ralloc,set,anon_file,u_debug,os_misc,os_file,futex} \
        util/{simple_mtx,log,bitscan,u_call_once,u_process,u_printf}; do
        "${compile[@]}" -c -o "$objects/${file##*/}.o" "$mesa/src/$file.c" || return 1
    done
    while read -r name file; do
        "${compile[@]}" -shared -Wl,-z,defs -Wl,--gc-sections -o "$arm_dir/shims/$name.so" \
            "$mesa/src/${file}_noop.c" "$objects"/*.o || return 1
    done <<'NAMES'
turnip freedreno/drm-shim/freedreno
panvk panfrost/drm-shim/panfrost
v3dv broadcom/drm-shim/v3d
honeykrisp asahi/drm-shim/asahi
powervr powervr
NAMES
    unpack_v3dv "$work"
}

# link_arm_site: link this checkout as an installed package, and write the program that starts ARM's Python.
# With pyvenv.cfg this Python is a virtual environment, which also -I and -E keep. -P leaves out the folder vkbackend
# of a checkout.
link_arm_site() {
    local site=$arm_site/vkbackend source
    rm -rf "$site" && mkdir -p "$site" "$arm_dir/bin"
    for source in "$root"/vkbackend/* "$root"/{meta,models,shaders,tools}; do
        case ${source##*/} in
            __pycache__) ;;
            *) ln -s "$source" "$site/${source##*/}" ;;
        esac
    done
    printf 'home = %s/root/usr/bin\nversion = %s\n' "$arm_dir" "$arm_python" >"$arm_dir/pyvenv.cfg"
    cat >"$arm_dir/bin/python" <<SH
#!/bin/sh
exec "$arm_dir/qemu-aarch64" -L "$arm_dir/root" -0 "$arm_dir/bin/python" "$arm_dir/root/usr/bin/python$arm_python" -P "\$@"
SH
    chmod 755 "$arm_dir/bin/python"
}

unpack_aarch64() {
    local work reason
    [ "$(uname -m)" = x86_64 ] || die "QEMU is set up here for x86-64 only" "on ARM, use the other options of this script"
    [ -x "$venv/bin/python" ] || die "no .venv here" "run: bash tools/setup.sh --test"
    command -v apt-get dpkg-deb >/dev/null || die "no apt here" "use Debian 12 or later"
    mkdir -p "$arm_dir"
    if [ "$(cat "$arm_dir/stamp" 2>/dev/null)" != "$arm_stamp $root" ]; then
        rm -f "$arm_dir/stamp"
        work=$(mktemp -d "$arm_dir/work.XXXXXX")
        step "unpacking QEMU and Debian $arm_suite for arm64 into .aarch64/ (150 MB of downloads)"
        reason=$(unpack_arm_root "$work") || die "unpacking Debian for arm64: $reason" "see $work/log, then run this again"
        installed gcc-aarch64-linux-gnu || install_packages gcc-aarch64-linux-gnu libc6-dev-arm64-cross
        attempt "building the shims of the kernel drivers of five GPUs" \
            "check the network, then run this again" build_arm_shims "$work"
        rm -rf "$work"
        attempt "unpacking the wheels of all dependencies (90 MB of downloads)" \
            "check the network and pip's configuration, then run this again" unpack_arm_wheels
        echo "$arm_stamp $root" >"$arm_dir/stamp"
    fi
    link_arm_site
    step "ready: .aarch64 ($("$arm_dir/bin/python" --version), Mesa $(cat "$arm_dir/root/mesa-version"))"
}

# arm_tests ARGUMENT...: run pytest on ARM's Python and lavapipe.
arm_tests() {
    local icd=$arm_dir/root/usr/share/vulkan/icd.d/lvp_icd.json tests=(tests/meta tests/vkbackend)
    [ $# = 0 ] || tests=("$@")
    VKBACKEND_TEST_DRIVERS=lavapipe=$icd VK_DRIVER_FILES=$icd VK_ICD_FILENAMES=$icd \
        "$arm_dir/bin/python" -m pytest -p no:cacheprovider -o timeout=1800 -rfE "${tests[@]}" </dev/null
}
