#!/usr/bin/env bash
# Installs what the tests need beside Node, where it is missing. Without apt it installs nothing and does not fail: the
# tests then tell what they miss.
set -uo pipefail

missing=()
# A program, and the Debian package that has it.
need() { command -v "$1" >/dev/null || missing+=("$2"); }

need redis-server redis-server
need curl curl
need zsh zsh
need fish fish
need mandoc mandoc
need python3 python3
need go golang-go
need systemd-analyze systemd
need promtool prometheus
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)

if ((${#missing[@]} > 0)) && command -v apt-get >/dev/null; then
  run=()
  if ((EUID != 0)); then run=(sudo -n); fi
  export DEBIAN_FRONTEND=noninteractive
  "${run[@]}" apt-get update -qq && "${run[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# Helm, for the tests of the chart, which look there. Its first build takes three minutes on two cores.
if command -v go >/dev/null && ! command -v helm >/dev/null && [[ ! -x "$(go env GOPATH)/bin/helm" ]]; then
  GOFLAGS=-modcacherw go install helm.sh/helm/v3/cmd/helm@v3.19.0 2>/dev/null || echo 'ci-install: helm could not be built' >&2
fi
exit 0
