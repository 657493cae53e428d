# Sourced by scripts/test and scripts/demo: sets $python to a Python of 3.11 or newer, or explains and exits.

python=""
for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 python; do
    # Run it instead of looking for it: version managers leave launchers behind for Pythons that are not there.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    echo "ERROR: this needs Python 3.11 or newer and found none (found: $(python3 --version 2>&1 || true))." >&2
    echo "Install one, for instance 'sudo apt install python3.11 python3.11-venv', or set PYTHON=/path/to/python." >&2
    exit 2
fi
