# What packages/NAME/build and packages/NAME/try share. Each sources it, as its first command after `set -eu`:
#
#     . "$(dirname "$0")/../common.sh"
#
# Its argument is the directory OUT. Afterwards there are $root, the sources; $out, OUT as an absolute path; $version;
# $repository; $SOURCE_DATE_EPOCH, the time of the commit; $processors, those that programs are built for, as the kernel
# names them: x86_64 and aarch64 from ./run package, otherwise this machine's alone; $made, a temporary directory, which
# is removed at the exit, after the processes in $pids have ended.
name=$(basename "$(cd "$(dirname "$0")" && pwd)")/$(basename "$0")
root=$(cd "$(dirname "$0")/../.." && pwd)

give_up() {
    echo "packages/$name: $*" >&2
    exit 1
}

[ $# = 1 ] || give_up "found $# arguments, wanted one: the directory for the packages"
mkdir -p "$1"
out=$(cd "$1" && pwd)
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml")
repository=$(sed -n 's/^repository = "\(.*\)"$/\1/p' "$root/HOME.toml")
[ -n "$version" ] && [ -n "$repository" ] || give_up "found no version in Cargo.toml, or no repository in HOME.toml"
processors=${PELTON_PROCESSORS:-$(uname -m)}
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 0)}"

# Users other than this one read the packages.
umask 022
pids=''
made=$(mktemp -d)
clean_up() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for pid in $pids; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$made"
}
trap clean_up EXIT
trap 'exit 1' HUP INT PIPE TERM

# need COMMAND...: ends the script if one is missing.
need() {
    for command in "$@"; do
        command -v "$command" >/dev/null 2>&1 || give_up "\`$command\` is missing: install it"
    done
}

# Exports PELTON_PREFIX, where libpelton is installed. Unless the caller has set it, installs a release build there.
need_libpelton() {
    if [ -z "${PELTON_PREFIX:-}" ]; then
        target=${CARGO_TARGET_DIR:-$root/target}
        (cd "$root" && cargo build --release --quiet -p pelton-capi && bindings/c/install "$target/installed" >/dev/null)
        PELTON_PREFIX=$(cd "$target/installed" && pwd)
    fi
    export PELTON_PREFIX
    [ -f "$PELTON_PREFIX/lib/libpelton.so" ] || give_up "found no lib/libpelton.so below PELTON_PREFIX=$PELTON_PREFIX"
}

# Sets zig: clang, lld and the symbols of each glibc, with what makes cargo use them. It also has the licences of C
# libraries.
need_zig() {
    need python3
    zig=${CARGO_TARGET_DIR:-$root/target}/zig
    # With hashes, as cargo and Go have them in their lock files: zig links what is released.
    wanted='cargo-zigbuild==0.24.1 --hash=sha256:238a1ab54a95053a4eadc34775c81f795a8ad75f80bfed63f3f445f518102375
ziglang==0.17.1 --hash=sha256:ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54'
    [ "$(cat "$zig/installed" 2>/dev/null)" != "$wanted" ] || return 0
    rm -rf "$zig"
    python3 -m venv "$zig" || give_up 'Python cannot make a virtual environment: on Debian it is in the package python3-venv'
    echo "$wanted" >"$zig/wanted"
    "$zig/bin/python3" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$zig/wanted"
    mv "$zig/wanted" "$zig/installed"
}

# binutils_for PROCESSOR: exports CROSS_COMPILE, what the names of binutils for that processor begin with.
binutils_for() {
    CROSS_COMPILE=''
    [ "$1" = "$(uname -m)" ] || CROSS_COMPILE=$1-linux-gnu-
    export CROSS_COMPILE
    need "${CROSS_COMPILE}objdump"
}

