# Unpacks Vulkan drivers into .drivers/: software drivers for tests, and RADV, which only compiles. Sourced by
# setup.sh, which sets root and python and opens descriptor 3 as the caller's stdout. apt supplies its own
# configuration (mirror, proxies, keys). Nothing outside .drivers/ is changed: package lists, archives and
# pins are in a work folder there, which is removed at the end. unpack_drivers prints "NAME PATH-OF-ICD-JSON"
# on stdout for each driver that runs; everything else goes to stderr.

driver_dir=$root/.drivers
missing_retry_minutes=1440  # try unavailable drivers again after a day, not on every run


# Prints candidate mirrors "URI CODENAME" from apt's sources: mirrors with this release's suite; conventional
# addresses (…/debian, …/ubuntu) come first. Needs no package lists.
mirrors() {
    local codename
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    apt-get -o Debug::NoLocking=true update --print-uris 2>/dev/null |
        sed -n "s|^'\(.*\)/dists/$codename/InRelease'.*|\1 $codename|p" | awk '
            !seen[$1]++ { print ($1 ~ /\/(debian|ubuntu)\/?$/ ? 0 : 1), $0 }' | sort -s -k1,1n | cut -d' ' -f2-
}

# private_apt WORK URI CODENAME: an apt configuration in WORK for URI, with the suites that may have a newer
# Mesa; fails if the mirror lacks mesa-vulkan-drivers.
private_apt() {
    local work=$1 uri=$2 codename=$3 id keyring="" suite component=main
    id=$(. /etc/os-release && echo "$ID")
    [ -r "/usr/share/keyrings/$id-archive-keyring.gpg" ] &&
        keyring="[signed-by=/usr/share/keyrings/$id-archive-keyring.gpg] "
    [ "$id" = ubuntu ] && component="main universe"
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts"
    for suite in "$codename" "$codename-updates" "$codename-backports"; do
        echo "deb $keyring$uri $suite $component"
    done >"$work/sources.list"
    # Release files pin backports to 100, so dependencies would be taken from the old suite; here all suites
    # have equal priority.
    printf 'Package: *\nPin: release n=%s-backports\nPin-Priority: 500\n' "$codename" >"$work/preferences"
    {
        apt-config dump | grep -v 'Invoke'  # hooks would change the system's cache
        cat <<CONF
Dir::Etc::main "/dev/null";
Dir::Etc::parts "$work/parts";
Dir::Etc::sourcelist "$work/sources.list";
Dir::Etc::sourceparts "$work/parts";
Dir::Etc::preferences "$work/preferences";
Dir::Etc::preferencesparts "$work/parts";
Dir::State::lists "$work/lists";
Dir::Cache "$work/cache";
Dir::Log "$work";
Debug::NoLocking "true";
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "2";
CONF
        # A dated archive is always past its Valid-Until.
        [[ $uri =~ [0-9]{8}T[0-9]{6}Z ]] && echo 'Acquire::Check-Valid-Until "false";'
    } >"$work/apt.conf"
    export APT_CONFIG=$work/apt.conf
    # if the mirror lacks a suite, only that suite fails; checked below
    apt-get update >>"$work/log" 2>&1 || true
    [ -n "$(apt-cache madison mesa-vulkan-drivers 2>/dev/null)" ]
}

