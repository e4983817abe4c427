// Command go-client puts a handle into a KVCacheStore and takes it, rightly and wrongly. Argument: the store's base URL.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"connectrpc.com/connect"
	batonv1 "example.com/go-client/gen/baton/v1"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: go-client http://HOST:PORT")
	}
	// A router would wait 20 ms; this program only shows answers.
	store := OpenStore(os.Args[1], 10*time.Second)
	if err := show(context.Background(), store); err != nil {
		log.Fatal(err)
	}
}

func show(ctx context.Context, store *Store) error {
	key := &batonv1.EntryKey{Model: "m", ConversationId: "go"}
	owner := &batonv1.EntryOwner{
		InstanceId: "d1", EngineId: "e_dp0", Incarnation: &batonv1.Incarnation{EngineId: "e"},
	}
	handle := &batonv1.KvTransferParams{
		DoRemoteDecode:  proto.Bool(true),
		RemoteEngineId:  proto.String("e_dp0"),
		RemoteRequestId: proto.String("r1"),
		RemoteHost:      proto.String("10.0.0.2"),
		RemotePort:      proto.Uint32(5601),
		RemoteNumTokens: proto.Uint32(100),
		RemoteBlockIds:  &batonv1.KvBlockIds{Groups: []*batonv1.KvBlockGroup{{Ids: []uint32{1, 2, 3, 4, 5, 6, 7}}}},
	}
	turn := make([]uint32, 100)
	for i := range turn {
		turn[i] = uint32(i)
	}
	next := append(append([]uint32(nil), turn...), 7, 7, 7)
	put := func() error { return store.Put(ctx, key, owner, handle, turn, 16, 450*time.Second) }

	if err := put(); err != nil {
		return err
	}
	claim, miss := store.Take(ctx, key, next)
	if claim == nil {
		return errors.New("first take: " + miss)
	}
	fmt.Println("first take:", claim.Matched, proto.Equal(claim.Handle, handle))
	_, miss = store.Take(ctx, key, next)
	fmt.Println("second take:", miss)
	if err := claim.Release(); err != nil {
		return err
	}
	// The next prompt differs from token 70 on: only the blocks before it may be read.
	claim, miss = store.Take(ctx, key, append(append([]uint32(nil), turn[:70]...), next[100:]...))
	if claim == nil {
		return errors.New("take of a part: " + miss)
	}
	fmt.Println("a part:", claim.Handle.GetRemoteNumTokens(), len(claim.Handle.RemoteBlockIds.Groups[0].Ids))
	if err := claim.Commit(); err != nil {
		return err
	}
	if err := put(); err != nil {
		return err
	}
	_, miss = store.Take(ctx, key, next[1:])
	fmt.Println("wrong prompt:", miss)
	_, err := store.rpc.TakeEntry(ctx, connect.NewRequest(&batonv1.TakeEntryRequest{IdempotencyKey: "none", Key: key}))
	fmt.Println("no prompt:", reasonOf(err))
	return nil
}

// reasonOf is the machine-readable reason of an error of baton.
func reasonOf(err error) string {
	var failure *connect.Error
	if errors.As(err, &failure) {
		for _, detail := range failure.Details() {
			if value, err := detail.Value(); err == nil {
				if info, ok := value.(*errdetails.ErrorInfo); ok {
					return info.Reason
				}
			}
		}
	}
	return fmt.Sprint(err)
}
