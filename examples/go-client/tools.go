//go:build tools

// Names the plugins of generate.sh, so that go.mod pins them.
package main

import (
	_ "connectrpc.com/connect/cmd/protoc-gen-connect-go"
	_ "google.golang.org/protobuf/cmd/protoc-gen-go"
)