# fetch WORK PACKAGE...: download and unpack into WORK/root.
fetch() {
    local work=$1 deb
    shift
    rm -rf "$work/debs" && mkdir -p "$work/debs" "$work/root"
    (cd "$work/debs" && apt-get download "$@") >>"$work/log" 2>&1 || return 1
    for deb in "$work"/debs/*.deb; do
        dpkg-deb -x "$deb" "$work/root" >>"$work/log" 2>&1 || return 1
    done
    rm -rf "$work/debs"
}

# Drivers. Each function fills OUT with the manifest (package.json) and libraries, or prints a reason and
# returns 1 (unavailable) or 2 (failed download: retry on the next run).

# icd_json MANIFEST LIBRARY: the package's manifest with LIBRARY's absolute path.
icd_json() {
    "$python" - "$1" "$2" <<'PY'
import json, sys
manifest = json.load(open(sys.argv[1]))
manifest["ICD"]["library_path"] = sys.argv[2]
print(json.dumps(manifest, indent=4))
PY
}

# take_driver WORK OUT LIBRARY MANIFEST: a driver of mesa-vulkan-drivers; WORK may already contain other
# drivers. Dependencies that the system lacks or has in too old a version are unpacked next to the driver. A
# run path of $ORIGIN (set by patchelf, which is unpacked too) makes the driver load them, so no
# LD_LIBRARY_PATH is needed.
take_driver() {
    local work=$1 out=$2 library=$3 manifest=$4 version packages lib dirs name path
    version=$(apt-cache policy mesa-vulkan-drivers | awk '$1 == "Candidate:" { print $2 }')
    if [ ! -e "$work/fetched" ]; then
        # The packages that apt would install or upgrade, but only the driver's dependencies, because apt's
        # resolver would also upgrade the OpenGL packages of an installed Mesa.
        apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
            --no-enhances mesa-vulkan-drivers 2>>"$work/log" | grep -E '^[a-z0-9]' | sort -u >"$work/depends"
        packages=$(apt-get install -y --reinstall --no-install-recommends --print-uris mesa-vulkan-drivers \
            2>>"$work/log" | sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p" | sort -u | comm -12 - "$work/depends")
        [ -n "$packages" ] || { echo "apt finds no way to install mesa-vulkan-drivers $version"; return 1; }
        # shellcheck disable=SC2086  # a list of names
        fetch "$work" $packages patchelf || { echo "its packages could not be downloaded"; return 2; }
        touch "$work/fetched"
    fi
    lib=$(find "$work/root/usr/lib" -name "$library" | head -n 1)
    [ -n "$lib" ] || { echo "mesa-vulkan-drivers $version holds no $library"; return 1; }
    cp "$lib" "$out/"
    dirs=$(find "$work/root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
    while read -r name path; do cp -L "$path" "$out/$name"; done < <(
        LD_LIBRARY_PATH=$dirs ldd "$lib" | awk -v w="$work/" 'index($3, w) == 1 { print $1, $3 }')
    for path in "$out"/*.so*; do
        chmod 644 "$path"
        "$work/root/usr/bin/patchelf" --set-rpath '$ORIGIN' "$path" 2>>"$work/log" ||
            { echo "patchelf failed on ${path##*/}"; return 1; }
    done
    # shellcheck disable=SC2086  # a pattern
    cp "$(find "$work/root/usr/share/vulkan" -name $manifest | head -n 1)" "$out/package.json"
    echo "$version" >"$out/version"
}

unpack_lavapipe() { take_driver "$1" "$2" libvulkan_lvp.so 'lvp_icd*.json'; }

# RADV, AMD's driver, from lavapipe's package. Without an AMD GPU it can only compile, so no test runs on it
# (tools/measure/compilers.py).
unpack_radv() { take_driver "$1" "$2" libvulkan_radeon.so 'radeon_icd*.json'; }

