#!/usr/bin/env bash
# Installs what the tests need beside Node, where it is missing. Without apt it installs nothing and does not fail: the
# tests then tell what they miss.
set -uo pipefail

missing=()
# A program, and the Debian package that has it.
need() { command -v "$1" >/dev/null || missing+=("$2"); }

need redis-server redis-server
need curl curl
need python3 python3
need go golang-go
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)

if ((${#missing[@]} > 0)) && command -v apt-get >/dev/null; then
  run=()
  if ((EUID != 0)); then run=(sudo -n); fi
  export DEBIAN_FRONTEND=noninteractive
  "${run[@]}" apt-get update -qq && "${run[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
exit 0
