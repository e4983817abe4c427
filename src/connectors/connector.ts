import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import type { BodyFacts } from '../core/facts.ts';
import type { Edits } from '../core/json-scan.ts';

/** What a connector may know about an instance that a leg goes to. */
export interface LegTarget {
  readonly instanceId: string;
  /** Base URL of the engine's HTTP server. */
  readonly url: string;
  /** Tokens per KV block; 0 while unknown. */
  readonly blockSize: number;
}

/** Input for the body of a prefill leg. */
export interface PrefillContext {
  readonly facts: BodyFacts;
  readonly target: LegTarget;
  /** True when the body carries `max_completion_tokens`, which engines prefer to `max_tokens`. */
  readonly hasMaxCompletionTokens: boolean;
}

/** Input for reading P's reply. */
export interface PrefillReplyContext {
  readonly prefill: LegTarget;
  readonly decode: LegTarget;
  readonly remoteHost: RemoteHostRule;
}

/** Whose address D is told for P's side channel (`kv.remote_host`). */
export type RemoteHostRule = 'keep' | 'instance' | 'auto';

/** A handle that passed every check, ready to be sent. */
export interface CheckedHandle {
  /** JSON text of the `kv_transfer_params` member, P's own bytes wherever nothing had to change. */
  readonly json: Uint8Array | string;
  readonly params: KvTransferParams;
}

/** What P's reply offered. */
export type PrefillReading =
  | { readonly kind: 'handle'; readonly handle: CheckedHandle }
  /** Nothing to hand over (`absent`) or something that would kill or mislead D (`malformed_…`): D runs alone. */
  | { readonly kind: 'none'; readonly reason: string };

/**
 * How one engine connector hands KV over: pure functions from facts and replies to the edits of a leg's body.
 * One file and one line in `index.ts` each; what happens on the wire is done by the caller.
 */
export interface Connector {
  readonly name: string;
  /** `prefill-then-decode`: D's leg needs P's reply; `aggregated`: there is one leg and nothing is handed over. */
  readonly order: 'prefill-then-decode' | 'aggregated';
  /** What ends P's hold when the client leaves between the legs; `lease`: nothing has to be sent. */
  readonly clientGoneBetweenLegs: 'lease';
  /** Edits that make the client's body a prefill leg. */
  readonly prefill: (context: PrefillContext) => Edits;
  /** Reads and checks the raw `kv_transfer_params` of P's reply (undefined: the reply has none). */
  readonly readPrefillReply: (raw: Uint8Array | undefined, context: PrefillReplyContext) => PrefillReading;
  /** Edits that make the client's body the decode leg for a handle. */
  readonly decode: (handle: CheckedHandle) => Edits;
}
