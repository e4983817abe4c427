package main

import (
	"crypto/sha256"
	"encoding/binary"

	batonv1 "example.com/go-client/gen/baton/v1"
)

const blockTokens = 64

// buildChain is chain c1: it proves which token ids an engine holds, without telling them (proto/baton/v1/tokens.proto).
func buildChain(ids []uint32, model, adapter, cacheSalt string) *batonv1.TokenChain {
	seed := []byte("baton.c1")
	for _, part := range []string{model, adapter, cacheSalt} {
		seed = binary.LittleEndian.AppendUint32(seed, uint32(len(part)))
		seed = append(seed, part...)
	}
	digest := sha256.Sum256(seed)
	chain := &batonv1.TokenChain{Algorithm: "c1", TokenCount: uint32(len(ids))}
	for ; len(ids) >= blockTokens; ids = ids[blockTokens:] {
		input := append([]byte(nil), digest[:]...)
		for _, id := range ids[:blockTokens] {
			input = binary.LittleEndian.AppendUint32(input, id)
		}
		digest = sha256.Sum256(input)
		chain.Digests = append(chain.Digests, append([]byte(nil), digest[:16]...))
	}
	chain.TailTokenIds = append(chain.TailTokenIds, ids...)
	return chain
}
