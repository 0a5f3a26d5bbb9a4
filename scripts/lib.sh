# Shared by the scripts; to be sourced from the repository's root.

# make_venv EXTRAS: .venv with clusterrun and its extras, as constraints.txt says. Does nothing when it is up to date.
make_venv() {
  local extras="$1" stamp=".venv/.clusterrun-$1" wanted
  wanted="$(cat pyproject.toml constraints.txt | cksum)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  local python="${PYTHON:-python3}"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "clusterrun needs Python 3.10 or newer; this is $("$python" --version). Set PYTHON to another." >&2; exit 2; }
  [ -x .venv/bin/python ] || "$python" -m venv .venv ||
    { echo "can't make a virtual environment; on Debian: apt-get install python3-venv" >&2; exit 2; }
  echo "installing into .venv (a few minutes the first time) ..."
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
  echo "$wanted" > "$stamp"
}
