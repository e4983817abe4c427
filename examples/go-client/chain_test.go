package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

func TestChainVectors(t *testing.T) {
	text, err := os.ReadFile("../../test/fixtures/chain.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Vectors []struct {
			Name, Model, Adapter string
			CacheSalt            string   `json:"cache_salt"`
			TokenIds             []uint32 `json:"token_ids"`
			Chain                struct {
				Digests      []string
				TailTokenIds []uint32 `json:"tail_token_ids"`
				TokenCount   uint32   `json:"token_count"`
			}
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Vectors) < 5 {
		t.Fatal("vectors are missing")
	}
	for _, v := range file.Vectors {
		chain := buildChain(v.TokenIds, v.Model, v.Adapter, v.CacheSalt)
		digests := []string{}
		for _, digest := range chain.Digests {
			digests = append(digests, hex.EncodeToString(digest))
		}
		if fmt.Sprint(digests, chain.TailTokenIds, chain.TokenCount) !=
			fmt.Sprint(v.Chain.Digests, v.Chain.TailTokenIds, v.Chain.TokenCount) {
			t.Errorf("%s: another chain", v.Name)
		}
	}
}
