# Sourced by the other scripts: makes .venv from uv.lock. The machine needs only Python 3.11 or newer.
#
#   . scripts/env.sh
#   make_environment          # everything, for tests and development
#   make_environment run      # only what the demo, `leasehold dev` and scripts/services need
#   exec "$venv/bin/python" ...
#
# Outside the checkout only two caches change: $XDG_CACHE_HOME/leasehold, which gets uv, and the cache of uv itself.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Prints the first Python >= 3.11: $UV_PYTHON, else one on the PATH.
find_python() {
    local candidate
    for candidate in "${UV_PYTHON:-}" python3.11 python3 python3.12 python3.13 python3.14 python; do
        [ -n "$candidate" ] || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        "$candidate" -c 'import sys; print(sys.executable)'
        return
    done
    fail "Leasehold needs Python 3.11 or newer, and there is none on the PATH.
On Debian 12 and newer or Ubuntu 24.04 and newer: apt-get install python3
Elsewhere install it from https://www.python.org/ or set UV_PYTHON to it."
}

# Prints the path of uv: on the PATH, else in the cache. If neither has uv, downloads it into the cache, by pip, or without
# pip by the standard library.
find_uv() {
    local python="$1" cache uv version scratch
    if command -v uv; then
        return
    fi
    version="$(sed -n 's/^uv==\([^ ]*\).*/\1/p' "$root/scripts/uv.txt")"
    cache="${LEASEHOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/leasehold}"
    uv="$cache/uv-$version"
    if [ ! -x "$uv" ]; then
        say "Fetching uv $version into $cache"
        mkdir -p "$cache"
        chmod go-w "$cache"
        scratch="$(mktemp -d "$cache/uv.XXXXXX")"
        if ! { "$python" -m pip --version && pip_install_uv "$python" "$scratch"; } >"$scratch/log" 2>&1; then
            "$python" -I "$root/scripts/fetch_uv.py" "$root/scripts/uv.txt" "$scratch/uv" ||
                { rm -rf "$scratch"; fail "uv $version could not be downloaded"; }
        fi
        mv -f "$scratch/uv" "$uv"
        rm -rf "$scratch"
    fi
    printf '%s\n' "$uv"
}

pip_install_uv() {
    "$1" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
        --target "$2/pip" -r "$root/scripts/uv.txt" && mv "$2/pip/bin/uv" "$2/uv"
}

# Prints the stamp of an environment: its profile, and a digest of the files that define it and of its place. Equal stamps:
# nothing to do. In a copy of the checkout the environment would run the code of the checkout that it was made in.
stamp_of() {
    printf '%s %s\n' "$1" "$(
        {
            cat "$root/uv.lock" "$root/pyproject.toml"
            (cd "$root" && pwd -P)
        } | sha256sum | cut -d' ' -f1
    )"
}

make_environment() {
    local profile="${1:-all}" present_stamp="" python uv
    local -a options=(--all-extras)
    [ ! -f "$venv/leasehold-stamp" ] || present_stamp="$(cat "$venv/leasehold-stamp")"
    case "$present_stamp" in "all "*) profile=all ;; esac # a developer's environment keeps everything
    [ ! -x "$venv/bin/pytest" ] || profile=all     # also a developer's environment that was made by hand
    [ "$profile" = all ] || options=(--no-dev --extra media --extra heic --extra embedded)
    if [ -x "$venv/bin/python" ]; then
        case "$present_stamp" in "$(stamp_of "$profile")" | "$(stamp_of all)") return ;; esac
    fi
    python="$(find_python)"
    uv="$(find_uv "$python")"
    say "Making the environment in $venv"
    rm -f "$venv/leasehold-stamp"
    (
        unset VIRTUAL_ENV
        export UV_PROJECT_ENVIRONMENT="$venv" UV_PYTHON_DOWNLOADS=never
        local -a sync=("$uv" sync --quiet --frozen --project "$root" --python "$python")
        # With bytecode, because child processes must not write any: without it each would compile all that it loads. What
        # only tests and development need compiles itself when it is first imported: all of it would take half a minute.
        if [ "$profile" = all ]; then
            "${sync[@]}" --no-dev --inexact --compile-bytecode "${options[@]}"
            "${sync[@]}" "${options[@]}"
        else
            "${sync[@]}" --compile-bytecode "${options[@]}"
        fi
    )
    # The wheel of canaille installs a package `tests`. Child processes have the checkout last on their path, and would
    # import that package instead of the checkout's.
    rm -rf "$venv"/lib/python*/site-packages/tests
    stamp_of "$profile" >"$venv/leasehold-stamp"
}
