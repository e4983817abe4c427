package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	batonv1 "example.com/go-client/gen/baton/v1"
	"example.com/go-client/gen/baton/v1/batonv1connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// patience is for calls that no request waits for.
const patience = 2 * time.Second

// Store is a KVCacheStore that a router can do without: when it does not answer in time, a take is a miss.
type Store struct {
	rpc    batonv1connect.KVCacheStoreClient
	budget time.Duration
}

// OpenStore makes a client for a base URL such as http://127.0.0.1:50051; a request waits for it no longer than budget.
func OpenStore(url string, budget time.Duration) *Store {
	return &Store{rpc: batonv1connect.NewKVCacheStoreClient(http.DefaultClient, url), budget: budget}
}

// callKey names a call, so that it can be sent again.
func callKey() string {
	var key [16]byte
	if _, err := rand.Read(key[:]); err != nil {
		panic(err)
	}
	return hex.EncodeToString(key[:])
}

// Put keeps what a finished turn left at its decode engine; ids are those of the prompt and of the reply.
func (s *Store) Put(ctx context.Context, key *batonv1.EntryKey, owner *batonv1.EntryOwner,
	handle *batonv1.KvTransferParams, ids []uint32, blockSize uint32, ttl time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := s.rpc.PutEntry(ctx, connect.NewRequest(&batonv1.PutEntryRequest{
		IdempotencyKey:  callKey(),
		Key:             key,
		Owner:           owner,
		Connector:       "nixl",
		Handle:          handle,
		StoredTokens:    handle.GetRemoteNumTokens(),
		Chain:           buildChain(ids, key.Model, key.Adapter, key.CacheSalt),
		EngineBlockSize: blockSize,
		RemainingTtl:    durationpb.New(ttl),
	}))
	return err
}

// Claim is the right to use a handle once.
type Claim struct {
	// Handle is for the prefill engine, cut where less than the whole is equal.
	Handle *batonv1.KvTransferParams
	// Matched counts the leading tokens that are proven equal.
	Matched uint32

	rpc batonv1connect.KVCacheStoreClient
	id  string
}

// Take claims the handle with the longest proven prefix, or tells why there is none: a MissReason, or the code of the
// call that failed.
func (s *Store) Take(ctx context.Context, key *batonv1.EntryKey, prompt []uint32) (*Claim, string) {
	ctx, cancel := context.WithTimeout(ctx, s.budget)
	defer cancel()
	answer, err := s.rpc.TakeEntry(ctx, connect.NewRequest(&batonv1.TakeEntryRequest{
		IdempotencyKey: callKey(),
		Key:            key,
		Prompt:         &batonv1.TakeEntryRequest_TokenIds{TokenIds: &batonv1.TokenIds{TokenIds: prompt}},
	}))
	if err != nil {
		return nil, "store " + connect.CodeOf(err).String()
	}
	taken := answer.Msg.GetTaken()
	if taken == nil {
		return nil, strings.TrimPrefix(answer.Msg.GetMiss().GetReason().String(), "MISS_REASON_")
	}
	claim := &Claim{Handle: taken.Handle, Matched: taken.MatchedTokens, rpc: s.rpc, id: taken.ClaimId}
	if taken.MatchedTokens < taken.Entry.StoredTokens {
		claim.Handle = cut(taken.Handle, taken.MatchedTokens, taken.Entry.EngineBlockSize)
	}
	return claim, ""
}

// cut shortens a handle, count and blocks together: with the count alone the engine would read wrong blocks.
func cut(handle *batonv1.KvTransferParams, tokens, blockSize uint32) *batonv1.KvTransferParams {
	short := proto.Clone(handle).(*batonv1.KvTransferParams)
	short.RemoteNumTokens = &tokens
	group := short.RemoteBlockIds.Groups[0]
	group.Ids = group.Ids[:(tokens+blockSize-1)/blockSize]
	return short
}

// Commit says that the handle was used, or may have been. A claim whose end is not heard counts as committed.
func (c *Claim) Commit() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := c.rpc.CommitClaim(ctx, connect.NewRequest(&batonv1.CommitClaimRequest{ClaimId: c.id}))
	return err
}

// Release puts the handle back; only for one that provably never reached an engine.
func (c *Claim) Release() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := c.rpc.ReleaseClaim(ctx, connect.NewRequest(&batonv1.ReleaseClaimRequest{ClaimId: c.id, Reason: "not_sent"}))
	return err
}
