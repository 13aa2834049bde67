# Unpacks a newer glslang into .glslang/ if the system's glslang lacks GL_KHR_cooperative_matrix.
# spirv-val and the libc that both programs need are unpacked too, so the system's libc may be older.
# vkbackend/shaderlib.py starts both programs with that libc's loader.
# setup.sh sources this file after drivers.sh, whose function private_apt is used here.

glslang_dir=$root/.glslang
glslang_suite=trixie  # the first Debian release with glslang 15

glslang_major() { "$@" --version 2>/dev/null | sed -n 's/^Glslang Version: \([0-9]*:\)\?\([0-9]*\)\..*/\2/p'; }

unpack_glslang() {
    local major work uri codename found="" lib name
    major=$(glslang_major glslangValidator) || true
    [ "${major:-0}" -ge 13 ] && return 0
    [ -x "$glslang_dir/glslang" ] && return 0
    # If glslang was unavailable, try again after a day.
    [ -n "$(find "$glslang_dir" -maxdepth 1 -name missing -mmin -1440 2>/dev/null)" ] && return 0
    [ "$(. /etc/os-release && echo "$ID")" = debian ] || return 0
    step "unpacking a newer glslang into .glslang/ (for the shaders of matrix units)"
    mkdir -p "$glslang_dir"
    work=$(mktemp -d "$glslang_dir/work.XXXXXX")
    while read -r uri codename; do
        if (private_apt "$work" "$uri" "$glslang_suite"); then found=yes && break; fi
    done < <(mirrors)
    if [ -n "$found" ] &&
        (export APT_CONFIG=$work/apt.conf && fetch "$work" glslang-tools spirv-tools libc6 libstdc++6 libgcc-s1); then
        rm -rf "$glslang_dir/lib" && mkdir -p "$glslang_dir/lib"
        lib=$(dirname "$(find "$work/root/usr/lib" -name libc.so.6 | head -n 1)")
        for name in "$lib"/ld-linux* "$lib"/lib{c,m,stdc++,gcc_s}.so.[0-9]*; do
            [ -L "$name" ] || [ -n "${name##*libstdc++.so.6.*}" ] || continue
            cp -L "$name" "$glslang_dir/lib/"
        done
        cp "$work/root/usr/bin/spirv-val" "$glslang_dir/"
        cp "$work/root/usr/bin/glslang" "$glslang_dir/glslang.new"
        # Move this file last, because later runs only check that it exists.
        mv "$glslang_dir/glslang.new" "$glslang_dir/glslang"
    else
        touch "$glslang_dir/missing"
        step "left out the newer glslang: no mirror answers with $glslang_suite; matrix units stay unused"
    fi
    rm -rf "$work"
}