# SwiftShader has no package: Debian's chromium contains it (chromium-common since 150).
unpack_swiftshader() {
    local work=$1 out=$2 package version
    for package in chromium-common chromium; do
        # The archive's newest version; an installed chromium may be a security update that cannot be
        # downloaded.
        version=$(apt-cache madison "$package" 2>/dev/null | awk 'NR == 1 { print $3 }')
        [ -n "$version" ] || continue
        rm -rf "$work/debs" && mkdir -p "$work/debs"
        (cd "$work/debs" && apt-get download "$package=$version") >>"$work/log" 2>&1 ||
            { echo "$package $version could not be downloaded"; return 2; }
        # Only two files of the 300 MB are extracted.
        dpkg-deb --fsys-tarfile "$work"/debs/*.deb | tar -x -C "$out" --strip-components=4 --wildcards \
            './usr/lib/*/libvk_swiftshader.so' './usr/lib/*/vk_swiftshader_icd.json' 2>>"$work/log" || true
        rm -rf "$work/debs"
        if [ -f "$out/libvk_swiftshader.so" ] && [ -f "$out/vk_swiftshader_icd.json" ]; then
            mv "$out/vk_swiftshader_icd.json" "$out/package.json"
            echo "$version" >"$out/version"
            return 0
        fi
    done
    echo "no chromium package of this distribution holds libvk_swiftshader.so"
    return 1
}


# libraries_of FOLDER LIBRARY: the library's dependencies by ldd, with FOLDER's own loader if it has one.
libraries_of() {
    if [ -x "$1/ld.so" ]; then "$1/ld.so" --library-path "$1" --list "$1/$2"; else ldd "$1/$2"; fi
}

# unpack_driver NAME LIBRARY WORK: install the driver, or write the reason to NAME.missing.
unpack_driver() {
    local name=$1 library=$2 work=$3 reason="" unresolved code=0
    local out=$work/$name
    mkdir -p "$out"
    reason=$("unpack_$name" "$work" "$out") || code=$?
    if [ "$code" = 0 ]; then
        [ -s "$out/package.json" ] || { code=1 && reason="its package holds no manifest"; }
        unresolved=$(libraries_of "$out" "$library" | awk '/not found/ { print $1 }' | paste -sd' ')
        [ -z "$unresolved" ] || { code=1 && reason="$library needs what is not here: $unresolved"; }
    fi
    if [ "$code" != 0 ]; then
        echo "$reason" >"$driver_dir/$name.missing"
        [ "$code" = 1 ] || touch -d '2 days ago' "$driver_dir/$name.missing"
        return
    fi
    rm -rf "${driver_dir:?}/$name" "$driver_dir/$name.missing"
    mv "$out" "$driver_dir/$name"
    step "unpacked $name $(cat "$driver_dir/$name/version")"
}

unpack_drivers() {
    local -A library=([lavapipe]=libvulkan_lvp.so [swiftshader]=libvk_swiftshader.so
        [radv]=libvulkan_radeon.so [anv]=libvulkan_intel.so [nvk]=libvulkan_nouveau.so
        [matrix_units]=libvulkan_lvp.so)
    local wanted=() name work uri codename found=""
    mkdir -p "$driver_dir"
    rm -rf "$driver_dir"/work.*  # left by an interrupted run
    find "$driver_dir" -maxdepth 1 -name '*.missing' -mmin "+$missing_retry_minutes" -delete
    for name in "$@"; do
        [ -f "$driver_dir/$name/${library[$name]}" ] || [ -f "$driver_dir/$name.missing" ] || wanted+=("$name")
    done
    if [ ${#wanted[@]} -gt 0 ]; then
        work=$(mktemp -d "$driver_dir/work.XXXXXX")
        if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
            for name in "${wanted[@]}"; do echo "no apt on this system" >"$driver_dir/$name.missing"; done
        else
            while read -r uri codename; do
                step "drivers: reading the package lists of $uri (privately)"
                if (private_apt "$work" "$uri" "$codename"); then found=yes && break; fi
            done < <(mirrors)
            export APT_CONFIG=$work/apt.conf
            for name in "${wanted[@]}"; do
                if [ -z "$found" ]; then
                    echo "none of apt's mirrors answers with mesa-vulkan-drivers" >"$driver_dir/$name.missing"
                    touch -d '2 days ago' "$driver_dir/$name.missing"
                else
                    unpack_driver "$name" "${library[$name]}" "$work"
                fi
            done
            unset APT_CONFIG
        fi
        rm -rf "$work"
    fi
    for name in "$@"; do
        if [ -f "$driver_dir/$name.missing" ]; then
            step "left out $name: $(cat "$driver_dir/$name.missing")"
        else
            # Written on every run, because manifests need absolute paths and the folder may have moved.
            icd_json "$driver_dir/$name/package.json" "$driver_dir/$name/${library[$name]}" \
                >"$driver_dir/$name/icd.json.new"
            mv "$driver_dir/$name/icd.json.new" "$driver_dir/$name/icd.json"
            case $name in
                lavapipe | swiftshader) echo "$name $driver_dir/$name/icd.json" >&3 ;;
                matrix_units) step "$name $(cat "$driver_dir/$name/version"): a lavapipe with matrix units" ;;
                *) step "$name $(cat "$driver_dir/$name/version") compiles for GPUs that are not there" ;;
            esac
        fi
    done
}
