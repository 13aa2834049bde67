# Functions that unpack Vulkan drivers into .drivers/: software drivers for tests, and RADV.
# setup.sh sources this file, sets root and python, and opens descriptor 3 as the caller's stdout.
# The system's apt configuration supplies the mirror, proxies and keys.
# Package lists and archives are stored in .drivers/, so nothing else changes on the system.
# unpack_drivers prints "NAME PATH-OF-ICD-JSON" on stdout for each driver that runs.
# All other output is on stderr.

driver_dir=$root/.drivers
missing_retry_minutes=1440  # An unavailable driver is tried again after a day.


# mirrors: print "URI CODENAME" of each mirror in apt's sources that has this release's suite.
# Addresses that end in /debian or /ubuntu come first.
mirrors() {
    local codename
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    apt-get -o Debug::NoLocking=true update --print-uris 2>/dev/null |
        sed -n "s|^'\(.*\)/dists/$codename/InRelease'.*|\1 $codename|p" | awk '
            !seen[$1]++ { print ($1 ~ /\/(debian|ubuntu)\/?$/ ? 0 : 1), $0 }' | sort -s -k1,1n | cut -d' ' -f2-
}

# private_apt WORK URI CODENAME [ARCHITECTURE]: write an apt configuration for the mirror URI into WORK.
# The configuration includes the update and backport suites, which may have a newer Mesa.
# Fail if the mirror has no package mesa-vulkan-drivers.
private_apt() {
    local work=$1 uri=$2 codename=$3 architecture=${4:-} id keyring="" suite component=main
    id=$(. /etc/os-release && echo "$ID")
    [ -r "/usr/share/keyrings/$id-archive-keyring.gpg" ] &&
        keyring="[signed-by=/usr/share/keyrings/$id-archive-keyring.gpg] "
    [ "$id" = ubuntu ] && component="main universe"
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/parts"
    for suite in "$codename" "$codename-updates" "$codename-backports"; do
        echo "deb $keyring$uri $suite $component"
    done >"$work/sources.list"
    # Release files assign priority 100 to backports, so apt would take dependencies from the older suite.
    printf 'Package: *\nPin: release n=%s-backports\nPin-Priority: 500\n' "$codename" >"$work/preferences"
    {
        apt-config dump | grep -v 'Invoke'  # apt's hooks would change the system's package cache
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
        # The Valid-Until date of an archived snapshot has always passed.
        [[ $uri =~ [0-9]{8}T[0-9]{6}Z ]] && echo 'Acquire::Check-Valid-Until "false";'
        [ -z "$architecture" ] ||
            printf '#clear APT::Architectures;\nAPT::Architecture "%s";\nAPT::Architectures { "%s"; };\n' \
                "$architecture" "$architecture"
    } >"$work/apt.conf"
    export APT_CONFIG=$work/apt.conf
    # The update also fails if the mirror lacks one suite, so the next line checks for the package.
    apt-get update >>"$work/log" 2>&1 || true
    [ -n "$(apt-cache madison mesa-vulkan-drivers 2>/dev/null)" ]
}

# fetch WORK PACKAGE...: download the packages and unpack them into WORK/root.
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

# unpack_NAME WORK OUT: put a driver's libraries and its manifest (package.json) into OUT.
# If the driver is unavailable, print the reason and return 1.
# If a download failed, print the reason and return 2, so that the next run tries again.

# icd_json MANIFEST LIBRARY: print the package's manifest with the absolute path LIBRARY.
icd_json() {
    "$python" - "$1" "$2" <<'PY'
import json, sys
manifest = json.load(open(sys.argv[1]))
manifest["ICD"]["library_path"] = sys.argv[2]
print(json.dumps(manifest, indent=4))
PY
}

# take_driver WORK OUT LIBRARY MANIFEST: put a driver of mesa-vulkan-drivers into OUT.
# Missing or outdated dependencies are unpacked into OUT too.
# patchelf sets the run path to $ORIGIN, so the driver loads these dependencies without LD_LIBRARY_PATH.
take_driver() {
    local work=$1 out=$2 library=$3 manifest=$4 version packages lib dirs name path
    version=$(apt-cache policy mesa-vulkan-drivers | awk '$1 == "Candidate:" { print $2 }')
    if [ ! -e "$work/fetched" ]; then
        # Fetch only the driver's dependencies. apt would also upgrade an installed Mesa's OpenGL packages.
        apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
            --no-enhances mesa-vulkan-drivers 2>>"$work/log" | grep -E '^[a-z0-9]' | sort -u >"$work/depends"
        packages=$(apt-get install -y --reinstall --no-install-recommends --print-uris mesa-vulkan-drivers \
            2>>"$work/log" | sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p" | sort -u | comm -12 - "$work/depends")
        [ -n "$packages" ] || { echo "apt finds no way to install mesa-vulkan-drivers $version"; return 1; }
        # shellcheck disable=SC2086  # list
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
    # shellcheck disable=SC2086  # pattern
    cp "$(find "$work/root/usr/share/vulkan" -name $manifest | head -n 1)" "$out/package.json"
    echo "$version" >"$out/version"
}

unpack_lavapipe() { take_driver "$1" "$2" libvulkan_lvp.so 'lvp_icd*.json'; }

# RADV, AMD's driver, is in lavapipe's package.
# Without an AMD GPU, RADV only compiles (tools/measure/compilers.py), so no test runs on RADV.
unpack_radv() { take_driver "$1" "$2" libvulkan_radeon.so 'radeon_icd*.json'; }

# SwiftShader is in Debian's chromium package, and since version 150 in chromium-common.
unpack_swiftshader() {
    local work=$1 out=$2 package version
    for package in chromium-common chromium; do
        # Request the archive's newest version, because the archive may lack an installed security update.
        version=$(apt-cache madison "$package" 2>/dev/null | awk 'NR == 1 { print $3 }')
        [ -n "$version" ] || continue
        rm -rf "$work/debs" && mkdir -p "$work/debs"
        (cd "$work/debs" && apt-get download "$package=$version") >>"$work/log" 2>&1 ||
            { echo "$package $version could not be downloaded"; return 2; }
        # Only these two files of the package's 300 MB are extracted.
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


# libraries_of FOLDER LIBRARY: list the library's dependencies with FOLDER's ld.so, or else with ldd.
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
    rm -rf "$driver_dir"/work.*  # from an interrupted run
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
            # A manifest needs an absolute path, and the checkout may have moved since the last run.
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
