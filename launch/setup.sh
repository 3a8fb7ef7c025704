# Sourced by quickstart.sh and test.sh: makes .venv once and installs what the given requirement files name.

set_up() {
    local marker
    [[ -x .venv/bin/python ]] || "${PYTHON:-python3}" -m venv .venv
    marker=".venv/.installed-$(cat "$@" | cksum | cut -d' ' -f1)"
    if [[ ! -e $marker ]]; then
        echo "installing $* into .venv (PyTorch is large: this takes minutes the first time)"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check $(printf -- '-r %s ' "$@")
        touch "$marker"
    fi
}
