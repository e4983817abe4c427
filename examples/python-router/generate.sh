#!/bin/sh
# Makes the Python stubs in gen/. Argument: a Python with grpcio-tools.
set -eu
cd "$(dirname "$0")"
rm -rf gen && mkdir gen
"${1:-python3}" -m grpc_tools.protoc -I ../../proto --python_out=gen --grpc_python_out=gen ../../proto/baton/v1/*.proto
