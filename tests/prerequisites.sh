# For scripts that build the C++ tests: `source tests/prerequisites.sh` in the folder of the project.

has_googletest() {
  printf '#include <gtest/gtest.h>\nTEST(A, B) {}\n' |
    c++ -std=c++17 ${GTest_ROOT:+"-I$GTest_ROOT/include"} -x c++ -fsyntax-only - 2>/dev/null
}

# Takes the package of Debian and Ubuntu: root (or sudo) installs it; others unpack it into the folder $1.
get_googletest() {
  local sudo=()
  [[ $EUID -eq 0 ]] || sudo=(sudo -n)
  if command -v apt-get >/dev/null && { [[ $EUID -eq 0 ]] || sudo -n true 2>/dev/null; }; then
    "${sudo[@]}" apt-get update -qq && "${sudo[@]}" apt-get install -y -qq libgtest-dev
  elif command -v apt-get >/dev/null; then
    mkdir -p "$1"
    (cd "$1" && apt-get download libgtest-dev && dpkg -x libgtest-dev_*.deb .)
    export GTest_ROOT="$1/usr"
  fi
}

# Finds or gets GoogleTest; the folder $1 may be filled with it. Ends the script with a message if there is none.
need_googletest() {
  has_googletest || get_googletest "$1" || true
  if ! has_googletest; then
    echo "$0: GoogleTest was not found; on Debian and Ubuntu run: apt-get install libgtest-dev" >&2
    exit 1
  fi
}

# Python's headers, which torch.compile compiles with. Debian and Ubuntu have them in a package of their own; root (or
# sudo) installs it. Ends the script with a message if there are none. `python` is the environment's, see need_torch.
need_python_headers() {
  local header package="python3-dev" sudo=()
  header="$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h"
  [[ -e "$header" ]] && return 0
  [[ $EUID -eq 0 ]] || sudo=(sudo -n)
  { "${sudo[@]}" apt-get update -qq && "${sudo[@]}" apt-get install -y -qq "$package"; } >/dev/null 2>&1 || true
  if [[ ! -e "$header" ]]; then
    echo "$0: found no $header; on Debian and Ubuntu run: apt-get install $package" >&2
    exit 1
  fi
}

# Commands of Debian's and Ubuntu's packages, as command:package. Installs those that are missing, as root or by sudo.
need_packages() {
  local pair packages=() sudo=()
  for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || packages+=("${pair#*:}")
  done
  ((${#packages[@]})) || return 0
  [[ $EUID -eq 0 ]] || sudo=(sudo -n)
  if ! { "${sudo[@]}" apt-get update -qq && "${sudo[@]}" apt-get install -y -qq "${packages[@]}"; } >/dev/null; then
    echo "$0: found no ${packages[*]}; on Debian and Ubuntu run: apt-get install ${packages[*]}" >&2
    exit 1
  fi
}

# Torch in the active virtual environment; without one, in .venv, which it creates. `python` is then that environment's.
need_torch() {
  if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    [[ -x .venv/bin/python ]] || python3 -m venv .venv
    export VIRTUAL_ENV="$PWD/.venv"
  fi
  export PATH="$VIRTUAL_ENV/bin:$PATH"
  python -c "import torch" 2>/dev/null || python -m pip install -q torch==2.13.0
}

# CMake and Ninja, in build/tools of the project.
need_build_tools() {
  if ! build/tools/bin/python -c "import cmake, ninja" 2>/dev/null; then
    python3 -m venv --clear build/tools
    build/tools/bin/python -m pip install -q "cmake>=3.26" ninja
  fi
  export PATH="$PWD/build/tools/bin:$PATH"
}

# The files of the core Python tests, or nothing if pytest's arguments name a file.
core_tests_unless_given() {
  local argument
  for argument in "$@"; do
    [[ ! -e "${argument%%::*}" ]] || return 0
  done
  python -c 'from tests.wheels.environments import CORE_TESTS
print(*(f"tests/python/{name}.py" for name in CORE_TESTS), sep="\n")'
}
