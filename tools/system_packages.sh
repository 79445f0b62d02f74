#!/usr/bin/env bash
# Debian packages that some tests need: SLURM, shellcheck, a browser. Installs what is missing where
# this is root on Debian; elsewhere says what is missing, and the tests that need it are skipped.
set -euo pipefail

declare -A packages=(
  [slurmctld]=slurmctld [slurmd]=slurmd [sbatch]=slurm-client [munged]=munge
  [shellcheck]=shellcheck [chromium]="chromium fonts-dejavu-core"
)
missing=()
for program in "${!packages[@]}"; do
  command -v "$program" >/dev/null && continue
  read -ra names <<<"${packages[$program]}"
  missing+=("${names[@]}")
done
[ "${#missing[@]}" -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]}; the tests that need them are skipped"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install --quiet --quiet --yes --no-install-recommends "${missing[@]}" >/dev/null; }
# Package lists may be absent or old; not everyone who runs the tests is online.
install 2>/dev/null || { apt-get update --quiet --quiet && install; } ||
  echo "could not install: ${missing[*]}; the tests that need them are skipped"