# needs_glibc FILE: prints the newest version of glibc that it needs, and ends the script if that is above $glibc.
needs_glibc() {
    newest=$("${CROSS_COMPILE}objdump" -T "$1" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
    [ "$(printf '%s\n' "$newest" "GLIBC_$glibc" | sort -V | tail -n 1)" = "GLIBC_$glibc" ] ||
        give_up "$(basename "$1") needs $newest, wanted nothing above GLIBC_$glibc: see objdump -T"
    echo "$newest"
}

# Rust's standard library for a target, by rustup if it is missing.
need_target() {
    ls "$(rustc --print sysroot)/lib/rustlib/$1/lib/"libstd-*.rlib >/dev/null 2>&1 || rustup --quiet target add "$1" ||
        give_up "Rust's standard library for $1 is missing: \`rustup target add $1\`"
}

# Sets base: the directory base/root has a new Debian of this release, with what users of the packages install. Made by
# debootstrap, as root, and kept below the target directory; programs run in an overlay of it.
need_debian() {
    need debootstrap
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    base=${CARGO_TARGET_DIR:-$root/target}/debian-$release
    wanted=nginx-light,libnginx-mod-http-lua,erlang-base,sbcl,python3,python3-venv,gcc,g++,libc6-dev,make,pkg-config,curl
    [ "$(cat "$base/installed" 2>/dev/null)" != "$wanted" ] || return 0
    rm -rf "$base"
    mkdir -p "$base"
    debootstrap --variant=minbase --include="$wanted" "$release" "$base/root" >"$base/log" 2>&1 ||
        give_up "debootstrap fails: $(tail -n 20 "$base/log")"
    echo "$wanted" >"$base/installed"
}

# Cargo builds without the paths of this machine, which messages of panics have otherwise.
without_paths() {
    export CARGO_ENCODED_RUSTFLAGS="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
}
# no_paths FILE: ends the script if FILE has such a path.
no_paths() {
    ! grep -aoF -m 1 -e "${CARGO_HOME:-$HOME/.cargo}/" -e "$root/" "$1" ||
        give_up "$(basename "$1") has paths of this machine: see above"
}

# static_programs PROGRAM CRATE MANUAL COMPLETE: for each processor the program without a shared library, installed in
# $package, as the archive $package.tar.gz. zig compiles C, and links with its musl. The example MANUAL writes the
# manual pages; the function COMPLETE adds to $made/$package what else it has.
static_programs() {
    need cargo
    need_zig
    without_paths
    cd "$root"
    target=${CARGO_TARGET_DIR:-$root/target}
    static_target "$(uname -m)" "$2" --example "$3"
    manual=$target/$triple/release/examples/$3
    for processor in $processors; do
        binutils_for "$processor"
        static_target "$processor" "$2" --bin "$1"
        package=$1-$version-$processor-linux-musl
        packages/install "$1" "$made/$package" "$target/$triple/release" "$manual" >/dev/null
        "$4"
        no_paths "$made/$package/bin/$1"
        echo "bin/$1: $(wc -c <"$made/$package/bin/$1") bytes"
        pack "$package"
    done
}
static_target() { # PROCESSOR CRATE WHAT...
    triple=$1-unknown-linux-musl
    need_target "$triple"
    crate=$2
    shift 2
    PATH=$zig/bin:$PATH cargo zigbuild --release --quiet --target "$triple" -p "$crate" "$@"
}

# licences_and_readme BINDING DIRECTORY: the licences, and the binding's README. Its links to files that DIRECTORY lacks
# become links into the repository.
licences_and_readme() {
    cp "$root/LICENSE-MIT" "$root/LICENSE-APACHE" "$2"
    sed -e "s|](\.\./\.\./|]($repository/blob/v$version/|g" -e "s|](\.\./|]($repository/blob/v$version/bindings/|g" \
        "$root/bindings/$1/README.md" >"$2/README.md"
    grep -oE '\]\([^):#]+\)' "$2/README.md" | sed 's/^](//; s/)$//' | while read -r link; do
        [ -e "$2/$link" ] || sed -i "s|]($link)|]($repository/blob/v$version/bindings/$1/$link)|" "$2/README.md"
    done
}

# pack NAME: the directory $made/NAME as $out/NAME.tar.gz. Equal files give an equal archive.
pack() {
    chmod -R u=rwX,go=rX "$made/$1"
    tar -C "$made" --sort=name --owner=0 --group=0 --numeric-owner \
        --mtime="@$SOURCE_DATE_EPOCH" -cf - "$1" |
        gzip -9n >"$out/$1.tar.gz.new"
    mv -f "$out/$1.tar.gz.new" "$out/$1.tar.gz"
    echo "$out/$1.tar.gz"
}

# has DIRECTORY FILE...: ends the script unless the directory has each of these files, with content.
has() {
    directory=$1
    shift
    for file in "$@"; do [ -s "$directory/$file" ] || give_up "the package has no $file"; done
}

# wait_for COMMAND...: until it succeeds, for half a minute at most.
wait_for() {
    for _ in $(seq 600); do
        "$@" && return
        sleep 0.05
    done
    give_up "not within half a minute: $*"
}
