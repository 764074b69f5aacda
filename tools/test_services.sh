#!/usr/bin/env bash
# Tries to install the Debian packages that some tests use; tests skip where one is missing, so this never fails.
packages=(
    chromium # the pages in a real browser
    fish zsh # the completion in these shells
    slurm-wlm munge # a real Slurm for the launcher
    g++ # DeepSpeed compiles its collectives for the CPU
)
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed, and not root on a Debian machine: ${missing[*]}; the tests that need them are skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet >/dev/null
for package in "${missing[@]}"; do
    apt-get install --quiet --yes --no-install-recommends "$package" >/dev/null ||
        echo "$package could not be installed; the tests that need it are skipped"
done
exit 0
