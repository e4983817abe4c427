#!/bin/sh
# Makes the Go stubs in gen/. Needs buf, of this repository (npm ci) or of the PATH; the plugins are those of go.mod.
set -eu
cd "$(dirname "$0")"
PATH="../../node_modules/.bin:$PATH"
command -v buf > /dev/null || { echo "$0: needs buf: npm ci in the repository, or https://buf.build/docs/installation" >&2; exit 1; }
rm -rf gen
buf generate ../../proto --path ../../proto/baton/v1/kv_cache_store.proto --include-imports
