#!/bin/sh
# Makes the Go stubs in gen/. Needs buf; the plugins are those of go.mod.
set -eu
cd "$(dirname "$0")"
rm -rf gen
buf generate ../../proto --path ../../proto/baton/v1/kv_cache_store.proto --include-imports
